"""One model for an engine and trainers at the same time: each gets the bits it gets alone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from tiny import tiny_adapter, write_tiny_model
from tiny_training import make_batch, make_trainer, step, train

from rookery.embedded import EmbeddedEngine, EngineConfig, run_engine
from rookery.errors import EngineError
from rookery.slots import SlottedModel, load_model
from rookery.train import FullConfig, FullTrainer, LoraTrainer
from rookery.types import ModelRef, OptimStep, SampleRequest, SamplingParams, ScoreRequest

NUM_QUESTIONS = 2


async def run(trainer: LoraTrainer, is_over: Callable[[int], bool]) -> tuple[int, str]:
    """Steps until told to stop: how many, and the weights they gave."""
    number = 0
    while not is_over(number):
        await train(trainer, make_batch((40,) * 8, seed=number))
        await step(trainer, 1e-3)
        number += 1
    return number, trainer.adapter("policy").version


async def test_an_engine_answers_the_same_while_a_trainer_steps(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", num_hidden_layers=8)
    model = load_model(folder)
    start = tiny_adapter("start", layers=range(8), seed=3)
    config = EngineConfig(max_rows=6, prefill_tokens=64)
    async with run_engine(model, config=config, detokenize=lambda _: "", name="tiny") as engine:
        refs = [engine.base] + [
            await engine.load(tiny_adapter(name, layers=range(8), seed=seed, rank=seed))
            for name, seed in (("a", 4), ("b", 8))
        ]
        prompts = [tuple(5 + (i * 7 + k) % 80 for i in range(40)) for k in range(4)]
        scores = [ScoreRequest(model=ref, tokens=prompt) for ref in refs for prompt in prompts]
        params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
        samples = [
            SampleRequest(model=ref, prompt=prompt[:9], params=params)
            for ref in refs
            for prompt in prompts
        ]

        async def ask() -> object:
            await engine.reset_prefix_cache()
            return await engine.score(scores), await engine.sample(samples)

        expected = await ask()
        asked: list[object] = []
        training = asyncio.create_task(
            run(make_trainer(model, start), lambda _: len(asked) == NUM_QUESTIONS)
        )
        while len(asked) < NUM_QUESTIONS:
            asked.append(await ask())
        assert asked == [expected] * NUM_QUESTIONS
        num_steps, version = await training
    alone = make_trainer(load_model(folder), start)
    assert await run(alone, lambda number: number == num_steps) == (num_steps, version)
    assert num_steps > 0


LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
PROMPT = tuple(range(5, 25))


def share(model: SlottedModel, engine: EmbeddedEngine, folder: Path) -> FullTrainer:
    trainer = FullTrainer(model, name="policy", config=FullConfig(), like=folder)
    trainer.share_with(engine)
    return trainer


async def test_a_step_of_shared_weights_waits_for_answers_in_flight(tiny_folder: Path) -> None:
    """They end with the bits of the engine alone; who comes later names the new weights."""
    model = load_model(tiny_folder)
    config = EngineConfig(max_rows=4)
    async with run_engine(model, config=config, detokenize=lambda _: "", name="tiny") as engine:
        trainer = share(model, engine, tiny_folder)
        first = await trainer.publish("policy")
        request = SampleRequest(model=first, prompt=PROMPT, params=LONG)
        alone = await engine.sample([request])
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.sample([request]))
            await train(trainer, make_batch())  # gradients are taken meanwhile
            await step(trainer, 1e-2)
            assert running.done()
        assert running.result() == alone
        second = await trainer.publish("policy")
        assert engine.base == second and first != second
        with pytest.raises(EngineError, match=r"is not loaded. Loaded: policy@step-1"):
            await engine.sample([request])
        again = await engine.sample([SampleRequest(model=second, prompt=PROMPT, params=LONG)])
        assert again[0][0].logprobs != alone[0][0].logprobs


async def test_a_step_that_is_cancelled_leaves_no_answer_of_two_versions(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs to its end in its thread: until then the engine takes no call."""
    model = load_model(tiny_folder)
    async with run_engine(
        model, config=EngineConfig(), detokenize=lambda _: "", name="tiny"
    ) as engine:
        trainer = share(model, engine, tiny_folder)
        await train(trainer, make_batch())
        begun, may_end = threading.Event(), threading.Event()
        trainee = trainer.trainee("policy")
        whole_step = trainee.step

        def slow(one: OptimStep) -> float:
            begun.set()
            assert may_end.wait(20)
            return whole_step(one)

        monkeypatch.setattr(trainee, "step", slow)
        stepping = asyncio.create_task(step(trainer, 1e-2))
        assert await asyncio.to_thread(begun.wait, 20)
        stepping.cancel()
        asking = asyncio.create_task(
            engine.sample([SampleRequest(model=engine.base, prompt=PROMPT, params=LONG)])
        )
        await asyncio.sleep(0)
        assert engine.stats.num_in_flight == 0 and not stepping.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        with pytest.raises(EngineError, match="Loaded: policy@step-1"):
            await asking


async def test_a_state_that_is_loaded_reaches_the_engine(tiny_folder: Path, tmp_path: Path) -> None:
    model = load_model(tiny_folder)
    async with run_engine(
        model, config=EngineConfig(), detokenize=lambda _: "", name="tiny"
    ) as engine:
        trainer = share(model, engine, tiny_folder)
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
        await trainer.save("policy", tmp_path / "state")

        async def ask() -> object:
            tokens = ScoreRequest(model=engine.base, tokens=PROMPT)
            [score] = await engine.score([tokens])
            return score.logprobs

        wanted, version = await ask(), await trainer.version()
        await train(trainer, make_batch(seed=2))
        await step(trainer, 1e-2)
        assert await ask() != wanted and engine.base.version == "step-2"
        await trainer.load("policy", tmp_path / "state")
        assert await ask() == wanted and engine.base.version == "step-1"
        assert await trainer.version() == version


class WatchedEngine:
    """Notes what an engine that shares a trainer's memory has while it waits, and afterwards."""

    def __init__(self, trainer: FullTrainer) -> None:
        self._trainee = trainer.trainee("policy")
        self.refs: list[ModelRef] = []
        self.leaves: list[list[torch.Tensor]] = [self._leaves()]
        self.masters: list[torch.Tensor] = []

    def _leaves(self) -> list[torch.Tensor]:
        return [leaf.detach().clone() for leaf in self._trainee.leaves]

    @asynccontextmanager
    async def changing_base(self) -> AsyncIterator[Callable[[ModelRef], None]]:
        self.leaves.append(self._leaves())
        self.masters.append(self._trainee.parameters[0].detach().clone())
        yield self.refs.append
        self.leaves.append(self._leaves())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so once
async def test_an_engine_waits_for_the_cast_alone(tiny_folder: Path) -> None:
    """Half-precision weights have masters: these change while the engine computes."""
    model = load_model(tiny_folder, dtype="bfloat16")
    trainer = FullTrainer(model, name="policy", config=FullConfig(), like=tiny_folder)
    engine = WatchedEngine(trainer)
    first = trainer.trainee("policy").parameters[0].detach().clone()
    trainer.share_with(engine)
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    before, at_begin, at_end = engine.leaves
    assert all(map(torch.equal, before, at_begin))
    assert not torch.equal(first, engine.masters[0]), "the step was over before"
    masters = trainer.trainee("policy").parameters
    assert all(torch.equal(own, m.to(own.dtype)) for own, m in zip(at_end, masters, strict=True))
    assert not all(map(torch.equal, before, at_end))
    assert [ref.version for ref in engine.refs] == ["step-1"]
    assert await trainer.publish("policy") == engine.refs[0] and len(engine.refs) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
async def test_a_step_says_what_the_engine_that_shares_its_weights_took(
    tiny_folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pausing and proving, by a clock that only they move; not the step itself."""
    now = [0.0]
    monkeypatch.setattr("rookery.train.full.time.perf_counter", lambda: now[0])

    class SlowEngine:
        @asynccontextmanager
        async def changing_base(self) -> AsyncIterator[Callable[[ModelRef], None]]:
            now[0] += 2
            yield lambda _: None
            now[0] += 3

    model = load_model(tiny_folder, dtype=dtype)
    trainer = FullTrainer(model, name="policy", config=FullConfig(), like=tiny_folder)
    trainer.share_with(SlowEngine())
    step_of = trainer.trainee("policy").step

    def step_slowly(asked: OptimStep) -> float:
        now[0] += 7
        return step_of(asked)

    monkeypatch.setattr(trainer.trainee("policy"), "step", step_slowly)
    await train(trainer, make_batch())
    [output] = await trainer.optim_step([OptimStep(trainee="policy", learning_rate=1e-3)])
    assert output.metrics["train/publish_s"] == 5 and now[0] == 12
