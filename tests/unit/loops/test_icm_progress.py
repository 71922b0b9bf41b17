"""The time left of a labelling, against the time that it then takes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops.oracle import Oracle, make_config, write_items

from rookery.loops.icm import IcmConfig, IcmInputs, label, label_scorer, read_items
from rookery.ports import Observer
from rookery.runs import Run
from rookery.search.labelling import PrefixCache
from rookery.testing import FakeSampler
from rookery.types import Score, ScoreRequest
from rookery.ui.time_left import TimeLeft

PROMPT = "The film #{{ n }} was long and I saw it with friends on a rainy day. Fine:"
TOKENS_PER_S = 600
CALL_S = 0.02


class TimedSampler(FakeSampler):
    """Takes as long as the tokens that its prefix cache does not know."""

    def __init__(self, sampler: FakeSampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._cache = PrefixCache()
        self.now_s = 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        num_tokens = sum(self._cache.add(request.tokens) for request in requests)
        self.now_s += CALL_S + num_tokens / TOKENS_PER_S
        return await self._sampler.score(requests)


class Watch(Observer[Any]):
    """Notes the time left, as the progress bar makes it, after each block of reads."""

    def __init__(self, sampler: TimedSampler) -> None:
        self._sampler = sampler
        self._left = TimeLeft(lambda: (sampler.now_s, sampler.now_s))
        self._done = 0.0
        self.told: list[tuple[float, float | None]] = []
        """At which time, and what."""

    def on_progress(self, done: float, expected: float) -> None:
        self._left.did(done - self._done)
        self._done = done
        self._left.expect(expected - done)
        self.told.append((self._sampler.now_s, self._left.seconds()))


@pytest.mark.parametrize(
    ("num_chains", "budget"), [(1, {}), (3, {"max_hours": 0.02}), (1, {"max_answer_tokens": 900})]
)
async def test_the_time_left_is_right_within_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chains: int, budget: dict[str, float]
) -> None:
    oracle = Oracle(30, seed=1)
    document = make_config(
        write_items(tmp_path / "items.jsonl", oracle), num_chains=num_chains, budget=budget
    ).model_dump()
    document["data"]["prompt"] = PROMPT
    config = IcmConfig.model_validate(document)
    sampler = TimedSampler(oracle.sampler)
    watch = Watch(sampler)
    monkeypatch.setattr(label_scorer, "NUM_BLOCKS_HERE", 1)  # each is told before the next is read
    monkeypatch.setattr(Run, "elapsed_s", property(lambda _: sampler.now_s))
    with Run.create(tmp_path, kind="icm", config={}, name="timed") as run:
        inputs = IcmInputs(config=config, items=read_items(config.data))
        labeller = replace(oracle.labeller, sampler=sampler)
        await label(inputs, engine=labeller, run=run, observer=watch)
    whole_s = sampler.now_s
    for share in (0.2, 0.4, 0.6, 0.8, 0.9, 0.95):
        at_s, told_s = max(told for told in watch.told if told[0] <= share * whole_s)
        assert told_s == pytest.approx(whole_s - at_s, rel=1 / 3), f"after {share:.0%}"
