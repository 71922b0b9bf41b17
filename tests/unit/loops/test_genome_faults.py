"""Faults and kills: a resumed evolution decides as the one that was not stopped."""

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from loops.evolution import Faulty, Inputs, clockless, run_evolution
from marks import long

from rookery.errors import FleetDownError
from rookery.reports import GenomeReport
from rookery.runs import Event, NewEvent, Run, RunView
from rookery.slots import SlottedModel
from rookery.testing import FakeObserver

Evolution = Callable[..., Awaitable[GenomeReport]]

RACE = {"enabled": True, "block": 4}
SUMS: list[dict[str, Any]] = [
    {"type": "random", "count": 4},
    {"type": "cmaes", "generations": 1, "population": 3, "unit": "block"},
    {"type": "surrogate", "generations": 1, "population": 3},
    {"type": "ga", "generations": 1, "population": {"size": 4, "children": {"count": 3}}},
]
STEPS: list[dict[str, Any]] = [
    {"type": "random", "count": 3},
    {"type": "es", "steps": 3, "num_pairs": 2},
    {"type": "surrogate", "generations": 2, "population": 3},
]
POPULATION = {"type": "es", "steps": 2, "population": 6, "rank": 1, "tasks_per_step": 8}
STAGES: dict[str, dict[str, Any]] = {
    "drawn": {},
    "sums": {"stages": SUMS},
    "population": {"stages": [POPULATION]},
}


class Killed(BaseException):
    """Ends a run as a signal would: nothing catches it."""


def create(root: Path, name: str) -> Run:
    return Run.create(root, kind="genome", config={}, name=name)


def decided(run: RunView) -> list[Any]:
    """Everything a run recorded, without clocks and without its openings, in order of the keys:
    answers arrive in any order."""
    events = []
    for event in run.events():
        payload = {k: v for k, v in event.payload.items() if k != "seconds"}
        if not event.kind.startswith("run/"):
            events.append((event.kind, event.key, json.dumps(payload, sort_keys=True)))
    return sorted(events)


@contextmanager
def killed_at(run: Run, number: int, *, is_stored: bool) -> Iterator[None]:
    """The append of this number kills, before it stores anything or after."""
    numbers = count(1)
    with killed_when(run, lambda: next(numbers) == number, is_stored=is_stored):
        yield


@contextmanager
def killed_in(run: Run, phase: str, *, is_stored: bool) -> Iterator[FakeObserver]:
    """The first append of a phase kills. Yields who must be told of the phases."""
    observer = FakeObserver()
    with killed_when(run, lambda: observer.phases[-1:] == [phase], is_stored=is_stored):
        yield observer


@contextmanager
def killed_when(run: Run, is_due: Callable[[], bool], *, is_stored: bool) -> Iterator[None]:
    submit = run.submit

    def watched(news: Sequence[NewEvent]) -> Future[list[Event]]:
        is_last = is_due()
        if is_last and not is_stored:
            raise Killed
        stored = submit(news)
        if is_last:
            stored.result()
            raise Killed
        return stored

    run.submit = watched  # type: ignore[method-assign]
    try:
        yield
    except BaseException as error:
        if not _is_killed(error):
            raise
    run.close()


def _is_killed(error: BaseException) -> bool:
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, Killed) or any(map(_is_killed, group))


@pytest.fixture
def scored_badly(inputs: Inputs, tmp_path: Path) -> dict[str, Any]:
    """Two tasksets, one of which is judged by a function that raises on some answers."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def reward(task, completion):\n"
        "    if sum(completion.tokens) % 47 == 0:\n"
        "        raise ValueError('this answer cannot be judged')\n"
        "    return float(sum(completion.tokens) % 2)\n"
    )
    return {
        "tasksets": [
            {"type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "name": "first"},
            {
                "type": "jsonl",
                "path": str(inputs.tasks / "second.jsonl"),
                "name": "second",
                "scorer": {"type": "python", "function": f"{scorer}:reward"},
                "sampling": {"max_tokens": 2},
            },
        ],
        "race": RACE,
        "floors": {"first": "founder"},
        "finals": {"num_finalists": 2, "num_voters": 2, "random_search": False},
    }


@pytest.mark.parametrize(
    ("salt", "stages"),
    [
        ("c", "population"),
        *(pytest.param(salt, kind, marks=long) for salt, kind in (("a", "drawn"), ("b", "sums"))),
    ],
)
async def test_faults_and_kills_anywhere_change_nothing(
    inputs: Inputs,
    tiny_model: SlottedModel,
    tmp_path: Path,
    scored_badly: dict[str, Any],
    salt: str,
    stages: str,
) -> None:
    scored_badly |= STAGES[stages]
    rng = random.Random(salt)
    faulty = partial(Faulty, share=0.004, load_share=0.1, salt=salt)
    run_on: Evolution = partial(
        run_evolution, inputs=inputs, model=tiny_model, wrap=faulty, **scored_badly
    )
    with create(tmp_path, "whole") as run:
        expected = clockless(await run_on(run))
        events = decided(run)
        errors = [e.payload["error"] for e in run.events("rollout") if e.payload["error"]]
    assert errors, "the faults were met"
    create(tmp_path, "killed").close()
    for _ in range(2):
        run = Run.open(tmp_path / "killed")
        with killed_at(run, rng.randrange(1, 25), is_stored=rng.random() < 0.5):
            await run_on(run)
    with Run.open(tmp_path / "killed") as run:
        assert clockless(await run_on(run)) == expected
        assert decided(run) == events


@long
@pytest.mark.parametrize("phase", ["es 5", "surrogate 6"])
async def test_a_run_killed_inside_a_stage_goes_on_there(
    inputs: Inputs,
    tiny_model: SlottedModel,
    tmp_path: Path,
    scored_badly: dict[str, Any],
    phase: str,
) -> None:
    """Killed when the phase has stored its first answers, and then before any, and resumed: nothing
    is asked twice, and everything comes out as in the run that was not stopped."""
    scored_badly |= {"stages": STEPS}
    run_on: Evolution = partial(
        run_evolution, inputs=inputs, model=tiny_model, wrap=partial(Faulty, share=0.002),
        **scored_badly,
    )  # fmt: skip
    with create(tmp_path, "whole") as run:
        expected = clockless(await run_on(run))
        events = decided(run)
    create(tmp_path, "killed").close()
    for is_stored in (True, False):
        run = Run.open(tmp_path / "killed")
        with killed_in(run, phase, is_stored=is_stored) as observer:
            await run_on(run, observer=observer)
        with Run.view(tmp_path / "killed") as view:
            num_done = view.counts()["generation"]
            assert num_done == int(phase.split()[1]), "killed inside the phase"
    with Run.open(tmp_path / "killed") as run:
        assert clockless(await run_on(run)) == expected
        assert decided(run) == events


async def test_faults_that_pass_are_remembered(
    inputs: Inputs, tiny_model: SlottedModel, tmp_path: Path
) -> None:
    """The engine is well again when the run resumes: what failed before has still failed."""
    is_ill = [True]

    class Recovering(Faulty):
        def _pass(self, share: float, *what: object) -> None:
            if is_ill[0]:
                super()._pass(share, *what)

    def recover_after(number: int, *, and_die: bool) -> FakeObserver:
        def note(generation: Any) -> None:
            if generation.generation == number:
                is_ill[0] = False
                if and_die:
                    raise Killed

        return FakeObserver(note)

    run_on: Evolution = partial(
        run_evolution,
        inputs=inputs,
        model=tiny_model,
        wrap=partial(Recovering, share=0.01, load_share=0.4, salt="passing"),
        race=RACE,
    )
    with create(tmp_path, "whole") as run:
        expected = await run_on(run, observer=recover_after(1, and_die=False))
        events = decided(run)
        assert any(e.payload["error"] for e in run.events("candidate"))
        assert list(run.events("failure")), "a load failed too"
    is_ill[0] = True
    with create(tmp_path, "killed") as run, pytest.raises(Killed):
        await run_on(run, observer=recover_after(1, and_die=True))
    with Run.open(tmp_path / "killed") as run:
        assert clockless(await run_on(run)) == clockless(expected)
        assert decided(run) == events


async def test_servers_that_are_all_gone_end_the_run_and_it_resumes(
    inputs: Inputs, tiny_model: SlottedModel, tmp_path: Path
) -> None:
    class Gone(Faulty):
        async def score(self, requests: Any) -> Any:
            raise FleetDownError("Every server is down.")

    with create(tmp_path, "gone") as run, pytest.raises(FleetDownError):
        await run_evolution(run, inputs=inputs, model=tiny_model, wrap=partial(Gone, share=0.0))
    with Run.open(tmp_path / "gone") as run:
        assert not list(run.events("rollout")) and not list(run.events("failure"))
        resumed = await run_evolution(run, inputs=inputs, model=tiny_model)
    assert resumed.winner is not None
