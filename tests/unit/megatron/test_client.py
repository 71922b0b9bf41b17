"""A server reached over HTTP is the Trainer and the Engine that it is in its own process."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
import torch
from megatron_server import served
from tiny import tiny_adapter
from tiny_training import make_batch, step, train

from rookery.embedded.folders import driven
from rookery.errors import EngineDownError, EngineError, TrainError
from rookery.megatron import LoraStart, MegatronEngine, MegatronTrainer, open_megatron
from rookery.megatron.engine import Ranks, RanksEngine, RanksTrainer
from rookery.ports import Engine, Trainer
from rookery.slots import load_model
from rookery.train import AdapterPublisher, LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.processes import RankCall
from rookery.types import (
    Adapter,
    Datum,
    Json,
    KeptTokens,
    OptimStep,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TrainRequest,
)

START = tiny_adapter("start", layers=range(2, 4))


def same(one: Adapter, other: Adapter) -> bool:
    return one.factors.keys() == other.factors.keys() and all(
        torch.equal(lora.a, other.factors[layer].a)
        and torch.equal(lora.b, other.factors[layer].b)
        and lora.scale == other.factors[layer].scale
        for layer, lora in one.factors.items()
    )


async def test_training_over_http_gives_the_same_bits(tiny_folder: Path) -> None:
    local = LoraTrainer(load_model(tiny_folder), config=TrainerConfig())
    local.add("policy", START)
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        assert isinstance(trainer, Trainer)
        await trainer.create("policy", START)
        for _ in range(2):
            request = TrainRequest(trainee="policy", data=tuple(make_batch()))
            assert await trainer.forward([request]) == await local.forward([request])
            assert await train(trainer, make_batch()) == await train(local, make_batch())
            assert await step(trainer, 1e-2) == await step(local, 1e-2)
        assert same(await trainer.adapter("policy"), local.adapter("policy"))


async def test_every_column_of_a_datum_arrives(tiny_folder: Path) -> None:
    datum = Datum(
        tokens=(5, 6, 7),
        positions=(1, 2),
        targets=(7, 8),
        weights=(1.0, 0.5),
        sampled_logprobs=(-4.0, -5.0),
        old_logprobs=(-4.5, -5.5),
        reference_logprobs=(-4.2, -4.8),
        advantages=(2.0, -1.0),
        temperature=0.7,
        kept=KeptTokens.of([(7, 9, 11), ()]),
        inputs={"mine": [1.0, 2.0]},
    )
    options: dict[str, Json] = {"clip_low": 0.1, "kl": {"weight": 0.05}, "ratio_to": "old"}
    request = TrainRequest(trainee="policy", data=(datum,), loss="grpo", loss_options=options)
    local = LoraTrainer(load_model(tiny_folder), config=TrainerConfig())
    local.add("policy", START)
    [expected] = await local.forward_backward([request])
    assert expected.error == ""
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", START)
        assert await trainer.forward_backward([request]) == [expected]


async def test_a_new_adapter_is_the_one_that_a_local_trainer_starts_from(tiny_folder: Path) -> None:
    config = LoraConfig(rank=3, targets=("q_proj", "down_proj"))
    expected = initial_adapter(
        load_model(tiny_folder), config, name="policy", base=str(tiny_folder), seed=5
    )
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", LoraStart(lora=config, base=str(tiny_folder), seed=5))
        assert same(await trainer.adapter("policy"), expected)


async def test_a_saved_state_goes_on_in_another_server(tmp_path: Path, tiny_folder: Path) -> None:
    """With moments and gradients not yet applied; the file is a local trainer's, too."""
    path = tmp_path / "state"
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", START)
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
        await train(trainer, make_batch(seed=1))
        await trainer.save("policy", path)
        await step(trainer, 1e-2)
        expected = await trainer.adapter("policy")
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", START)
        await trainer.load("policy", path)
        await step(trainer, 1e-2)
        assert same(await trainer.adapter("policy"), expected)
    local = LoraTrainer(load_model(tiny_folder), config=TrainerConfig())
    local.add("policy", START)
    await local.load("policy", path)
    await step(local, 1e-2)
    assert same(local.adapter("policy"), expected)


async def test_a_request_that_cannot_be_done_fails_alone(tiny_folder: Path) -> None:
    good = TrainRequest(trainee="policy", data=tuple(make_batch()))
    bad = TrainRequest(
        trainee="policy",
        data=(Datum(tokens=(5,), positions=(0,), targets=(10_000,), weights=(1.0,)),),
    )
    unknown = TrainRequest(trainee="nobody", data=good.data)
    async with served(tiny_folder) as (url, _), open_megatron(url) as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", START)
        [alone] = await trainer.forward([good])
        first, second, third = await trainer.forward([bad, good, unknown])
        assert "not in the vocabulary" in first.error
        assert second == alone
        assert "There is no trainee 'nobody'" in third.error
        [stepped] = await trainer.optim_step([OptimStep(trainee="nobody", learning_rate=1e-3)])
        assert "There is no trainee 'nobody'" in stepped.error
        with pytest.raises(TrainError, match="There is no trainee 'nobody'"):
            await trainer.save("nobody", Path("state"))


async def test_what_is_published_is_drawn_as_by_a_local_engine(tiny_folder: Path) -> None:
    params = SamplingParams(
        max_tokens=6, n=2, seed=3, top_k=7, top_logprobs=2, return_kept=True, stop=("w9",)
    )
    async with served(tiny_folder) as (url, hosted), open_megatron(url) as server:
        engine = MegatronEngine(server)
        assert isinstance(engine, Engine)
        trainer = MegatronTrainer(server, publisher=AdapterPublisher(engine))
        await trainer.create("policy", START)
        ref = await trainer.publish("policy")
        for model in (ref, engine.base):
            request = SampleRequest(model=model, prompt=(5, 6, 7), params=params)
            assert await engine.sample([request]) == await hosted.engine.sample([request])
            score = ScoreRequest(model=model, tokens=(5, 6, 7), labels=(8, 9), top_logprobs=3)
            assert await engine.score([score]) == await hosted.engine.score([score])
        await engine.unload(ref)
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.sample([SampleRequest(model=ref, prompt=(5, 6))])


async def test_a_server_that_ends_or_is_another_is_said(tiny_folder: Path) -> None:
    request = TrainRequest(trainee="policy", data=tuple(make_batch()))
    stack = AsyncExitStack()
    url, _ = await stack.enter_async_context(served(tiny_folder))
    async with open_megatron(url) as server:
        trainer, engine = MegatronTrainer(server), MegatronEngine(server)
        await trainer.create("policy", START)
        await stack.aclose()
        with pytest.raises(TrainError, match=f"can't be reached at {url}.*torchrun"):
            await trainer.forward_backward([request])
        with pytest.raises(EngineDownError, match=f"can't be reached at {url}"):
            await engine.sample([SampleRequest(model=engine.base, prompt=(5, 6))])
        async with served(tiny_folder, port=int(url.rpartition(":")[2])):
            with pytest.raises(TrainError, match="started anew and has lost its trainees"):
                await trainer.forward_backward([request])
    with pytest.raises(TrainError, match=f"can't be reached at {url}"):
        async with open_megatron(url):
            pass


async def test_a_server_with_a_key_lets_in_those_who_show_it(tiny_folder: Path) -> None:
    async with served(tiny_folder, key="secret") as (url, hosted):
        with pytest.raises(TrainError, match="MEGATRON_SERVER_KEY is missing or wrong"):
            async with open_megatron(url, key="secreT"):
                pass
        async with open_megatron(url, key="secret") as server:
            assert server.info == hosted.info


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'[{"color": 1}]', b"\x80\x04K\x01."])
async def test_other_bytes_are_refused_with_a_sentence(tiny_folder: Path, body: bytes) -> None:
    async with served(tiny_folder) as (url, hosted), aiohttp.ClientSession() as http:
        hosted.trainer.add("policy", START)
        for method in ("create", "put_adapter", "load", "forward", "optim_step", "sample", "serve"):
            address = f"{url}/v1/{method}?name=policy"
            async with http.post(address, data=body) as response:
                is_empty = body == b"{}" and method in ("forward", "optim_step", "sample")
                assert response.status == (200 if is_empty else 400), method
                assert is_empty or (await response.json())["error"]
        assert same(hosted.trainer.adapter("policy"), START)


# A rank that does what the first one tells does the same; one that fails in a pass ends.


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
            (other_trainer if isinstance(call, RankCall) else other).do_part(call)
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
