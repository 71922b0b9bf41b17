"""A whole evolution on the tiny model."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.embedded import EngineConfig, run_engine
from rookery.errors import EngineError
from rookery.fleet import Fleet
from rookery.loops.genome import GenomeConfig, GenomeInputs, evolve
from rookery.loops.genome.founders import FileInit, make_founders, read_founders
from rookery.ports import UNOBSERVED, Observer
from rookery.reports import GenerationRecord, GenomeReport
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Event, Run
from rookery.slots import SlottedModel
from rookery.tasks.taskset import load_taskset
from rookery.tasks.template import load_template
from rookery.types import Adapter, Completion, ModelRef, SampleRequest, Score, ScoreRequest
from rookery.weights import read_adapter

SEARCHED = {"num_finalists": 3, "num_voters": 3}
"""Finals with a random search as a baseline, which takes most of the time of such a small run."""


@dataclass(frozen=True)
class Evolved:
    """What an evolution found and left in its run."""

    report: GenomeReport
    path: Path

    def events(self, kind: str) -> list[Event]:
        with Run.view(self.path) as run:
            return list(run.events(kind))

    @property
    def candidates(self) -> dict[str, Mapping[str, Any]]:
        """By id."""
        return {event.key: event.payload for event in self.events("candidate")}

    @property
    def lineage(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.path / "lineage.json").read_text())
        return document

    @property
    def founders(self) -> list[Adapter]:
        return [read_adapter(folder) for folder in sorted((self.path / "founders").iterdir())]


Genome = Callable[..., Awaitable[Evolved]]
"""What the fixture `genome` is: begins or resumes a run, `name` of the test's own folder."""


@dataclass(frozen=True)
class Inputs:
    """The folders that an evolution reads."""

    model: Path
    founders: Path
    tasks: Path

    def document(self, **changes: object) -> dict[str, object]:
        """A config; keyword arguments change it."""
        return {
            "engine": {"model": str(self.model)},
            "init": {"type": "file", "path": str(self.founders)},
            "tasksets": [
                {"type": "jsonl", "path": str(self.tasks / f"{name}.jsonl"), "name": name}
                for name in ("first", "second")
            ],
            "stages": [
                {"type": "ga", "generations": 2,
                 "population": {"size": 4, "children": {"count": 4}}}
            ],
            "finals": {**SEARCHED, "random_search": False},
            **changes,
        }  # fmt: skip


async def evolve_in(root: Path, name: str = "a", **options: Any) -> Evolved:
    """Begin the run, or go on with it."""
    path = root / name
    is_new = not path.exists()
    opened = Run.create(root, kind="genome", config={}, name=name) if is_new else Run.open(path)
    with opened as run:
        return Evolved(await run_evolution(run, **options), path)


async def run_evolution(
    run: Run,
    *,
    inputs: Inputs,
    model: SlottedModel,
    fleet: Fleet | None = None,
    wrap: Callable[[Any], Any] = lambda engine: engine,
    observer: Observer[GenerationRecord] = UNOBSERVED,
    **changes: object,
) -> GenomeReport:
    """Run or resume. `wrap` is given the engine and returns what the loop runs on."""
    config = GenomeConfig.model_validate(inputs.document(**changes))
    tasksets = [load_taskset(taskset) for taskset in config.tasksets]
    embedded = run_engine(
        model,
        config=EngineConfig(model=str(inputs.model)),
        detokenize=lambda tokens: str(tokens),
        name="tiny",
    )
    async with nullcontext(fleet) if fleet else embedded as opened:
        engine = wrap(opened)
        evaluator = TasksetEvaluator(
            engine,
            template=load_template(inputs.model),
            tasksets=tasksets,
            log=RolloutLog(run),
        )
        if isinstance(config.init, FileInit):
            founders = read_founders(config.init)
        else:
            layers = engine.linear_layers
            founders = make_founders(config.init, layers=layers, base="tiny", seed=config.seed)
        loop_inputs = GenomeInputs(
            config=config, founders=founders, tasksets=tasksets, evaluator=evaluator
        )
        return await evolve(loop_inputs, engine=engine, run=run, observer=observer)


class Faulty:
    """An engine some of whose answers and loads fail, chosen by a hash of what they are for."""

    def __init__(
        self, engine: Any, *, share: float, load_share: float = 0.0, salt: str = ""
    ) -> None:
        self._engine = engine
        self._share = share
        self._load_share = load_share
        self._salt = salt
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _pass(self, share: float, *what: object) -> None:
        digest = hashlib.blake2b(repr((self._salt, what)).encode(), digest_size=4).digest()
        if int.from_bytes(digest, "big") < share * 2**32:
            self.num_faults += 1
            raise EngineError(f"A fault was planted ({digest.hex()}).")

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        for request in requests:
            self._pass(self._share, request.model.version, request.prompt)
        return await self._engine.sample(requests)  # type: ignore[no-any-return]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        for request in requests:
            self._pass(self._share, request.model.version, request.tokens)
        return await self._engine.score(requests)  # type: ignore[no-any-return]

    async def load(self, adapter: Adapter) -> ModelRef:
        # The founders are loaded anew in every generation's baselines: they stay loadable.
        if not adapter.name.startswith("f"):
            # By name: the last bits of weights differ between machines.
            self._pass(self._load_share, "load", adapter.name)
        return await self._engine.load(adapter)  # type: ignore[no-any-return]


def clockless(report: GenomeReport) -> GenomeReport:
    """A report without what the clock says, and without the run's name."""
    rows = tuple(row.model_copy(update={"seconds": None}) for row in report.rows)
    generations = tuple(g.model_copy(update={"seconds": None}) for g in report.generations)
    update = {"run": "", "seconds": None, "rows": rows, "generations": generations}
    return report.model_copy(update=update)
