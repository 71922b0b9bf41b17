"""Faults and kills: a run that was killed anywhere ends as one with the same faults that was not.

Contexts that the engine cannot answer, a server that dies, and a simulated kill before and after
every append.
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops.oracle import Oracle, make_config, write_items

from rookery.errors import EngineError
from rookery.loops.icm import IcmConfig, IcmInputs, label, read_gold, read_items
from rookery.runs import EventLog, NewEvent, Run
from rookery.seeding import stream
from rookery.types import Score, ScoreRequest


class Faulty:
    """A sampler that cannot answer some contexts, always the same, and dies after some calls."""

    def __init__(
        self, oracle: Oracle, *, faults: str, seed: int, dies_at: float = math.inf
    ) -> None:
        self._oracle = oracle
        self._faults = faults
        self._seed = seed
        self._num_left = dies_at
        self.asked: list[tuple[int, ...]] = []

    async def sample(self, requests: object) -> list[Any]:
        raise NotImplementedError

    def fault(self, request: ScoreRequest) -> str:
        """Long contexts fail more often; an item by itself is always answered."""
        if self._faults == "none" or len(request.tokens) < 8:
            return ""
        draw = stream(self._seed, *request.tokens).random()
        kinds = ("raise", "nan") if self._faults == "both" else (self._faults,)
        return kinds[int(draw * 1e6) % len(kinds)] if draw < 0.1 else ""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        await asyncio.sleep(0)
        self._num_left -= 1
        if self._num_left < 0:
            raise EngineError("The server is gone.")
        faults = [self.fault(request) for request in requests]
        if "raise" in faults:
            raise EngineError("This context crashes the kernel.")
        scores = await self._oracle.sampler.score(requests)
        self.asked += [request.tokens for request in requests]
        nan = (math.nan, math.nan)
        return [
            Score(model=score.model, logprobs=(), label_logprobs=nan) if fault else score
            for score, fault in zip(scores, faults, strict=True)
        ]


async def run_icm(path: Path, config: IcmConfig, oracle: Oracle, sampler: Faulty) -> None:
    """Begin the run, or go on with it."""
    items = read_items(config.data)
    is_new = not (path / "events.db").exists()
    opened = Run.create(path.parent, kind="icm", config={}, name=path.name) if is_new else None
    with opened or Run.open(path) as run:
        await label(
            IcmInputs(config=config, items=items, gold=lambda: read_gold(config.data, items)),
            engine=replace(oracle.labeller, sampler=sampler),
            run=run,
        )


def made(
    folder: Path, *, seed: int, num_items: int = 12, **changes: Any
) -> tuple[Oracle, IcmConfig]:
    oracle = Oracle(num_items, seed=seed, order_weight=2.0)
    path = write_items(folder / "items.jsonl", oracle)
    settings = {"search": {"iterations": 40, "num_start": 4}, "batch_size": 6, "num_chains": 2}
    return oracle, make_config(path, seed=seed, **{**settings, **changes})


def left_behind(path: Path) -> dict[str, Any]:
    """Everything that must be equal: not the times, nor what a cold cache computed again."""
    with Run.view(path) as run:
        scores = {event.key: dict(event.payload) for event in run.events("score")}
        decisions = {event.key: event.payload for event in run.events("decision")}
    for payload in scores.values():
        del payload["num_computed"]
    report = json.loads((path / "report.json").read_text())
    for name in ("run", "seconds"):
        del report[name]
    for name in ("computed", "baselines"):
        del report["tokens"][name]
    files = ("labels.jsonl", "sft.jsonl", "pairs.jsonl", "soft.jsonl")
    texts = {name: (path / name).read_text() for name in files}
    return {"scores": scores, "decisions": decisions, "report": report, **texts}


class Killed(BaseException):
    pass


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Kill at the n-th half of an append: before it for even numbers, behind it for odd ones."""
    submit = EventLog.submit
    state: dict[str, int | None] = {"left": None}

    def counted(self: EventLog, news: Sequence[NewEvent]) -> Any:
        left = state["left"]
        if left is not None and left <= 0:
            raise Killed
        stored = submit(self, news)
        if left is not None:
            state["left"] = left - 2
            if left == 1:
                stored.result()
                raise Killed
        return stored

    def set_up(number: int | None) -> None:
        state["left"] = number

    monkeypatch.setattr(EventLog, "submit", counted)
    return set_up


async def test_killed_at_every_append(tmp_path: Path, kill_at: Any) -> None:
    oracle, config = made(tmp_path, seed=5, num_items=8, batch_size=4, num_chains=1)
    await run_icm(tmp_path / "whole", config, oracle, Faulty(oracle, faults="both", seed=5))
    expected = left_behind(tmp_path / "whole")
    assert expected["report"]["num_unanswered"] > 0
    number = 0
    while True:
        number += 7  # before one append and behind another, in turn
        path = tmp_path / f"killed-{number}"
        sampler = Faulty(oracle, faults="both", seed=5)
        kill_at(number)
        try:
            await run_icm(path, config, oracle, sampler)
            break
        except (Killed, BaseExceptionGroup):
            kill_at(None)
        await run_icm(path, config, oracle, sampler)
        assert left_behind(path) == expected, f"killed at {number}"
    assert number > 20


async def test_what_cannot_be_answered_is_told_and_not_asked_for_again(tmp_path: Path) -> None:
    oracle, config = made(tmp_path, seed=2)
    sampler = Faulty(oracle, faults="both", seed=2)
    await run_icm(tmp_path / "a", config, oracle, sampler)
    found = left_behind(tmp_path / "a")
    failed = [score for score in found["scores"].values() if score["logprobs"] is None]
    assert failed and all(score["error"] for score in failed)
    assert found["report"]["num_unanswered"] == len(failed)
    words = f"The engine could not answer {len(failed)} contexts"
    assert any(words in warning for warning in found["report"]["warnings"])
    again = Faulty(oracle, faults="none", seed=2)
    await run_icm(tmp_path / "a", config, oracle, again)
    assert again.asked == [] and left_behind(tmp_path / "a") == found


class Forgetful(Faulty):
    """Cannot answer contexts with more than four demonstrations."""

    def fault(self, request: ScoreRequest) -> str:
        return "nan" if len(request.tokens) > 4 * 4 + 2 else ""


@pytest.mark.parametrize(("num_chains", "num_rounds"), [(1, 3), (2, 2), (2, 3)])
async def test_a_baseline_that_labels_nothing_is_no_start_and_no_result(
    tmp_path: Path, num_chains: int, num_rounds: int
) -> None:
    """Behind eight random labels nothing is answered; after two rounds bootstrap has no label."""
    oracle, config = made(
        tmp_path,
        seed=1,
        batch_size=12,
        num_chains=num_chains,
        search={"iterations": 30, "num_start": 2},
        baselines={"num_shots": 8, "num_rounds": num_rounds, "inverted": False},
    )
    sampler = Forgetful(oracle, faults="nan", seed=1)
    await run_icm(tmp_path / "a", config, oracle, sampler)
    report = left_behind(tmp_path / "a")["report"]
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["random few-shot"]["num_labelled"] == 0
    assert (rows["bootstrap"]["num_labelled"] == 0) == (num_rounds == 2)
    assert report["verdict"] == "partial" and 0 < report["num_labelled"] < 12
    assert {chain["origin"] for chain in report["chains"]} == {"random labels"}


class Poisoned(Faulty):
    """Cannot answer contexts with the item #3, nor those with more demonstrations than `most`."""

    most = 12

    def fault(self, request: ScoreRequest) -> str:
        is_poisoned = self._oracle.words.ids["#3"] in request.tokens
        return "nan" if is_poisoned or len(request.tokens) > 4 * self.most + 2 else ""


@pytest.mark.parametrize("most", [12, 0])
async def test_a_search_begins_with_what_the_engine_answers(tmp_path: Path, most: int) -> None:
    """All items would begin with labels, and one of them fails in every context."""
    oracle, config = made(
        tmp_path, seed=1, batch_size=12, search={"iterations": 100, "num_start": 12}
    )
    sampler = Poisoned(oracle, faults="nan", seed=1)
    sampler.most = most
    await run_icm(tmp_path / "a", config, oracle, sampler)
    report = left_behind(tmp_path / "a")["report"]
    assert report["verdict"] == "partial" and report["num_unanswered"] > 0
    assert 6 < report["num_labelled"] < 12 if most else report["num_labelled"] == 1
    unlabelled = [item["id"] for item in report["items"] if "label" not in item]
    assert "i3" in unlabelled


async def test_a_server_that_is_gone_leaves_no_failed_answers(tmp_path: Path) -> None:
    oracle, config = made(tmp_path, seed=3)
    with pytest.raises(EngineError, match="The server is gone"):
        await run_icm(
            tmp_path / "a", config, oracle, Faulty(oracle, faults="none", seed=0, dies_at=5)
        )
    with Run.view(tmp_path / "a") as run:
        assert run.status == "failed"
        assert all(event.payload["logprobs"] for event in run.events("score"))
