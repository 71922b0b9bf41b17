"""A grpo run that is cut off anywhere and goes on: the same weights, every group trained once."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
from loops.training import Inputs, clockless, run_training
from marks import long

from rookery.reports import GrpoReport
from rookery.runs import Run, RunView
from rookery.slots import SlottedModel
from rookery.types import SampleRequest, ScoreRequest

BOUNDARIES = {
    "sample", "score", "load", "unload", "replace_base", "forward_backward", "forward",
    "optim_step", "save", "publish", "export", "version",
}  # fmt: skip
FULL: dict[str, Any] = {"full": True, "learning_rate": 1e-3}
SHARED = {**FULL, "share": True}
LORA_0, LORA_1 = ({"staleness": staleness} for staleness in (0, 1))
FULL_0, SHARED_1 = {**FULL, "staleness": 0}, {**SHARED, "staleness": 1}


@pytest.fixture
def inputs(grpo_inputs: Inputs) -> Inputs:
    return grpo_inputs


@pytest.fixture
def model(plain_model: SlottedModel) -> SlottedModel:
    return plain_model


class Cut:
    """Counts the calls of the parts it is wrapped around, and cancels at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen: list[str] = []

    def __call__(self, part: Any) -> Any:
        return _CutPart(part, self)

    def pass_by(self, name: str) -> None:
        self.seen.append(name)
        if self.at is not None and len(self.seen) > self.at:
            raise asyncio.CancelledError


class _CutPart:
    def __init__(self, part: Any, cut: Cut) -> None:
        self._part, self._cut = part, cut

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in BOUNDARIES:
            return found

        async def passing(*args: Any, **values: Any) -> Any:
            self._cut.pass_by(f"before {name}")
            result = await found(*args, **values)
            self._cut.pass_by(f"after {name}")
            return result

        return passing


def make_run(folder: Path, name: str) -> Run:
    return Run.create(folder, kind="grpo", config={}, name=name)


def final_weights(run: Run) -> object:
    last = run.last("checkpoint")
    assert last is not None
    return last.payload["step"], last.payload["version"]


def trained_positions(run: RunView) -> list[list[int]]:
    """The groups of every step as the events have them."""
    return [event.payload["positions"] for event in run.events("step")]


def check_same(run: Run, result: GrpoReport, expected: tuple[Any, Any, Any]) -> None:
    """Bit-equal weights, the same groups in the same steps, none twice, the same report."""
    weights, positions, report = expected
    assert final_weights(run) == weights
    assert trained_positions(run) == positions
    assert clockless(result) == report
    drawn = [event.payload["positions"] for event in run.events("batch")]
    assert drawn == positions
    assert max(Counter(chain.from_iterable(positions)).values()) == 1


@pytest.mark.parametrize(
    ("changes", "every"),
    [
        (LORA_1, 83),
        (FULL_0, 131),
        pytest.param(LORA_0, 29, marks=long),
        pytest.param(SHARED_1, 37, marks=long),
    ],
    ids=["lora-1", "full-0", "lora-0", "shared-1"],
)
async def test_a_run_that_is_cut_off_at_any_call_ends_with_the_same_weights(
    inputs: Inputs, model: SlottedModel, tmp_path: Path, changes: dict[str, Any], every: int
) -> None:
    whole = Cut()
    with make_run(tmp_path, "whole") as run:
        result = await run_training(run, inputs, model=model, wrap=whole, **changes)
        expected = final_weights(run), trained_positions(run), clockless(result)
    served = {"replace_base"} if "full" in changes else {"load", "unload"}
    assert {name.partition(" ")[2] for name in whole.seen} >= served | {
        "sample", "forward_backward", "optim_step", "save", "publish", "export",
    }  # fmt: skip
    for at in range(changes["staleness"], len(whole.seen), every):
        with pytest.raises(asyncio.CancelledError), make_run(tmp_path, f"cut-{at}") as run:
            await run_training(run, inputs, model=model, wrap=Cut(at), **changes)
        with Run.open(tmp_path / f"cut-{at}") as run:
            again = await run_training(run, inputs, model=model, **changes)
            check_same(run, again, expected)
        shutil.rmtree(tmp_path / f"cut-{at}")


@long
async def test_a_run_that_is_cut_off_again_and_again_gets_there(
    inputs: Inputs, model: SlottedModel, tmp_path: Path
) -> None:
    with make_run(tmp_path, "whole") as run:
        result = await run_training(run, inputs, model=model, staleness=1, save_every=1)
        expected = final_weights(run), trained_positions(run), clockless(result)
    make_run(tmp_path, "cut").close()
    at, ended = 3, None
    while ended is None:
        at += 29
        with Run.open(tmp_path / "cut") as run:
            try:
                ended = await run_training(
                    run, inputs, model=model, wrap=Cut(at), staleness=1, save_every=1
                )
                check_same(run, ended, expected)
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize(
    ("changes", "slow"),
    [
        (LORA_1, "random"),
        pytest.param(LORA_1, "forward_backward", marks=long),
        pytest.param(SHARED_1, "random", marks=long),
    ],
)
async def test_delays_change_no_bit(
    inputs: Inputs, model: SlottedModel, tmp_path: Path, changes: dict[str, Any], slow: str
) -> None:
    """Whether drawing or training is slower, or either now and then, a step is drawn with the
    weights of its schedule."""
    versions = set()
    for kind in ("none", slow):
        with make_run(tmp_path, kind) as run:
            await run_training(run, inputs, model=model, wrap=partial(_Slow, slow=kind), **changes)
            versions.add(str(final_weights(run)))
            drawn = [event.payload["model_step"] for event in run.events("batch")]
        assert drawn == [0, 0, 1, 2, 3]
    assert len(versions) == 1


async def test_nothing_is_drawn_while_the_engine_is_compared_with_the_trainer(
    inputs: Inputs, model: SlottedModel, tmp_path: Path
) -> None:
    """Scores beside the draws would be computed together with them or not, as timing has it."""
    calls: list[str] = []
    with make_run(tmp_path, "x") as run:
        await run_training(
            run, inputs, model=model, wrap=partial(_Noted, calls=calls), staleness=1,
            max_extra_groups=0,
        )  # fmt: skip
    assert "".join(calls) == "draw draw score draw score draw score draw score "


class _Noted:
    """Notes the draws of groups and the scores in the order in which they begin."""

    def __init__(self, part: Any, calls: list[str]) -> None:
        self._part, self._calls = part, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    async def sample(self, requests: Sequence[SampleRequest]) -> Any:
        self._calls += ["draw "] if requests[0].params.n > 1 else []
        return await self._part.sample(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> Any:
        self._calls.append("score ")
        return await self._part.score(requests)


class _Slow:
    """Lets the loop run a hundred turns before one kind of call is made, or some turns before and
    after any."""

    def __init__(self, part: Any, slow: str) -> None:
        self._part, self._slow = part, slow
        self._random = Random(3)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name != self._slow and (name not in BOUNDARIES or self._slow != "random"):
            return found

        async def later(*args: Any, **values: Any) -> Any:
            await self._wait()
            result = await found(*args, **values)
            await self._wait()
            return result

        return later

    async def _wait(self) -> None:
        is_random = self._slow == "random"
        for _ in range(self._random.randrange(60) if is_random else 100):
            await asyncio.sleep(0)
