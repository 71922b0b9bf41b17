"""The league of docs/league.md: every way to make a model better, on two tasksets.

    python benchmarks/league.py                                         # SmolLM2, two CPU cores
    python benchmarks/league.py --model FOLDER_OR_ID                    # another model in process
    python benchmarks/league.py --fleet http://127.0.0.1:8000 --model FOLDER_OR_ID

Each entrant has the same budget of answer tokens and three seeds. The settings below are not the
defaults; they were chosen on the words of `rookery new league`. Printed is a table of Markdown for
each league: reward on the report tasks, the gain over the untouched model paired by task (95 %),
and the seconds of a seed. Repeat the command to resume a killed league.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import rookery
from rookery.reports import LeagueReport
from rookery.runs.run_folder import EVENTS

__all__: list[str] = []

DRAWN = {"scorer": {"type": "exact", "ignore_case": True, "ignore_punctuation": True}}
TASKSETS: dict[str, dict[str, Any]] = {
    "language": {"type": "generated", "generator": "label-language"}
    | DRAWN
    | {"sampling": {"max_tokens": 4}},
    "arithmetic": {"type": "generated", "generator": "arithmetic"}
    | {"sampling": {"max_tokens": 24}},
}
SPLITS = {"splits": {"search": 0.4, "select": 0.2, "report": 0.4}}
SETTINGS: dict[str, Any] = {
    "sft": {"layers": 8, "learning_rate": 0.003},
    "grpo": {"groups_per_step": 8, "learning_rate": 0.0003},
    "es": {
        "stages": [{"type": "es", "rank": 1, "num_pairs": 4, "tasks_per_step": 16, "steps": 1000}]
    },
    "genome": {"stages": [{"type": "random", "count": 6}]},
    "prompt": {"llm": {"temperature": 1.0, "max_tokens": 64}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--fleet", default="", help="a vLLM server that serves the model")
    parser.add_argument("--tokens", type=int, default=20_000, help="the budget of each seed")
    parser.add_argument("--size", type=int, default=160, help="tasks; two of five are reported on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasksets", nargs="+", choices=TASKSETS, default=list(TASKSETS))
    parser.add_argument("--folder", type=Path, default=Path("runs/league"))
    options = parser.parse_args()
    for taskset in options.tasksets:
        report = play(taskset, options)
        print(f"\n{taskset}, {Path(options.model).name}, {options.tokens} answer tokens a seed\n")
        print(table(report), flush=True)


def play(taskset: str, options: argparse.Namespace) -> LeagueReport:
    """Run or resume the league."""
    folder = options.folder / Path(options.model).name
    if (folder / taskset / EVENTS).exists():
        report = rookery.resume(folder / taskset).report
        assert isinstance(report, LeagueReport)
        return report
    engine: dict[str, Any] = {"type": "embedded", "model": options.model}
    if options.fleet:
        engine = {"type": "fleet", "urls": [options.fleet]}
    folder.mkdir(parents=True, exist_ok=True)
    tasks = folder / f"{taskset}.yaml"
    tasks.write_text(json.dumps(TASKSETS[taskset] | SPLITS | {"size": options.size}))
    return rookery.run_league(
        {
            "engine": engine,
            "tokenizer": options.model if options.fleet else "",
            "taskset": str(tasks),
            "budget": {"max_answer_tokens": options.tokens},
            "num_seeds": options.seeds,
            "settings": SETTINGS,
        },
        name=taskset,
        runs_dir=folder,
    ).report


def table(report: LeagueReport) -> str:
    """The rows as Markdown, then the entrants left out."""
    lines = ["| entrant | reward | gain | seconds |", "|---|---|---|---|"]
    for row in report.rows:
        gain = row.gain and f"{row.gain.mean:+.3f} ({row.gain.low:+.3f} to {row.gain.high:+.3f})"
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        lines.append(f"| {row.name} | {row.mean:.3f} | {gain or ''} | {seconds} |")
    left_out = [f"{entrant.name}: {entrant.reason}" for entrant in report.left_out]
    return "\n".join([*lines, *left_out])


if __name__ == "__main__":
    main()
