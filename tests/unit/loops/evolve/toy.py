"""A toy evolution: programs are `x = <number>`, the score is how near x is to 100.

The model doubles or adds by its prompt; the evaluator runs in this process or in a worker.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.compat import openevolve
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.learning import Learner
from rookery.loops.evolve.loop import EvolveInputs, evolve
from rookery.loops.evolve.parts import Iteration, Models
from rookery.loops.evolve.problem import EvaluationRequest, FirstProgram
from rookery.loops.evolve.program import ProgramRecord
from rookery.ports import UNOBSERVED, Embedder, Executor, Observer, TextModel
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.sandbox import EvaluationOutcome, Failure, encode_outcome
from rookery.testing import FakeTextModel
from rookery.types import Job, JobDone, JobOutcome, TextRequest, WorkerInfo, WorkerLost

FIRST = FirstProgram(code="x = 1\n", language="python", suffix=".py")
_NUMBER = re.compile(r"x = (-?\d+)")


def toy_config(**values: Any) -> EvolveConfig:
    """Small islands; whole programs as answers. `rookery` is merged over ours."""
    own = {"in_flight": 4, "workers": 2, **values.pop("rookery", {})}
    document = {
        "max_iterations": 20,
        "diff_based_evolution": False,
        "checkpoint_interval": 10,
        "llm": {"retries": 1, "retry_delay": 0.0},
        "database": {"num_islands": 2, "population_size": 50, "migration_interval": 5},
        **values,
        "rookery": own,
    }
    return EvolveConfig.model_validate(document)


def number_in(text: str) -> int:
    found = _NUMBER.search(text)
    assert found is not None, text
    return int(found[1])


def parent_of(request: TextRequest) -> int:
    """The number of the program that a prompt asks to improve."""
    user = request.messages[-1].content
    return number_in(user[user.index("# Current Program") :])


def propose(request: TextRequest) -> str:
    """A child that depends on the whole prompt and on the seed, and on nothing else."""
    text = request.messages[-1].content + str(request.seed)
    step = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "big") % 9 - 2
    return f"```python\nx = {parent_of(request) + step}\n```"


def propose_new(request: TextRequest) -> str:
    """A child that nobody proposed before."""
    return f"```python\nx = {request.seed}\n```"


def toy_model(reply: Callable[[TextRequest], str | None] = propose) -> FakeTextModel:
    return FakeTextModel(reply, name="toy")


def toy_outcome(code: str) -> EvaluationOutcome:
    """What the evaluator says of a program. Some numbers stand for trouble."""
    x = number_in(code)
    if x % 13 == 12:
        failure = Failure(kind="error", reason=f"x is {x}.")
        return EvaluationOutcome(
            metrics={}, artifacts={}, seconds=0.01, output_tail="", failure=failure
        )
    return EvaluationOutcome(
        metrics={"combined_score": 1 - abs(100 - x) / 100, "x": float(x)},
        artifacts={"note": f"x was {x}"},
        seconds=0.01,
        output_tail="",
    )


class ToyExecutor:
    """An Executor in this process that can be told to lose workers and to be slow."""

    def __init__(
        self,
        outcome: Callable[[str], EvaluationOutcome] = toy_outcome,
        *,
        is_lost: Callable[[Job], bool] = lambda job: False,
        delay_s: Callable[[Job], float] = lambda job: 0.0,
    ) -> None:
        self._outcome = outcome
        self._is_lost = is_lost
        self._delay_s = delay_s
        self.jobs: list[Job] = []
        self.num_running = 0
        self.most_running = 0
        self.capacity = 16
        self.num_late = 0
        self.workers: tuple[WorkerInfo, ...] = (WorkerInfo(name="toy"),)

    async def submit(self, job: Job) -> JobOutcome:
        self.jobs.append(job)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self._delay_s(job))
        finally:
            self.num_running -= 1
        if self._is_lost(job):
            return WorkerLost(reason="It was told to be lost.", worker="toy")
        output = encode_outcome(self._outcome(EvaluationRequest.decode(job.payload).code))
        return JobDone(output=output, seconds=0.0, worker="toy")

    def cancel(self, attempt: int) -> None:
        pass

    async def close(self) -> None:
        pass


def open_toy_run(folder: Path, config: EvolveConfig, *, name: str = "toy") -> Run:
    """Create the run, or open it again."""
    if (folder / name).exists():
        return Run.open(folder / name)
    return Run.create(folder, kind="evolve", name=name, config=config.model_dump(mode="json"))


async def evolve_toy(
    folder: Path,
    config: EvolveConfig,
    *,
    programs: Sequence[FirstProgram | ProgramRecord] = (FIRST,),
    model: TextModel | None = None,
    models: Mapping[str, TextModel] | None = None,
    executor: Executor | None = None,
    observer: Observer[Iteration] = UNOBSERVED,
    embedder: Embedder | None = None,
    learner: Learner | None = None,
) -> EvolveReport:
    """One session in the run `toy` of a folder. `model` is the only one of `models`."""
    inputs = EvolveInputs(
        config=config,
        programs=programs,
        executor=executor or ToyExecutor(),
        output_format=openevolve,
    )
    models = models or {"toy": model or toy_model()}
    engine = Models(models=models, embedder=embedder, learner=learner)
    with open_toy_run(folder, config) as run:
        return await evolve(inputs, engine=engine, run=run, observer=observer)


def decided_states(folder: Path) -> dict[int, list[str]]:
    """Every state that each attempt was recorded in, in order, without leases."""
    states: dict[int, list[str]] = {}
    with Run.view(folder / "toy") as view:
        for event in view.events("attempt"):
            if event.payload["state"] != "leased":
                states.setdefault(event.payload["number"], []).append(event.payload["state"])
    return states


def read_best(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (folder / "toy" / "best" / "best_program_info.json").read_text()
    )
    return document
