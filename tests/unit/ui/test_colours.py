"""Lines of a chart are told apart with every kind of colour vision, on light and on dark."""

import re
from itertools import combinations

import numpy as np
import pytest

from rookery.ui.live.export import read_file

VISIONS = {
    "all colours": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""How linear red, green and blue are seen: Machado, Oliveira and Fernandes, 2009."""
TO_XYZ = np.array([[0.434, 0.376, 0.190], [0.213, 0.715, 0.072], [0.018, 0.109, 0.873]])
"""Relative to white."""


def lab(colour: str, vision: str) -> np.ndarray:
    """CIELAB, in which a distance of 2 is just seen."""
    given = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(VISIONS[vision]) @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize(("name", "place"), [("HUES", 0), ("DARK_HUES", 1)])
def test_no_two_lines_look_alike(name: str, place: int, vision: str) -> None:
    accent = re.findall(r"--accent: (#\w{6})", read_file("page.css"))[place]
    hues = re.search(rf"const {name} = \[(.*)\]", read_file("charts.js"))
    assert hues
    colours = [accent, *re.findall(r"#\w{6}", hues[1])]
    assert len(colours) == 7
    for first, second in combinations(colours, 2):
        assert np.linalg.norm(lab(first, vision) - lab(second, vision)) > 15, (first, second)
