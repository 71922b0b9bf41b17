"""Supervised fine-tuning: tasks with known answers -> an adapter that gives them.

    data = sft_data(taskset.split("search"), template, end_token=model.shape.eos_tokens[0])
    adapter = await sft(model, data, SftConfig(layers=4), name="poet", base="smollm2")

The same model, data and config give the same adapter, bit for bit, even if the training was
interrupted and resumed from its checkpoint.
"""

import asyncio
import hashlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from pydantic import Field

from rookery.errors import TaskError, TrainError
from rookery.ports import Trainees, Trainer
from rookery.runs.budget import BudgetConfig, find_tokens_over
from rookery.slots import SlottedModel
from rookery.tasks.scorers.text import correct_choice
from rookery.tasks.template import Template
from rookery.train.lora_trainee import LoraConfig, initial_adapter
from rookery.train.lora_trainer import LoraTrainer
from rookery.train.packing import check_data, input_tokens
from rookery.train.schedule import (
    AdamWConfig,
    ScheduleConfig,
    learning_rate_at,
    order_batches,
    order_rows,
)
from rookery.train.slotted_trainer import TrainerConfig
from rookery.types import Adapter, Datum, OptimStep, Task, TrainRequest
from rookery.weights import read_adapter, write_adapter

__all__ = [
    "RemoteTrainer",
    "SftConfig",
    "SftStep",
    "find_cut",
    "prepare_sft",
    "prepare_sft_elsewhere",
    "sft",
    "sft_data",
]

logger = logging.getLogger(__name__)

HasRoom = Callable[[int], Awaitable[bool]]
"""Whether a step, counted from 0, may begin."""


class SftConfig(ScheduleConfig, LoraConfig):
    """Supervised fine-tuning of an adapter."""

    init_from: Path | None = None
    """Adapter folder to start from, with that adapter's rank, alpha, targets and layers; null: a
    new adapter that changes nothing yet."""
    epochs: int = Field(default=3, ge=1)
    """Times that every row is seen."""
    steps: int | None = Field(default=None, ge=1)
    """Number of steps, in place of epochs."""
    batch_size: int = Field(default=16, ge=1)
    """Rows per step."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per step, in place of batch_size."""
    learning_rate: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate, reached after the warm-up. Few layers of a small model take 3e-3 to 1e-2,
    many layers of a large one 1e-4 to 3e-4."""
    seed: int = 0
    """Seed of the new adapter and of the order of the rows."""
    save_every: int = Field(default=50, ge=1)
    """Steps between checkpoints, if the caller keeps any."""
    optimizer: AdamWConfig = AdamWConfig()
    """Values of AdamW."""
    trainer: TrainerConfig = TrainerConfig()
    """Memory of the trainer."""
    budget: BudgetConfig = BudgetConfig()
    """Limits of the training. Over the token limit it takes fewer steps, and the learning rate
    falls over these. Over the hours it ends after the current step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """A finished step: 1 of 40, 2 of 40, ..."""

    step: int
    num_steps: int
    loss: float
    """-log p per weighted token, before the step."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_tokens: int
    """Tokens with a weight."""
    seconds: float


async def sft(
    model: SlottedModel,
    data: Sequence[Datum],
    config: SftConfig,
    *,
    name: str,
    base: str,
    init: Adapter | None = None,
    checkpoints: Path | None = None,
    on_step: Callable[[SftStep], None] | None = None,
) -> Adapter:
    """Train an adapter of `base` on the data; the gradient of a step is a mean over its tokens.

    `init` is the adapter read from `config.init_from`. The folder `checkpoints`, one per model,
    keeps the trainer's state under a hash of all other inputs, and the same call resumes from it.
    """
    training = prepare_sft(model, data, config, name=name, base=base, init=init)
    return await training.run(checkpoints=checkpoints, on_step=on_step)


def prepare_sft(
    model: SlottedModel,
    data: Sequence[Datum],
    config: SftConfig,
    *,
    name: str,
    base: str,
    init: Adapter | None,
) -> "SftTraining":
    """Check the data and return the training that `sft` runs."""
    _check(data, model)
    start = init or initial_adapter(model, config, name=name, base=base, seed=config.seed)
    start = replace(start, name=name, base=start.base or base)
    trainer = LoraTrainer(model, config=config.trainer)
    trainer.add(name, start)

    async def trained() -> Adapter:
        return await asyncio.to_thread(trainer.adapter, name)

    return SftTraining(
        trainer, data, config, start, num_steps=lambda: trainer.trainee(name).num_steps,
        trained=trained,
    )  # fmt: skip


class RemoteTrainer(Trainer, Trainees, Protocol):
    """A trainer elsewhere that counts steps."""

    def num_steps(self, trainee: str) -> int: ...


async def prepare_sft_elsewhere(
    trainer: RemoteTrainer, data: Sequence[Datum], config: SftConfig, *, start: Adapter
) -> "SftTraining":
    """Return the same training from `start` on a remote trainer, which checks data itself."""
    _check_rows(data)
    with tempfile.TemporaryDirectory(prefix="rookery-sft-") as scratch:
        folder = Path(scratch) / "start"
        await asyncio.to_thread(write_adapter, start, folder)
        await trainer.create(start.name, folder)

    async def trained() -> Adapter:
        with tempfile.TemporaryDirectory(prefix="rookery-sft-") as scratch:
            folder = Path(scratch) / "trained"
            await trainer.export(start.name, folder)
            adapter = await asyncio.to_thread(read_adapter, folder)
        return replace(adapter, name=start.name, base=start.base)

    return SftTraining(
        trainer, data, config, start, num_steps=lambda: trainer.num_steps(start.name),
        trained=trained,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SftTraining:
    """A training that is ready to run."""

    trainer: Trainer
    data: Sequence[Datum]
    config: SftConfig
    start: Adapter
    num_steps: Callable[[], int]
    trained: Callable[[], Awaitable[Adapter]]

    async def run(
        self,
        *,
        checkpoints: Path | None,
        on_step: Callable[[SftStep], None] | None,
        has_room: HasRoom | None = None,
    ) -> Adapter:
        trainer, data, config, name = self.trainer, self.data, self.config, self.start.name
        state = None if checkpoints is None else checkpoints / _state_name(self.start, data, config)
        if state is not None and state.exists():
            await trainer.load(name, state)
        batches = _batches(data, config)
        for step in range(self.num_steps(), len(batches)):
            if has_room is not None and not await has_room(step):
                break
            request = TrainRequest(
                trainee=name, data=_mean_weights([data[row] for row in batches[step]])
            )
            report = await _step(trainer, request, config, step=step, num_steps=len(batches))
            if on_step is not None:
                on_step(report)  # before saving: a resumed run does not report saved steps
            if state is not None and report.step % config.save_every == 0:
                await trainer.save(name, state)
        if state is not None:
            await trainer.save(name, state)
        return await self.trained()


def _check(data: Sequence[Datum], model: SlottedModel) -> None:
    _check_rows(data)
    check_data(data, shape=model.shape)


def _check_rows(data: Sequence[Datum]) -> None:
    if not data:
        raise TrainError("There are no data to train on; give at least one row.")
    if not any(weight != 0.0 for datum in data for weight in datum.weights):
        raise TrainError(
            f"{len(data)} data have no target with a weight: there is nothing to learn. Give the "
            "tokens of the answers a weight of 1."
        )


async def _step(
    trainer: Trainer, request: TrainRequest, config: SftConfig, *, step: int, num_steps: int
) -> SftStep:
    began = time.perf_counter()
    rate = learning_rate_at(step, config=config, num_steps=num_steps)
    [output] = await trainer.forward_backward([request])
    if output.error:
        raise TrainError(output.error)
    optimizer = config.optimizer.model_dump()
    [stepped] = await trainer.optim_step(
        [OptimStep(trainee=request.trainee, learning_rate=rate, **optimizer)]
    )
    if stepped.error:
        raise TrainError(stepped.error)
    metrics = {**output.metrics, **stepped.metrics}
    report = SftStep(
        step=step + 1,
        num_steps=num_steps,
        loss=metrics["train/loss"],
        grad_norm=metrics["train/grad_norm"],
        learning_rate=rate,
        num_tokens=int(metrics["train/num_tokens"]),
        seconds=time.perf_counter() - began,
    )
    logger.info("step %d of %d: loss %.4f", report.step, num_steps, report.loss)
    return report


def sft_data(
    tasks: Sequence[Task], template: Template, *, end_token: int | None = None
) -> list[Datum]:
    """Return a row per task: the prompt without weight, then the answer with the task's weight.

    The answer is the right choice if the task has choices, else the reference: a string as it is,
    any other value as JSON. `end_token` is learned after the answer. A model that must stop by
    itself needs it; a model that only scores choices does not.
    """
    return [_datum(task, template, end_token) for task in tasks]


def _datum(task: Task, template: Template, end_token: int | None) -> Datum:
    tokens, start = template.encode_choice(task, _answer(task))
    if end_token is not None:
        tokens = (*tokens, end_token)
    return Datum(
        tokens=tokens[:-1],
        positions=tuple(range(start - 1, len(tokens) - 1)),
        targets=tokens[start:],
        weights=(task.weight,) * (len(tokens) - start),
    )


def _answer(task: Task) -> str:
    if task.choices:
        choice = correct_choice(task)
        if choice is None:
            raise TaskError(
                f"Task {task.id}: the reference {task.reference!r} is none of its choices "
                f"{list(task.choices)}: there is no answer to learn."
            )
        return choice
    if task.reference is None:
        raise TaskError(f"Task {task.id} has no reference: there is no answer to learn.")
    if isinstance(task.reference, str):
        return task.reference
    return json.dumps(task.reference, ensure_ascii=False)


def count_steps(data: Sequence[Datum], config: SftConfig) -> int:
    return len(_batches(data, config))


def find_cut(data: Sequence[Datum], config: SftConfig) -> str:
    """Return why a budget of answer tokens cuts steps; empty if it cuts none."""
    spent = 0
    for number, batch in enumerate(_planned(data, config)):
        spent += _count_answer_tokens(data, batch)
        if number and (over := find_tokens_over(config.budget, spent)):
            return over
    return ""


def _batches(data: Sequence[Datum], config: SftConfig) -> list[list[int]]:
    """Return the rows of each step within the budget of answer tokens, at least one step."""
    batches, spent = list[list[int]](), 0
    for batch in _planned(data, config):
        spent += _count_answer_tokens(data, batch)
        if batches and find_tokens_over(config.budget, spent):
            break
        batches.append(batch)
    return batches


def _planned(data: Sequence[Datum], config: SftConfig) -> Iterator[list[int]]:
    """Yield the rows of each step, ignoring the budget."""
    sizes = [len(input_tokens(datum)) for datum in data]
    epochs = config.epochs if config.steps is None else None
    rows = order_rows(len(data), seed=config.seed, epochs=epochs)
    batches = order_batches(
        sizes, rows=rows, batch_size=config.batch_size, batch_tokens=config.batch_tokens
    )
    return islice(batches, config.steps)


def _count_answer_tokens(data: Sequence[Datum], batch: Sequence[int]) -> int:
    return sum(weight != 0.0 for row in batch for weight in data[row].weights)


def _mean_weights(batch: Sequence[Datum]) -> tuple[Datum, ...]:
    """Scale weights to sum to 1: the batch size then affects neither norm nor clipping."""
    total = math.fsum(weight for datum in batch for weight in datum.weights)
    if total <= 0:
        raise TrainError(
            f"The weights of a batch of {len(batch)} rows sum to {total:g}; supervised training "
            "needs a positive sum: give every row an answer of positive weight."
        )
    return tuple(
        replace(datum, weights=tuple(weight / total for weight in datum.weights)) for datum in batch
    )


def _state_name(start: Adapter, data: Sequence[Datum], config: SftConfig) -> str:
    left_out = {"save_every", "init_from"} | (set() if config.budget.has_limit else {"budget"})
    settings = config.model_dump(mode="json", exclude=left_out)
    digest = hashlib.blake2b(digest_size=8)
    for part in (start.version, settings, *map(asdict, data)):
        digest.update(json.dumps(part).encode() + b"\n")
    return f"sft-{digest.hexdigest()}.safetensors"
