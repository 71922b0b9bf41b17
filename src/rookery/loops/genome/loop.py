"""The genome loop.

    founders = adapters from files, zero or random, and pair merges
    measure(founders)                                    # search split
    for stage in stages: stage searches on               # ga, es, cmaes; search split
    winner = best of the finalists                       # select split
    report(winner, baselines)                            # report split, read once

Everything is a function of (config, seed) and of the answers, and every answer is in the run's
event log before it counts. So resuming is running again: what was answered is not asked twice.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.loops.engines import EngineChoice
from rookery.loops.genome.finals import Entrant, Finals, FinalsConfig
from rookery.loops.genome.founders import FileInit, InitConfig
from rookery.loops.genome.journal import Generation, Journal
from rookery.loops.genome.nursery import Nursery
from rookery.loops.genome.stages import STAGES, GaStage, Scene, StageConfig
from rookery.loops.genome.trials import Trials
from rookery.ports import Adapters
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.search.founders import pair_plans
from rookery.search.racing import RaceConfig
from rookery.tasks.taskset import Taskset, TasksetConfig, from_folder
from rookery.types import Adapter, ModelRef, Task
from rookery.weights import write_adapter
from rookery.weights.merge import (
    DareConfig,
    DareTiesConfig,
    ExtrapolateConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    SlerpConfig,
    TiesConfig,
)
from rookery.weights.mutate import GaussianConfig, MutateConfig, SvdConfig

__all__ = ["GenomeConfig", "GenomeResult", "Hatchery", "evolve"]

logger = logging.getLogger(__name__)

MERGES: Mapping[str, MergeConfig] = {
    "linear": LinearConfig(),
    "sum": LinearConfig(normalise=False),
    "ties": TiesConfig(),
    "dare": DareConfig(),
    "dare_ties": DareTiesConfig(),
    "slerp": SlerpConfig(),
    "layerwise": LayerwiseConfig(),
    "extrapolate": ExtrapolateConfig(),
}
"""The crossovers that operators can name; a config may change them or add its own."""

MUTATIONS: Mapping[str, MutateConfig] = {"gaussian": GaussianConfig(), "svd": SvdConfig()}


class GenomeConfig(Config):
    """One evolution of LoRA adapters."""

    engine: EngineChoice = EngineConfig()
    tokenizer: str = ""
    """A model folder or Hugging Face id; empty: the engine's model. Needed with servers by URL."""
    init: InitConfig
    tasksets: tuple[TasksetConfig, ...] = Field(min_length=1)
    stages: tuple[StageConfig, ...] = (GaStage(),)
    """How to search, one after another."""
    race: RaceConfig = RaceConfig()
    """Dropping candidates that can no longer survive; `enabled: false` measures all on all."""
    floors: dict[str, float | Literal["founder"]] = Field(default_factory=dict)
    """"Do not get worse on this taskset": a mean, or `founder` for the best founder's."""
    rank: int | None = Field(default=None, ge=1)
    """The children's rank; null takes the founders' largest."""
    merges: dict[str, MergeConfig] = Field(default_factory=dict)
    """Changes and additions to the crossovers by name."""
    mutations: dict[str, MutateConfig] = Field(default_factory=dict)
    """Changes and additions to the mutations by name."""
    made_on: Literal["cpu", "cuda"] = "cpu"
    """Where children are made. `cuda`, the first GPU here, is for servers on this machine: whole
    layers (`ties`, `dare`) keep its cores busy for seconds, which the servers need. It takes about
    2 GB there beside them. The last bits of a child depend on it."""
    finals: FinalsConfig = FinalsConfig()
    seed: int = 0

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for stage in self.stages:
            if isinstance(stage, GaStage):
                _require(stage.merges, {*MERGES, *self.merges}, "crossover")
                _require(stage.mutations, {*MUTATIONS, *self.mutations}, "mutation")
                if stage.population.objective == "pareto" and self.race.enabled:
                    raise ValueError(
                        "objective pareto compares every taskset by itself, and a race only the "
                        "weighted score: write race: {enabled: false}"
                    )
        return self

    def from_folder(self, folder: Path) -> "GenomeConfig":
        """The config with the paths in it taken from the folder of its file."""
        init = self.init
        if isinstance(init, FileInit):
            path = (folder / init.path.expanduser()).resolve()
            init = init.model_copy(update={"path": path})
        tasksets = tuple(from_folder(taskset, folder) for taskset in self.tasksets)
        return self.model_copy(update={"init": init, "tasksets": tasksets})


@dataclass(frozen=True, slots=True)
class Hatchery:
    """What the loop runs on: a sampler behind an evaluator, where adapters are loaded, the base."""

    evaluator: TasksetEvaluator
    adapters: Adapters
    base: ModelRef
    max_rank: int
    is_elsewhere: bool = False
    """The engine computes on other hardware: candidates are asked while others are made."""


@dataclass(frozen=True, slots=True)
class GenomeResult:
    """The winner and the report about it."""

    winner: Adapter
    report: dict[str, Any]


async def evolve(
    config: GenomeConfig,
    *,
    founders: Mapping[str, Adapter],
    tasksets: Sequence[Taskset],
    hatchery: Hatchery,
    run: Run,
    on_generation: Callable[[Generation], None] | None = None,
) -> GenomeResult:
    """Run or resume one evolution in `run`, which is left with winner, lineage and report."""
    nursery = _open_nursery(config, founders)
    trials = _open_trials(config, tasksets, hatchery, nursery)
    journal = Journal(
        run, nursery=nursery, evaluator=hatchery.evaluator, on_generation=on_generation
    )
    await _measure_founders(config, nursery, trials, journal)
    _set_floors(config, trials, nursery)
    for index, stage in enumerate(config.stages):
        scene = Scene(nursery, trials, journal, config.seed, index)
        await STAGES[stage.type](stage, scene)
    searched = list(trials.measured)
    rows, winner = await _finish(config, tasksets, hatchery, nursery, trials)
    _save(run, nursery, winner, rows)
    report = {
        "kind": "genome",
        "run": run.name,
        "model": hatchery.base.version,
        "seed": config.seed,
        "tasksets": [_describe(taskset) for taskset in tasksets],
        "rows": rows,
        "generations": [asdict(g) for g in journal.restore_costs()],
        "lineage": _graph(nursery, trials, searched, winner),
        "winner": winner,
        "num_candidates": len(searched),
        **journal.costs(),
        "warnings": _warnings(trials),
    }
    run.write_json("report.json", report)
    return GenomeResult(winner=nursery.adapter(winner), report=report)


def _open_nursery(config: GenomeConfig, founders: Mapping[str, Adapter]) -> Nursery:
    return Nursery(
        founders,
        merges={**MERGES, **config.merges},
        mutations={**MUTATIONS, **config.mutations},
        rank=config.rank or max(adapter.rank for adapter in founders.values()),
        device=config.made_on,
    )


def _open_trials(
    config: GenomeConfig, tasksets: Sequence[Taskset], hatchery: Hatchery, nursery: Nursery
) -> Trials:
    return Trials(
        hatchery.evaluator,
        adapters=hatchery.adapters,
        nursery=nursery,
        tasks=_split(tasksets, "search"),
        weights=_weights(tasksets),
        race=config.race,
        is_elsewhere=hatchery.is_elsewhere,
    )


async def _measure_founders(
    config: GenomeConfig, nursery: Nursery, trials: Trials, journal: Journal
) -> None:
    """Founders see every task: they are the baseline."""
    names = list(nursery.founders)
    if isinstance(config.init, FileInit) and config.init.use != "adapters":
        plans = pair_plans(names, count=config.init.num_pairs, seed=config.seed)
        nursery.plan(plans)
        names = [*names, *(plan.id for plan in plans)]
    measured = await trials.measure(names, rivals=(), seed=config.seed, keep=len(names))
    if isinstance(config.init, FileInit) and config.init.use == "pairs":
        logger.info("the founders themselves are measured as baselines, the pairs begin")
    journal.record("founders", measured)


def _set_floors(config: GenomeConfig, trials: Trials, nursery: Nursery) -> None:
    for source, floor in config.floors.items():
        means = [trials.means(f).get(source) for f in nursery.founders]
        best = max((mean for mean in means if mean is not None), default=0.0)
        trials.floors[source] = best if floor == "founder" else floor


async def _finish(
    config: GenomeConfig,
    tasksets: Sequence[Taskset],
    hatchery: Hatchery,
    nursery: Nursery,
    trials: Trials,
) -> tuple[list[dict[str, Any]], str]:
    """Choose on `select`, compare on `report`."""
    settings = config.finals
    finals = Finals(
        hatchery.evaluator,
        adapters=hatchery.adapters,
        base=hatchery.base,
        nursery=nursery,
        trials=trials,
        weights=_weights(tasksets),
    )
    select, report = _split(tasksets, "select"), _split(tasksets, "report")
    num_searched = len(trials.measured)
    ranked = await finals.choose(finals.finalists(settings.num_finalists), select)
    founders = finals.founders()
    entrants = [
        Entrant("evolved", nursery.adapter(ranked[0]), ranked[0]),
        Entrant("best founder", nursery.adapter(founders[0]), founders[0]),
        *finals.merged(hatchery.max_rank),
    ]
    if settings.random_search and len(nursery.founders) > 1:
        found = await finals.random_search(
            num_searched, seed=config.seed, finalists=settings.num_finalists, tasks=select
        )
        note = f"best of {num_searched}"
        entrants.append(Entrant("random search", nursery.adapter(found), note))
    entrants.append(Entrant("base model", None))
    panels = {
        "vote of founders": founders[: settings.num_voters],
        "vote of finalists": ranked[: settings.num_voters],
    }
    return await finals.report(entrants, panels, report, seed=config.seed), ranked[0]


def _save(run: Run, nursery: Nursery, winner: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Winner as a PEFT folder, founders and lineage beside it."""
    run.write_folder("winner", lambda path: write_adapter(nursery.adapter(winner), path))

    def write_founders(path: Path) -> None:
        for name in nursery.founders:
            write_adapter(nursery.adapter(name), path / name)

    run.write_folder("founders", write_founders)
    run.write_json("lineage.json", nursery.lineage())
    if run.get("winner", "winner") is None:
        version = nursery.adapter(winner).version
        run.append("winner", {"id": winner, "version": version, "rows": list(rows)}, key="winner")


def _graph(
    nursery: Nursery, trials: Trials, searched: Sequence[str], winner: str
) -> list[dict[str, Any]]:
    """The searched candidates as nodes: founders first, then as they were made."""
    ancestors, queue = {winner}, [winner]
    while queue:
        recipe = nursery.recipes.get(queue.pop())
        parents = recipe.parents if recipe is not None else ()
        queue.extend(p for p in parents if p not in ancestors)
        ancestors.update(parents)
    graph = []
    for name in searched:
        recipe = nursery.recipes.get(name)
        graph.append(
            {
                "id": name,
                "generation": recipe.generation if recipe is not None else 0,
                "operator": recipe.operator if recipe is not None else "founder",
                "parents": list(recipe.parents) if recipe is not None else [],
                "weights": list(recipe.weights) if recipe is not None else [],
                "score": trials.measured[name].fitness.score,
                "is_winner": name == winner,
                "is_ancestor": name in ancestors,
            }
        )
    return graph


def _warnings(trials: Trials) -> list[str]:
    failed = [m.error for m in trials.measured.values() if m.error]
    if not failed:
        return []
    return [f"{len(failed)} candidates failed and lost. The first error: {failed[0]}"]


def _describe(taskset: Taskset) -> dict[str, Any]:
    sizes = {f"num_{s}": len(taskset.split(s)) for s in ("search", "select", "report")}
    return {"name": taskset.name, "weight": taskset.weight, **sizes}


def _split(tasksets: Sequence[Taskset], name: Literal["search", "select", "report"]) -> list[Task]:
    return [task for taskset in tasksets for task in taskset.split(name)]


def _weights(tasksets: Sequence[Taskset]) -> dict[str, float]:
    return {taskset.name: taskset.weight for taskset in tasksets}


def _require(names: set[str], known: set[str], what: str) -> None:
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(
            f"{what} {unknown[0]!r} is not known; write one of {', '.join(sorted(known))}"
        )
