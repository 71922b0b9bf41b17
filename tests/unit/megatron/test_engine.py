"""A rank that does what the first one tells does the same; one that fails in a pass ends."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tiny import tiny_adapter
from tiny_training import make_batch, step, train

from rookery.embedded.folders import driven
from rookery.errors import TrainError
from rookery.megatron.engine import Ranks, RanksEngine, RanksTrainer
from rookery.slots import load_model
from rookery.train import TrainerConfig
from rookery.train.processes import Call
from rookery.types import SampleRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class RecordedRanks(Ranks):
    """Keeps what it would broadcast, as bytes: nothing of this process travels with it."""

    told: list[bytes] = field(default_factory=list)

    def broadcast(self, call: object) -> None:
        self.told.append(pickle.dumps(call))


@asynccontextmanager
async def opened(folder: Path, ranks: Ranks) -> AsyncIterator[tuple[RanksTrainer, RanksEngine]]:
    model = load_model(folder)
    trainer = RanksTrainer(model, config=TrainerConfig(), processes=ranks)
    engine = RanksEngine(
        model, ranks=ranks, detokenize=str, name=str(folder), thread=ThreadPoolExecutor(1)
    )
    async with driven(engine):
        yield trainer, engine


async def test_a_rank_that_is_told_every_call_ends_in_the_same_state(tiny_folder: Path) -> None:
    ranks = RecordedRanks(0, 1)
    async with (
        opened(tiny_folder, ranks) as (trainer, engine),
        opened(tiny_folder, Ranks(1, 1)) as (other_trainer, other),
    ):
        trainer.add("policy", tiny_adapter("start"))
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
        ref = await engine.load(trainer.adapter("policy"))
        params = SamplingParams(max_tokens=9, n=3, seed=4)
        requests = [
            SampleRequest(model=model, prompt=(5, 6, last), params=params)
            for last, model in ((7, ref), (8, engine.base))
        ]
        await engine.sample(requests)
        long = replace(requests[0], params=SamplingParams(max_tokens=100, ignore_eos=True))
        abandoned = asyncio.create_task(engine.sample([long]))
        await engine.sample(requests[1:])
        abandoned.cancel()
        await engine.sample(requests[1:])
        await engine.unload(ref)
        for call in map(pickle.loads, ranks.told):
            (other_trainer if isinstance(call, Call) else other).do_part(call)
        assert other.stats.decoded_tokens == engine.stats.decoded_tokens > 0
        assert other.num_jobs == 0
        assert other_trainer.adapter("policy").version == trainer.adapter("policy").version


def test_a_rank_that_fails_in_a_pass_of_all_ends() -> None:
    sentence = "Rank 1 failed in a pass of all ranks: out of memory"
    with pytest.raises(SystemExit, match=sentence), Ranks(1, 2).together():
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"), Ranks(0, 1).together():
        raise RuntimeError("out of memory")
    with pytest.raises(TrainError), Ranks(1, 2).together():
        raise TrainError("said alike by all ranks")
