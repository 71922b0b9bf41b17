"""Faults and kills: a resumed evolution decides as the one that was not stopped."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loops.evolution import Faulty, Inputs, clockless, run_evolution

from rookery.errors import FleetDownError
from rookery.reports import GenomeReport
from rookery.runs import Run, RunView
from rookery.slots import SlottedModel
from rookery.testing import FakeObserver

Evolution = Callable[..., Awaitable[GenomeReport]]

RACE = {"enabled": True, "block": 4}
STAGES: list[dict[str, Any]] = [
    {"type": "random", "count": 4},
    {"type": "es", "steps": 2, "population": 6, "rank": 1, "tasks_per_step": 8},
    {"type": "surrogate", "generations": 1, "population": 3},
]


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


async def test_faults_that_pass_are_remembered(
    inputs: Inputs, tiny_model: SlottedModel, tmp_path: Path, scored_badly: dict[str, Any]
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
        wrap=partial(Recovering, share=0.004, load_share=0.3, salt="passing"),
        **scored_badly,
        stages=STAGES,
    )
    with create(tmp_path, "whole") as run:
        expected = await run_on(run, observer=recover_after(1, and_die=False))
        events = decided(run)
        assert any(e.payload["error"] for e in run.events("candidate"))
        assert any(e.payload["error"] for e in run.events("rollout"))
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
