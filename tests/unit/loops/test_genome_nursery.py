"""Where candidates are made, and what is said when they cannot be."""

import pytest
import torch
from weights.made import made

from rookery.errors import AdapterError
from rookery.loops.genome import nursery as nursery_module
from rookery.loops.genome.nursery import Nursery, rebuild
from rookery.search.candidate import ChildPlan
from rookery.weights.merge import TiesConfig

PLAN = ChildPlan(
    id="g001-c00",
    generation=1,
    parents=("x", "y"),
    weights=(0.5, 0.5),
    merge="ties",
    mutation=None,
    sigma=0.1,
    seed_key=7,
)


def open_nursery(device: str = "cpu") -> Nursery:
    founders = {"x": made(1), "y": made(2)}
    nursery = Nursery(founders, merges={"ties": TiesConfig()}, mutations={}, rank=3, device=device)
    nursery.plan([PLAN])
    return nursery


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_made_on_one() -> None:
    with pytest.raises(AdapterError, match="no GPU here: write made_on: cpu"):
        open_nursery("cuda")


def test_a_full_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(nursery_module, "merge", full)
    with pytest.raises(AdapterError, match=r"Making g001-c00: Tried .* write made_on: cpu"):
        open_nursery().adapter("g001-c00")


def test_the_device_is_part_of_the_lineage() -> None:
    nursery = open_nursery()
    child = nursery.adapter("g001-c00")
    lineage = nursery.lineage()
    assert lineage["device"] == "cpu"
    founders = [nursery.adapter("x"), nursery.adapter("y")]
    assert rebuild(lineage, founders, "g001-c00").version == child.version
    del lineage["device"]
    assert rebuild(lineage, founders, "g001-c00").version == child.version, "of older runs"
