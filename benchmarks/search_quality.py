"""Quality of genome's search: its winner beside random search and others, over many seeds.

    python benchmarks/search_quality.py CONFIG [CONFIG ...] [--url http://127.0.0.1:8001]
        [--variants shipped "random by reward"] [--seeds 0 1 2 3] [--minutes 20]

CONFIG is a config of `rookery genome run`, such as `benchmarks/search_demo.yaml` or the one that
`benchmarks/search_tasks.py` writes: a family of tasks. Each variant in VARIANTS is that config with
a few keys changed. Every variant runs under every seed, `--parallel` at a time, on the config's
engine or on the named servers, family after family within a seed. `--minutes` therefore cuts off
the last seeds of all families. Each run is compared with its best founder, its founders' average
and its finalists' vote. Further variants are `random by ...` (equally many candidates: the
founders, their average and random sums of them, with the winner chosen in the same two steps by the
merit in the name), `cmaes` (coefficients, one per founder) and `genome` (the published schedule).
Every variant is compared with all random searches.

The gain over random search is the mean over seeds with its 95 % interval (Student's t). A seed
changes both searches; the report tasks stay the same. `--causes N` also prints the causes of loss
for the first N seeds (`benchmarks/search_causes.py`).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import yaml
from search_causes import find_causes

from rookery import RookeryError
from rookery.compose.genome import run_genome
from rookery.search.merit import Merit

GENERATIONS, POPULATION, CHILDREN = 5, 6, 10

LAYERS = (
    {"type": "crossover", "name": "layers", "num_parents": 3, "share": 2, "weights": "uniform"},
    {"type": "crossover", "name": "layers", "share": 2, "weights": "uniform"},
    {"type": "crossover", "name": "mixture", "share": 1, "weights": "uniform"},
    {"type": "crossover", "name": "sum", "share": 1, "weights": "free", "reach": 0.2},
)
"""The operators of the demo."""
SUMS = (
    {"type": "crossover", "name": "sum", "share": 2, "weights": "free"},
    {"type": "crossover", "name": "linear", "share": 1, "weights": "random"},
    {"type": "crossover", "name": "ties", "share": 0.5, "weights": "fitness"},
    {"type": "mutation", "name": "gaussian", "share": 1},
)
"""Operators that merge whole adapters, and mutation."""
MERGES = {
    "layers": {"type": "layerwise", "mode": "pick", "unit": "layer"},
    "mixture": {"type": "layerwise", "mode": "mix", "unit": "layer"},
}


def ga(
    operators: Sequence[Mapping[str, Any]],
    *,
    generations: int = GENERATIONS,
    selection: str = "tournament",
    **population: Any,
) -> dict[str, Any]:
    """Config of a genetic stage of the common size."""
    own = [dict(operator) for operator in operators]
    children = {"count": CHILDREN, "operators": own, "selection": {"type": selection}}
    size = {"size": POPULATION, "children": children, **population}
    return {"type": "ga", "generations": generations, "population": size}


def searched(*stages: Mapping[str, Any], merit: str = "certainty", **keys: Any) -> dict[str, Any]:
    """Changes that give a config these stages and no random search."""
    stages_ = [dict(stage) for stage in stages]
    finals = {"random_search": False, **keys}
    return {"merit": merit, "merges": MERGES, "stages": stages_, "finals": finals}


RANDOM = {merit: f"random by {merit}" for merit in get_args(Merit)}
"""Names of the random-search variants, by the merit that chooses the winner."""
RANDOM_FIRST = {"type": "random", "count": 20}
BLOCKS = {"type": "cmaes", "generations": 3, "population": 10, "unit": "block"}
SURROGATE = {"type": "surrogate", "generations": 3, "population": 10}
FEW_FIRST = {"type": "random", "count": 10}
OFTEN = {"type": "surrogate", "generations": 8, "population": 5}
ES = {"type": "es", "steps": 2, "num_pairs": 4, "sigma": 0.05}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "shipped": {"finals": {"random_search": False}},
    **{
        f"shipped by {merit}": {"merit": merit, "finals": {"random_search": False}}
        for merit in ("log_certainty", "reward")
    },
    **{
        name: searched({"type": "random", "count": 50}, merit=merit)
        for merit, name in RANDOM.items()
    },
    "reward": searched(ga(LAYERS), merit="reward"),
    "certainty": searched(ga(LAYERS)),
    "log certainty": searched(ga(LAYERS), merit="log_certainty"),
    "sums": searched(ga(SUMS)),
    "sums, reward": searched(ga(SUMS), merit="reward"),
    "all operators": searched(ga((*LAYERS, *SUMS))),
    "random first": searched(RANDOM_FIRST, ga(LAYERS, generations=3)),
    "random first, log": searched(RANDOM_FIRST, ga(LAYERS, generations=3), merit="log_certainty"),
    "random, blocks": searched(RANDOM_FIRST, BLOCKS, merit="log_certainty"),
    "surrogate": searched(RANDOM_FIRST, SURROGATE, merit="log_certainty"),
    "surrogate of sums": searched(
        RANDOM_FIRST, {**SURROGATE, "unit": "model"}, merit="log_certainty"
    ),
    "surrogate, negative": searched(
        RANDOM_FIRST, {**SURROGATE, "low": -0.5}, merit="log_certainty"
    ),
    "surrogate, certainty": searched(RANDOM_FIRST, SURROGATE),
    "often, of sums": searched(FEW_FIRST, {**OFTEN, "unit": "model"}, merit="log_certainty"),
    "often, to 2.5": searched(FEW_FIRST, {**OFTEN, "high": 2.5}, merit="log_certainty"),
    "both splits": searched(ga(LAYERS), evidence="both"),
    "es last": searched(ga(LAYERS, generations=3), ES),
    "cmaes first": searched(
        {"type": "cmaes", "generations": 2, "population": 10}, ga(LAYERS, generations=3)
    ),
    "blocks": searched({"type": "cmaes", "generations": 5, "population": 10, "unit": "block"}),
    "blocks last": searched(
        ga(LAYERS, generations=3),
        {"type": "cmaes", "generations": 2, "population": 10, "unit": "block"},
    ),
    "cmaes": searched({"type": "cmaes", "generations": 5, "population": 10}),
    "genome": {
        "merit": "reward",
        "merges": {"linear": {"type": "linear", "space": "factor"}},
        "stages": [
            ga(
                [{"type": "crossover", "name": "linear", "weights": "fitness"}],
                generations=3,
                selection="roulette",
            )
        ],
        "finals": {"random_search": False},
    },
}
"""Changes to the config by name. All variants measure about equally many candidates."""

T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 1, 2, ... degrees of freedom; callers use 2.1 beyond."""

ROWS = ("evolved", "best founder", "uniform average", "vote of finalists")
CAUSES = ("oracle", "correlation", "overfit", "choice", "dropped")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run: mean of every row on the report tasks, and the cost of the search."""

    family: str
    variant: str
    seed: int
    means: Mapping[str, float]
    num_rollouts: int
    seconds: float
    causes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to make."""

    family: str
    variant: str
    seed: int
    config: Mapping[str, Any]
    has_causes: bool
    folder: Path
    out: Path | None
    end: float
    """Clock time after which the run is not started."""


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the changes into the config, recursively."""
    result = dict(config)
    for key, value in changes.items():
        is_nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = changed(result[key], value) if is_nested else value
    return result


def run_one(case: Case) -> Outcome | None:
    """Run a case in a worker process; None if it failed or no time was left."""
    if time.time() > case.end:
        return None
    words = f"{case.family} {case.variant} {case.seed}"
    name = words.replace("/", "-").replace(" ", "-").replace(",", "")
    config = {**case.config, "seed": case.seed}
    began = time.monotonic()
    try:
        report = run_genome(config, name=name, runs_dir=case.folder, progress=False).report
        seconds = time.monotonic() - began
        causes = asyncio.run(find_causes(case.folder / name)) if case.has_causes else {}
    except RookeryError as error:
        print(f"{name}: {error}", flush=True)
        return None
    rows = {row.name: row for row in report.rows if row.name in ROWS}
    failed = [row for row in rows.values() if row.mean is None]
    if failed:
        print(f"{name}: {failed[0].name} failed on {failed[0].num_failed} tasks", flush=True)
        return None
    outcome = Outcome(
        family=case.family,
        variant=case.variant,
        seed=case.seed,
        means={r: mean for r, own in rows.items() if (mean := own.mean) is not None},
        num_rollouts=rows["evolved"].num_rollouts,
        seconds=seconds,
        causes=causes,
    )
    shown = "  ".join(f"{row} {mean:.3f}" for row, mean in outcome.means.items())
    print(f"{case.family} {case.variant:15} seed {case.seed}  {shown}  {seconds:.0f} s", flush=True)
    save(outcome, case.out)
    return outcome


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, float("nan"), float("nan")
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = (*T_975, 2.1)[min(len(differences) - 2, len(T_975))] * error
    return mean, mean - half, mean + half


def show(outcomes: Sequence[Outcome]) -> None:
    """Print means over seeds, and gains over the random searches of the same seeds by merit."""
    heads = ("runs", "evolved", "founder", "average", "vote")
    gains = "".join(f"{f'over random search by {merit}':>42}" for merit in RANDOM)
    print(f"\n{'':15}" + "".join(f"{head:>9}" for head in heads) + gains)
    randoms = {(o.variant, o.seed): o.means["evolved"] for o in outcomes}
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.variant == variant]
        means = [
            statistics.fmean([o.means[row] for o in of if row in o.means] or [float("nan")])
            for row in ROWS
        ]
        line = f"{variant:15}{len(of):>9}" + "".join(f"{value:9.3f}" for value in means)
        for random in RANDOM.values():
            found = [
                o.means["evolved"] - randoms[random, o.seed]
                for o in of
                if (random, o.seed) in randoms
            ]
            line += f"{say(found):>42}"
        wins = sum(o.means["evolved"] > o.means["best founder"] for o in of)
        answers = statistics.fmean(o.num_rollouts for o in of)
        print(f"{line}   beats the best founder {wins} of {len(of)}   {answers:.0f} answers")
    show_causes(outcomes)


def say(gains: Sequence[float]) -> str:
    if not gains:
        return "not measured"
    mean, low, high = interval(gains)
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}), {len(gains)} seeds"


def show_causes(outcomes: Sequence[Outcome]) -> None:
    known = [outcome for outcome in outcomes if "oracle" in outcome.causes]
    if known:
        print(f"\n{'':15}" + "".join(f"{head:>12}" for head in ("runs", *CAUSES)))
    for variant in dict.fromkeys(outcome.variant for outcome in known):
        of = [outcome.causes for outcome in known if outcome.variant == variant]
        values = [statistics.fmean(own[cause] for own in of) for cause in CAUSES]
        print(f"{variant:15}{len(of):>12}" + "".join(f"{value:12.3f}" for value in values))
        for operator in sorted({name for own in of for name in own["operators"]}):
            found = [own["operators"][operator] for own in of if operator in own["operators"]]
            gains = [statistics.fmean(each[at] for each in found) for at in ("search", "report")]
            count = sum(each["children"] for each in found)
            print(f"    {operator:20}{count:5} children, gain {gains[0]:+.3f}, {gains[1]:+.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG")
    parser.add_argument("--url", nargs="*", default=[], help="servers; runs are dealt out to them")
    parser.add_argument("--tokenizer", default="", help="a folder, where servers are named")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--causes", type=int, default=0, help="seeds whose losses are looked into")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="no run is begun after it")
    parser.add_argument("--out", type=Path, help="outcomes as JSON lines; those there are not run")
    options = parser.parse_args()
    outcomes = read(options.out)
    known = {(outcome.family, outcome.variant, outcome.seed) for outcome in outcomes}
    with tempfile.TemporaryDirectory() as place:
        every = cases_of(options, Path(place))
        cases = [case for case in every if (case.family, case.variant, case.seed) not in known]
        with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool:
            for outcome in pool.map(run_one, cases):
                outcomes += [] if outcome is None else [outcome]
    order = {variant: index for index, variant in enumerate(VARIANTS)}
    outcomes.sort(key=lambda outcome: (order[outcome.variant], outcome.seed))
    for family in dict.fromkeys(outcome.family for outcome in outcomes):
        print(f"\n{family}")
        show([outcome for outcome in outcomes if outcome.family == family])


def read(out: Path | None) -> list[Outcome]:
    """Load the outcomes that earlier calls saved."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def save(outcome: Outcome, out: Path | None) -> None:
    if out is not None:
        with out.open("a") as lines:
            lines.write(json.dumps(asdict(outcome)) + "\n")


def cases_of(options: argparse.Namespace, scratch: Path) -> list[Case]:
    """Cases for every variant, family and seed, ordered by seed and dealt out to the servers."""
    families = {f"{path.parent.name}/{path.stem}": read_config(path) for path in options.configs}
    end = time.time() + 60 * options.minutes
    served = [
        {"engine": {"type": "fleet", "urls": [url]}, "tokenizer": options.tokenizer}
        for url in options.url
    ]
    engines = cycle(served or [{}])
    return [
        Case(
            family=family,
            variant=variant,
            seed=seed,
            config={**changed(config, VARIANTS[variant]), **next(engines)},
            has_causes=place < options.causes,
            folder=scratch,
            out=options.out,
            end=end,
        )
        for place, seed in enumerate(options.seeds)
        for family, config in families.items()
        for variant in options.variants
    ]


def read_config(path: Path) -> dict[str, Any]:
    """Read a config and make its paths absolute."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    for part in (config["init"], *config["tasksets"]):
        if "path" in part:
            part["path"] = str((path.parent.absolute() / part["path"]).resolve())
    return config


if __name__ == "__main__":
    main()
