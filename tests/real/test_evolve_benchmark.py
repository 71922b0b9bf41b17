"""The benchmark with a real proposer, played by a scripted model with canned answers. A minute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evolve_command import require_sandbox
from marks import long
from scripted import serve_scripted

pytestmark = pytest.mark.timeout(300)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEARCH = """def search(function, low, high, num_calls):
    places = [low + (high - low) * (i + 0.5) / 10 for i in range(10)]
    points = [(x, y) for x in places for y in places]
    return min(points[:num_calls], key=lambda p: function(*p))
"""
PACK = """def pack():
    return [(i / 6 + 1 / 12, j / 6 + 1 / 12, 1 / 12.001) for i in range(6) for j in range(6)][:26]
"""
OVERLAPPING = PACK.replace("1 / 12.001", "1 / 11.999")
DECREASING = """def pack(sizes, capacity):
    bins = []
    for size in sorted(sizes, reverse=True):
        for items in bins:
            if sum(items) + size <= capacity:
                items.append(size)
                break
        else:
            bins.append([size])
    return bins
"""


@long
def test_all_arms_of_all_tasks_are_in_the_table(tmp_path: Path) -> None:
    require_sandbox()
    programs = (SEARCH, PACK, OVERLAPPING, DECREASING)
    answers = [*(f"Better:\n```python\n{program}```" for program in programs), "I cannot help."]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    with serve_scripted("--latency", 0.05, "--answers", tmp_path / "answers.json") as model:
        words = ("--base-url", model.url, "--model", "scripted", "--out", tmp_path / "out.json")
        sizes = (
            *("--iterations", 12, "--choose-iterations", 8, "--seeds", 1),
            *("--in-flight", 4, "--workers", 1),
        )
        ended = subprocess.run(
            [sys.executable, str(BENCHMARKS / "evolve_gpu.py"), *map(str, (*words, *sizes))],
            capture_output=True, text=True, timeout=280, check=False,
            env={**os.environ, "OPENEVOLVE_EXAMPLES": ""},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "asked this way: whole" in ended.stdout, "diffs all fail"
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["task"] for result in results] == ["function_minimization", "circle_packing"]
    for result in results:
        assert not result["is_cut"]
        evolve, *baselines = (result["arms"][n] for n in ("evolve", "best_of_n", "sequential"))
        assert evolve["num_iterations"] == 12 and evolve["tokens"] == 12 * 120
        assert [arm["tokens"] for arm in baselines] == [12 * 120] * 2
        assert sum(evolve["failures"].values()) >= 1
    packing = results[1]["arms"]["evolve"]
    assert packing["best"] == pytest.approx(26 / 12.001 / 2.635), "no overlap counts"
    assert "evolve improved in 1 of 1" in ended.stdout
