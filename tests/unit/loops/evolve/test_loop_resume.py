"""Resuming an evolution: whatever kills it, every attempt is decided once, no answer paid twice."""

import asyncio
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import forked, run_code
from loops.evolve.toy import (
    ToyExecutor,
    decided_states,
    evolve_toy,
    propose,
    propose_new,
    read_best,
    toy_config,
    toy_model,
)

from rookery.loops.evolve.report import export_population
from rookery.runs import Run
from rookery.testing import FakeTextModel
from rookery.types import Job, TextRequest

DETERMINISTIC = {"mode": "deterministic", "lag": 6}
STRATEGIES = pytest.mark.parametrize("strategy", ["adaptive", "openevolve"])


def read_export(folder: Path) -> str:
    with Run.view(folder / "toy") as view:
        return export_population(view)


def _random_delays(seed: int) -> Callable[[Job], float]:
    rng = random.Random(seed)
    return lambda _: rng.random() * 0.01


@STRATEGIES
async def test_deterministic_runs_are_equal_for_any_number_of_workers(
    tmp_path: Path, strategy: str
) -> None:
    texts = []
    for workers in (1, 16):
        config = toy_config(
            max_iterations=50,
            database={"strategy": strategy},
            rookery={**DETERMINISTIC, "workers": workers, "in_flight": 2 + workers},
        )
        executor = ToyExecutor(delay_s=_random_delays(workers))
        await evolve_toy(tmp_path / str(workers), config, executor=executor)
        texts.append(read_export(tmp_path / str(workers)))
    assert texts[0].count("\n") == 51
    assert texts[0] == texts[1]


class CancelAfter:
    """An executor's delay that cancels the evolution at its n-th job."""

    def __init__(self, task: "asyncio.Task[object]", num_jobs: int) -> None:
        self._task = task
        self._left = num_jobs

    def __call__(self, _: object) -> float:
        self._left -= 1
        if self._left == 0:
            self._task.cancel()
        return 0.001


@pytest.mark.parametrize(
    ("mode", "strategy"), [("steady", "openevolve"), ("deterministic", "adaptive")]
)
async def test_a_cancelled_run_goes_on_where_it_was(
    tmp_path: Path, mode: str, strategy: str
) -> None:
    config = toy_config(
        max_iterations=40,
        database={"strategy": strategy},
        rookery={**DETERMINISTIC, "mode": mode},
    )
    await evolve_toy(tmp_path / "whole", config)
    model = toy_model()
    num_sessions = 0
    for num_jobs in (1, 3, 2, 7, 5, 10_000):
        task = asyncio.current_task()
        assert task is not None
        executor = ToyExecutor(delay_s=CancelAfter(task, num_jobs))
        try:
            await evolve_toy(tmp_path / "cut", config, model=model, executor=executor)
        except asyncio.CancelledError:
            task.uncancel()
            num_sessions += 1
    assert num_sessions == 5
    states = decided_states(tmp_path / "cut")
    assert sorted(states) == list(range(1, 41))
    assert all(len(set(recorded)) == len(recorded) for recorded in states.values())
    assert len(model.requests) <= 40 + num_sessions * config.rookery.in_flight
    if mode == "deterministic":
        assert read_export(tmp_path / "cut") == read_export(tmp_path / "whole")


async def test_a_finished_run_gives_the_same_report_again(tmp_path: Path) -> None:
    config = toy_config(database={"strategy": "adaptive"})
    first = await evolve_toy(tmp_path, config)
    model, executor = toy_model(), ToyExecutor()
    again = await evolve_toy(tmp_path, config, model=model, executor=executor)
    assert not model.requests and not executor.jobs
    same = {"seconds": None}
    assert again.model_copy(update=same) == first.model_copy(update=same)


async def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    config = toy_config(rookery=DETERMINISTIC)
    await evolve_toy(tmp_path, config)
    longer = toy_config(max_iterations=35, rookery=DETERMINISTIC)
    with Run.open(tmp_path / "toy") as run:
        run.extend(longer.model_dump(mode="json"), may_change=["max_iterations"])
    model = toy_model()
    result = await evolve_toy(tmp_path, longer, model=model)
    assert len(model.requests) == 15
    assert result.num_iterations == 35
    await evolve_toy(tmp_path / "whole", longer)
    assert read_export(tmp_path) == read_export(tmp_path / "whole")


async def test_a_lost_evaluation_does_not_ask_the_model_again(tmp_path: Path) -> None:
    model = toy_model()
    executor = ToyExecutor(is_lost=lambda job: job.epoch % 2 == 0)
    result = await evolve_toy(tmp_path, toy_config(), model=model, executor=executor)
    assert len(model.requests) == 20
    assert result.num_workers_lost > 0
    assert not [failure for failure in result.failures if failure.kind == "poison"]


async def test_an_answer_is_paid_once_when_the_evaluation_was_cut(tmp_path: Path) -> None:
    """Killed while all children wait for their evaluation: their answers are kept."""
    config = toy_config(max_iterations=4)
    model = toy_model(propose_new)
    stuck = StuckAfterFirst(num_jobs=2)
    task = asyncio.ensure_future(evolve_toy(tmp_path, config, model=model, executor=stuck))
    await asyncio.wait_for(stuck.is_reached.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    num_paid = _states(tmp_path).count("generated")
    assert num_paid >= 2
    num_asked = len(model.requests)
    await evolve_toy(tmp_path, config, model=model)
    assert len(model.requests) == num_asked + 4 - num_paid
    assert sorted(decided_states(tmp_path)) == [1, 2, 3, 4]


class StuckAfterFirst(ToyExecutor):
    """Scores the first program, and none of the jobs after it."""

    def __init__(self, *, num_jobs: int) -> None:
        super().__init__(delay_s=self._delay)
        self.is_reached = asyncio.Event()
        self._left = num_jobs

    def _delay(self, job: Job) -> float:
        if job.attempt <= 0:
            return 0.0
        self._left -= 1
        if self._left == 0:
            self.is_reached.set()
        return 1000.0


def _states(folder: Path) -> list[str]:
    if not (folder / "toy" / "events.db").exists():
        return []
    try:
        return [state for states in decided_states(folder).values() for state in states]
    except (sqlite3.Error, OSError):
        return []


SESSION = """
import asyncio, sys
from pathlib import Path
from forked import kill_at_event
from loops.evolve.toy import ToyExecutor, evolve_toy, propose, toy_config, toy_model

folder, calls, num_events = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
if num_events:
    kill_at_event(num_events)

def reply(request):
    with calls.open("a") as file:
        file.write("call\\n")
    return propose(request)

config = toy_config(max_iterations=80, rookery={"mode": sys.argv[3], "lag": 6})
executor = ToyExecutor(delay_s=lambda job: 0.005)
asyncio.run(evolve_toy(folder, config, model=toy_model(reply), executor=executor))
"""


@pytest.mark.parametrize(("mode", "num_kills"), [("steady", 1), ("deterministic", 2)])
def test_a_killed_process_resumes_exactly(tmp_path: Path, mode: str, num_kills: int) -> None:
    """SIGKILL after a random number of events, again and again, until the run finishes."""
    rng = random.Random(7)
    calls, folder = tmp_path / "calls", tmp_path / "killed"
    words = (SESSION, str(folder), str(calls), mode)
    for _ in range(num_kills):
        with forked(run_code, *words, str(rng.randrange(2, 30))) as process:
            assert process.wait() == -signal.SIGKILL
        assert _has_best_if_begun(folder)
    with forked(run_code, *words, "0") as process:
        assert process.wait() == 0
    states = decided_states(folder)
    assert sorted(states) == list(range(1, 81))
    assert all(len(set(recorded)) == len(recorded) for recorded in states.values())
    num_calls = len(calls.read_text().splitlines())
    assert num_calls <= 80 + num_kills * 4
    assert read_best(folder)["id"]
    if mode == "deterministic":
        config = toy_config(max_iterations=80, rookery={"mode": mode, "lag": 6})
        asyncio.run(evolve_toy(tmp_path / "whole", config))
        assert read_export(folder) == read_export(tmp_path / "whole")


def _has_best_if_begun(folder: Path) -> bool:
    """`best` is there as soon as an attempt was planned."""
    has_attempts = "planned" in _states(folder)
    return (folder / "toy" / "best").is_dir() or not has_attempts


async def test_seeds_repeat_for_an_attempt_that_is_asked_again(tmp_path: Path) -> None:
    """Killed during the model call: the same attempt asks the same again."""
    asked: dict[int, list[str]] = {}

    def reply(request: TextRequest) -> str:
        assert request.seed is not None
        asked.setdefault(request.seed, []).append(request.messages[-1].content)
        return propose(request)

    config = toy_config(max_iterations=10)
    model = FakeTextModel(reply, name="toy")
    for num_jobs in (3, 10_000):
        task = asyncio.current_task()
        assert task is not None
        executor = ToyExecutor(delay_s=CancelAfter(task, num_jobs))
        try:
            await evolve_toy(tmp_path, config, model=model, executor=executor)
        except asyncio.CancelledError:
            task.uncancel()
    assert len(asked) == 10
    assert all(len(set(prompts)) == 1 for prompts in asked.values())
