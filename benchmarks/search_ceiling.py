"""Training as a ceiling for genome's search: an adapter by `rookery sft` on the search tasks.

    python benchmarks/search_ceiling.py CONFIG MODEL [--fleet URL]

CONFIG is the family that `benchmarks/search_tasks.py` wrote. The adapter has the settings of its
founders and trains on the tasks that the search may see. Its number is the mean of the tasksets'
means on the report tasks, as in the rows of `search_quality.py`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from search_tasks import SETTINGS

from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import JsonlConfig, Taskset, load_tasksets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("model")
    parser.add_argument("--fleet", default="", help="a server that measures, with the model")
    parser.add_argument("--steps", default="80")
    options = parser.parse_args()
    tasksets = read(options.config)
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        write(scratch / "search.jsonl", tasksets, "search")
        run("sft", options.model, f"{scratch}/search.jsonl?scorer.type=choice", f"{scratch}/out",
            "--split", "all", *SETTINGS, "--steps", options.steps)  # fmt: skip
        means = []
        for taskset in tasksets:
            write(scratch / f"{taskset.name}.jsonl", [taskset], "report")
            means.append(measure(options, scratch, taskset.name))
            print(f"{taskset.name:12} {means[-1]:.3f}", flush=True)
    print(f"trained on the search tasks: {statistics.fmean(means):.3f}")


def read(config: Path) -> list[Taskset]:
    tasksets = yaml.safe_load(config.read_text())["tasksets"]
    for own in tasksets:
        own["path"] = str(config.parent / own["path"])
    return load_tasksets([JsonlConfig.model_validate(own) for own in tasksets])


def write(path: Path, tasksets: Sequence[Taskset], split: SplitName) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"{taskset.name}/{task.id}", "prompt": task.prompt, "choices": task.choices,
         "reference": task.reference}
        for taskset in tasksets for task in taskset.split(split)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(options: argparse.Namespace, scratch: Path, name: str) -> float:
    fleet = ["--fleet", options.fleet] if options.fleet else []
    found = run(
        "eval", options.model, f"{scratch}/{name}.jsonl?scorer.type=choice", "--adapter",
        f"{scratch}/out", "--runs-dir", f"{scratch}/runs", "--json", *fleet,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(found)["models"]
    mean: float = rows[-1]["mean"]
    return mean


def run(*words: str) -> str:
    command = [sys.executable, "-m", "rookery", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
