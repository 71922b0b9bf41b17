"""One model for an engine and trainers at the same time: each gets the bits it gets alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from tiny import tiny_adapter, write_tiny_model
from tiny_training import make_batch, make_trainer, step, train

from rookery.embedded import EngineConfig, run_engine
from rookery.slots import load_model
from rookery.train import LoraTrainer
from rookery.types import SampleRequest, SamplingParams, ScoreRequest

NUM_QUESTIONS = 6


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
