"""Supervised fine-tuning on the tiny model: it learns, repeats itself, continues and stops."""

import asyncio
import os
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_adapter
from tiny_training import make_trainer, next_tokens, step
from tiny_training import train as run

from rookery.embedded import EngineConfig, open_engine
from rookery.errors import TaskError, TrainError
from rookery.slots import SlottedModel, load_model
from rookery.tasks.template import Template, load_template
from rookery.train import LoraTrainer
from rookery.train.schedule import learning_rate_at, order_batches, order_rows
from rookery.train.sft import SftConfig, SftStep, sft, sft_data
from rookery.types import Adapter, Datum, Json, ModelRef, SampleRequest, SamplingParams, Task

CONFIG = SftConfig(rank=4, layers=2, steps=30, batch_size=8, learning_rate=1e-2, seed=3)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


@pytest.fixture(scope="module")
def template(tiny_folder: Path) -> Template:
    return load_template(tiny_folder)


def words_task(number: int) -> Task:
    """Odd words are answered with w4, even ones with w5."""
    label = "w4" if number % 2 else "w5"
    return Task(
        id=f"toy/{number}", prompt=f"w10 w{number} w11", reference=label, choices=("w4", "w5")
    )


@pytest.fixture(scope="module")
def data(template: Template) -> list[Datum]:
    return sft_data([words_task(number) for number in range(20, 60)], template, end_token=2)


async def train(model: SlottedModel, data: list[Datum], **options: Any) -> Adapter:
    config = options.pop("config", CONFIG)
    return await sft(model, data, config, name="toy", base="tiny", **options)


async def test_the_loss_falls_and_the_engine_gives_the_learned_answers(
    model: SlottedModel, data: list[Datum], tiny_folder: Path
) -> None:
    steps: list[SftStep] = []
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config = CONFIG.model_copy(update={"targets": targets, "steps": 45, "batch_size": 20})
    adapter = await train(model, data, config=config, on_step=steps.append)
    assert [step.step for step in steps] == list(range(1, 46))
    assert all(step.num_steps == 45 and step.num_tokens == 40 for step in steps)
    assert all(step.grad_norm > 0 and step.seconds > 0 for step in steps)
    first, last = (sum(s.loss for s in part) / 3 for part in (steps[:3], steps[-3:]))
    assert last < 0.45 * first, "the logits of this model are bounded, its loss stays above 1.6"
    assert adapter.name == "toy" and adapter.base == "tiny" and adapter.rank == 4
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in adapter.factors)
    async with open_engine(EngineConfig(model=str(tiny_folder))) as engine:
        ref = await engine.load(adapter)

        async def right(model: ModelRef) -> int:
            params = SamplingParams(max_tokens=4, temperature=0)
            answers = await engine.sample(
                [SampleRequest(model=model, prompt=d.tokens[:-1], params=params) for d in data]
            )
            return sum(c.tokens == d.targets for (c,), d in zip(answers, data, strict=True))

        assert await right(engine.base) == 0
        assert await right(ref) >= 36


async def test_the_same_seed_gives_the_same_bits(model: SlottedModel, data: list[Datum]) -> None:
    config = CONFIG.model_copy(update={"steps": 4})
    one = await train(model, data, config=config)
    again = await train(model, data, config=config)
    other = await train(model, data, config=config.model_copy(update={"seed": 4}))
    assert one.version == again.version != other.version


async def test_an_interrupted_training_continues_bit_for_bit(
    model: SlottedModel, data: list[Datum], tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"steps": 9, "save_every": 2})
    straight = await train(model, data, config=config)
    seen: list[int] = []

    class Killed(BaseException):
        pass

    def kill_at_5(step: SftStep) -> None:
        seen.append(step.step)
        if step.step == 5:
            raise Killed

    with pytest.raises(Killed):
        await train(model, data, config=config, checkpoints=tmp_path / "c", on_step=kill_at_5)

    def note(step: SftStep) -> None:
        seen.append(step.step)

    resumed = await train(model, data, config=config, checkpoints=tmp_path / "c", on_step=note)
    assert seen == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    assert resumed.version == straight.version
    seen.clear()
    again = await train(model, data, config=config, checkpoints=tmp_path / "c", on_step=note)
    assert seen == [] and again.version == straight.version
    changed = config.model_copy(update={"learning_rate": 1e-3})
    other = await train(model, data, config=changed, checkpoints=tmp_path / "c")
    assert other.version == (await train(model, data, config=changed)).version


async def test_a_step_that_was_saved_was_told(
    model: SlottedModel, data: list[Datum], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.model_copy(update={"steps": 4, "save_every": 2})
    seen: list[int] = []
    save = LoraTrainer.save

    async def save_and_end(self: LoraTrainer, trainee: str, path: Path) -> None:
        await save(self, trainee, path)
        raise asyncio.CancelledError

    async def go() -> None:
        await train(
            model,
            data,
            config=config,
            checkpoints=tmp_path / "c",
            on_step=lambda step: seen.append(step.step),
        )

    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(LoraTrainer, "save", save_and_end)
        await go()
    await go()
    assert seen == [1, 2, 3, 4]


async def test_an_adapter_to_start_from_keeps_its_shape(
    model: SlottedModel, data: list[Datum]
) -> None:
    start = tiny_adapter("start", rank=2, layers=range(1, 2), targets=("mlp.up_proj",))
    config = CONFIG.model_copy(update={"steps": 1})
    adapter = await train(model, data, config=config, init=start)
    assert adapter.name == "toy" and adapter.rank == 2
    [(name, lora)] = adapter.factors.items()
    assert name == "model.layers.1.mlp.up_proj" and lora.scale == 2.0
    change = (lora.a - start.factors[name].a).abs().max()
    assert 0 < change < 1.1 * config.learning_rate
    nameless = await train(model, data, config=config, init=replace(start, base=""))
    assert nameless.base == "tiny" and nameless.version == adapter.version


async def test_a_step_follows_the_mean_over_its_tokens(
    model: SlottedModel, data: list[Datum]
) -> None:
    steps: list[SftStep] = []
    config = CONFIG.model_copy(update={"steps": 1, "batch_size": 40})
    start = tiny_adapter("start", layers=range(2, 4))
    await train(model, data, config=config, init=start, on_step=steps.append)
    trainer = make_trainer(model, start)
    output = await run(trainer, data)
    metrics = await step(trainer, 1e-3)
    assert steps[0].loss == pytest.approx(output.metrics["train/loss"], rel=1e-5)
    assert steps[0].grad_norm == pytest.approx(metrics["train/grad_norm"] / 80, rel=1e-4)


async def test_a_diverged_training_names_the_step(
    model: SlottedModel, data: list[Datum], tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"learning_rate": 1e36, "schedule": "constant"})
    with pytest.raises(TrainError, match=r"^Step [2-4]: the .* lower the learning rate"):
        await train(model, data, config=config, checkpoints=tmp_path)
    assert os.listdir(tmp_path) == []


async def test_data_that_teach_nothing_are_refused(model: SlottedModel) -> None:
    with pytest.raises(TrainError, match="There are no data"):
        await train(model, [])
    with pytest.raises(TrainError, match="no target with a weight"):
        await train(model, [next_tokens((5, 6), (0.0, 0.0))])
    with pytest.raises(TrainError, match="sum to -8"):
        await train(model, [next_tokens((5, 6), (0.0, -1.0))])


def test_tasks_become_rows_with_weight_on_the_answer(template: Template) -> None:
    [row] = sft_data([words_task(21)], template)
    assert row.tokens == (10, 21, 11) and row.positions == (2,)
    assert row.targets == (4,) and row.weights == (1.0,)
    [row] = sft_data([words_task(22)], template, end_token=2)
    assert row.tokens == (10, 22, 11, 5) and row.positions == (2, 3)
    assert row.targets == (5, 2) and row.weights == (1.0, 1.0)
    free = Task(id="toy/free", prompt="w10", reference="w7 w8")
    [row] = sft_data([free], template)
    assert row.tokens == (10, 7) and row.targets == (7, 8) and row.weights == (1.0, 1.0)
    [row] = sft_data([replace(words_task(21), weight=0.25)], template)
    assert set(row.weights) == {0.25}
    [row] = sft_data([replace(words_task(21), reference=1)], template)
    assert row.targets[-1] == 5, "an index into the choices"
    with pytest.raises(TaskError, match="toy/free has no reference"):
        sft_data([replace(free, reference=None)], template)
    with pytest.raises(TaskError, match="'w9' is none of its choices"):
        sft_data([replace(words_task(21), reference="w9")], template)


def test_references_that_are_no_text_are_learned_as_json() -> None:
    class Spelled:
        """Encodes a text as its characters."""

        def encode_choice(self, task: Task, choice: str) -> tuple[tuple[int, ...], int]:
            return (0, *map(ord, choice)), 1

    template: Any = Spelled()
    cases: list[tuple[Json, str]] = [(7, "7"), ({"à": [1]}, '{"à": [1]}')]
    for reference, text in cases:
        [row] = sft_data([Task(id="t", prompt="p", reference=reference)], template)
        assert "".join(map(chr, row.targets)) == text


def test_learning_rates_rise_then_fall() -> None:
    config = SftConfig(learning_rate=1.0, warmup=0.5)
    rates = [learning_rate_at(step, config=config, num_steps=4) for step in range(4)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5])
    constant = config.model_copy(update={"schedule": "constant", "warmup": 0.0})
    assert {learning_rate_at(step, config=constant, num_steps=4) for step in range(4)} == {1.0}
    line = config.model_copy(update={"schedule": "linear", "warmup": 0.2})
    falling = [learning_rate_at(step, config=line, num_steps=5) for step in range(5)]
    assert falling == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])
    for warmup, schedule in product((0.0, 0.3, 1.0), ("cosine", "linear")):
        some = config.model_copy(update={"warmup": warmup, "schedule": schedule})
        for num_steps in (1, 2, 7):
            every = [
                learning_rate_at(s, config=some, num_steps=num_steps) for s in range(num_steps)
            ]
            assert all(0 < rate <= 1 for rate in every) and max(every) == pytest.approx(1.0)


@given(num_rows=st.integers(1, 9), batch_size=st.integers(1, 5), epochs=st.integers(1, 3))
def test_epochs_show_every_row_once_each(num_rows: int, batch_size: int, epochs: int) -> None:
    rows = order_rows(num_rows, seed=1, epochs=epochs)
    batches = list(
        order_batches([1] * num_rows, rows=rows, batch_size=batch_size, batch_tokens=None)
    )
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    flat = [row for batch in batches for row in batch]
    for epoch in range(epochs):
        part = flat[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part) == list(range(num_rows))
    assert len(flat) == epochs * num_rows


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), budget=st.integers(1, 20))
def test_batches_of_tokens_stay_under_their_budget(sizes: list[int], budget: int) -> None:
    rows = list(order_rows(len(sizes), seed=1, epochs=2))
    batches = list(order_batches(sizes, rows=iter(rows), batch_size=1, batch_tokens=budget))
    assert [row for batch in batches for row in batch] == rows
    for batch in batches:
        assert sum(sizes[row] for row in batch) <= budget or len(batch) == 1
    for batch, following in pairwise(batches):
        assert sum(sizes[row] for row in batch) + sizes[following[0]] > budget


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int) -> list[int]:
        return list(order_rows(20, seed=seed, epochs=2))

    assert order(1) == order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]


async def test_steps_run_for_as_many_epochs_as_they_take(
    model: SlottedModel, data: list[Datum]
) -> None:
    steps: list[SftStep] = []
    config = CONFIG.model_copy(update={"steps": None, "epochs": 2, "batch_tokens": 40})
    await train(model, data[:10], config=config, on_step=steps.append)
    assert sum(step.num_tokens for step in steps) == 2 * 10 * 2
    assert len(steps) == 2, "10 rows of 4 input tokens fit in 40"
    assert torch.is_grad_enabled()
