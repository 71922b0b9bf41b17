"""How good the search of genome is: its winner beside random search and others, over many seeds.

    python benchmarks/search_quality.py CONFIG [--url http://127.0.0.1:8001] [--seeds 0 1 2 3]

CONFIG is a config of `rookery genome run`, such as `configs/demo.yaml`. Each variant in VARIANTS is
that config with a few keys changed; every variant runs under every seed, `--parallel` at a time,
on the config's engine or on the servers named. The peers are rows of each run's own report: random
search with as many candidates, chosen in the same way, the best founder, the founders' average, the
finalists' vote. `cmaes` searches coefficients, one per founder, with as many candidates.

The gain over random search is the mean over seeds with its 95 % interval (Student's t): a seed
changes the search and the random search, the report tasks stay the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "shipped": {},
    "certainty 0.5": {"certainty": 0.5},
    "certainty 1": {"certainty": 1.0},
    "10 finalists": {"finals": {"num_finalists": 10}},
    "averages": {"finals": {"merge_finalists": 3}},
    "both splits": {"finals": {"evidence": "both"}},
    "all": {
        "certainty": 0.5,
        "finals": {"num_finalists": 10, "merge_finalists": 3, "evidence": "both"},
    },
    "cmaes": {"stages": [{"type": "cmaes", "generations": 5, "population": 10}]},
}
"""Changes to the config, by name."""

T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 1, 2, ... degrees of freedom; 2.1 beyond."""

ROWS = ("evolved", "random search", "best founder", "uniform average", "vote of finalists")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: the mean on the report tasks of every row, and what the search took."""

    variant: str
    seed: int
    means: Mapping[str, float]
    num_rollouts: int
    seconds: float


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the changes, folder by folder."""
    result = dict(config)
    for key, value in changes.items():
        is_nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = changed(result[key], value) if is_nested else value
    return result


def run_one(config: Mapping[str, Any], *, variant: str, seed: int, folder: Path) -> Outcome:
    """The command, in a process of its own."""
    name = f"{variant.replace(' ', '-')}-{seed}"
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**config, "seed": seed}))
    words = ["genome", "run", str(file), "--name", name, "--runs-dir", str(folder / "runs")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rookery", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    report = json.loads((folder / "runs" / name / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    outcome = Outcome(
        variant=variant,
        seed=seed,
        means={name: rows[name]["mean"] for name in ROWS if name in rows},
        num_rollouts=rows["evolved"]["num_rollouts"],
        seconds=time.monotonic() - began,
    )
    shown = "  ".join(f"{row} {mean:.3f}" for row, mean in outcome.means.items())
    print(f"{variant:15} seed {seed}  {shown}  {outcome.seconds:.0f} s", flush=True)
    return outcome


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, float("nan"), float("nan")
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = (*T_975, 2.1)[min(len(differences) - 2, len(T_975))] * error
    return mean, mean - half, mean + half


def show(outcomes: Sequence[Outcome]) -> None:
    heads = ("evolved", "random", "founder", "average", "vote")
    print(f"\n{'':15}" + "".join(f"{head:>9}" for head in heads) + "   gain over random search")
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.variant == variant]
        means = [statistics.fmean(o.means.get(row, float("nan")) for o in of) for row in ROWS]
        gains = [o.means["evolved"] - o.means["random search"] for o in of]
        mean, low, high = interval(gains)
        wins = sum(o.means["evolved"] > o.means["best founder"] for o in of)
        print(
            f"{variant:15}" + "".join(f"{value:9.3f}" for value in means)
            + f"   {mean:+.3f} ({low:+.3f} to {high:+.3f})"
            + f"   beats the best founder {wins} of {len(of)}"
            + f"   {statistics.fmean(o.num_rollouts for o in of):.0f} answers"
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--url", nargs="*", default=[], help="servers; runs are dealt out to them")
    parser.add_argument("--tokenizer", default="", help="a folder, where servers are named")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no run is begun after it")
    parser.add_argument("--out", type=Path, help="the outcomes as JSON lines")
    options = parser.parse_args()
    config = yaml.safe_load(options.config.read_text())
    folder = options.config.parent.absolute()
    if config["init"]["type"] == "file":
        config["init"]["path"] = str((folder / config["init"]["path"]).resolve())
    urls = cycle(options.url or [""])
    outcomes: list[Outcome] = []
    end = time.monotonic() + options.limit_s

    def work(case: tuple[int, str, str], scratch: Path) -> None:
        seed, variant, url = case
        if time.monotonic() > end:
            return
        own = changed(config, VARIANTS[variant])
        if url:
            own |= {"engine": {"type": "fleet", "urls": [url]}, "tokenizer": options.tokenizer}
        outcomes.append(run_one(own, variant=variant, seed=seed, folder=scratch))
        if options.out:
            options.out.write_text("\n".join(json.dumps(vars_of(o)) for o in outcomes) + "\n")

    cases = [(seed, variant, next(urls)) for seed in options.seeds for variant in options.variants]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.parallel) as pool:
        for _ in pool.map(lambda case: work(case, Path(place)), cases):
            pass
    order = {variant: index for index, variant in enumerate(options.variants)}
    show(sorted(outcomes, key=lambda outcome: (order[outcome.variant], outcome.seed)))


def vars_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "variant": outcome.variant,
        "seed": outcome.seed,
        "means": dict(outcome.means),
        "num_rollouts": outcome.num_rollouts,
        "seconds": outcome.seconds,
    }


if __name__ == "__main__":
    main()
