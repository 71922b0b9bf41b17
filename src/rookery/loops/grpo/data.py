"""Batches -> data: each rollout one row or several, its advantage on every token it drew."""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import Any

from rookery.errors import AdapterError, TaskError, TrainError
from rookery.loops.grpo.batch import ADVANTAGES, Batch, DrawnGroup, DrawnRollout
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import Engine
from rookery.rollout import TasksetEvaluator
from rookery.seeding import stream
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset
from rookery.train.averaging import averaged
from rookery.types import Adapter, Datum, SamplingParams, TokenSequence

__all__ = [
    "MIN_REPORT_TASKS",
    "check_inputs",
    "check_splits",
    "make_data",
    "mean_gap",
    "token_gaps",
]

# What can be refused is refused here, before a run is made.


MIN_REPORT_TASKS = 2
"""One task shows no spread, and so has no interval."""


def check_inputs(
    config: GrpoConfig,
    *,
    start: Adapter | None,
    tasksets: Sequence[Taskset],
    engine: Engine,
    evaluator: TasksetEvaluator | None,
) -> None:
    """Raise the first thing that would make the run fail, or its result mean nothing.

    `start` is the adapter to begin with; None: all weights are trained. Without an evaluator
    lengths are not checked: what a game says is known when it is played.
    """
    check_splits(tasksets)
    if start is not None and start.rank > engine.max_rank:
        where = "lora.rank" if config.init_from is None else f"The rank of {config.init_from}"
        raise AdapterError(
            f"{where} is {start.rank}, and the engine takes adapters up to rank "
            f"{engine.max_rank}: write {engine.max_rank} or less, or raise the engine's limit."
        )
    if evaluator is not None and engine.context_tokens is not None:
        tasks = [task for taskset in tasksets for name in SPLITS for task in taskset.split(name)]
        evaluator.check_lengths(tasks, context_tokens=engine.context_tokens)


def check_splits(tasksets: Sequence[Taskset]) -> None:
    """Raise TaskError unless each split has tasks for what it is used for. Without any taskset
    there is none to check: then an environment elsewhere has the tasks."""
    if not tasksets:
        return
    uses = {
        "search": "trained on",
        "select": "read to choose a checkpoint",
        "report": "read once, for the result",
    }
    for name in SPLITS:
        count = sum(len(taskset.split(name)) for taskset in tasksets)
        if count == 0:
            raise TaskError(
                f"No taskset has tasks of the {name} split, which are {uses[name]}: give at least "
                f"one of them splits.{name} above 0."
            )
        if name == "report" and count < MIN_REPORT_TASKS:
            raise TaskError(
                f"The report split has {count} task, which gives no interval: add tasks, or raise "
                "splits.report."
            )


def make_data(batch: Batch, config: GrpoConfig) -> tuple[Datum, ...]:
    """The rows of a step, with weights that average over it as the loss has it.

    A rollout counts as one sequence however many rows it has.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    advantages = [own for group in batch.groups for own in _advantages(group, config)]
    weights = _weights(rollouts, config)
    params = config.drawing.params(group_size=config.group_size)
    return tuple(
        _with_own_values(rollout, _datum(sequence, advantage, weight, params))
        for rollout, advantage, weight in zip(rollouts, advantages, weights, strict=True)
        for sequence in rollout.sequences
    )


def _with_own_values(rollout: DrawnRollout, datum: Datum) -> Datum:
    """What the environment said of this rollout takes the place of what follows from its group."""
    own: dict[str, Any] = {}
    if rollout.advantages is not None:
        own["advantages"] = rollout.advantages
    if rollout.reference_logprobs:
        own["reference_logprobs"] = rollout.reference_logprobs
    if rollout.temperature is not None:
        own["temperature"] = rollout.temperature
    return replace(datum, **own) if own else datum


def mean_gap(data: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    """The mean of |log p now - log p when drawn| over all tokens that were drawn."""
    gaps = [abs(gap) for row in token_gaps(data, logprobs) for gap in row]
    return fsum(gaps) / len(gaps)


def token_gaps(
    data: Sequence[Datum], logprobs: Sequence[Sequence[float]]
) -> tuple[tuple[float, ...], ...]:
    """log p now - log p when drawn, by row and drawn token."""
    return tuple(
        tuple(now - then for now, then in zip(own, datum.sampled_logprobs, strict=True))
        for datum, own in zip(data, logprobs, strict=True)
    )


def _advantages(group: DrawnGroup, config: GrpoConfig) -> tuple[float, ...]:
    rewards = [rollout.reward for rollout in group.rollouts]
    if all(rollout.advantages is not None for rollout in group.rollouts):
        return (0.0,) * len(rewards)
    rng = stream(config.seed, "grpo-advantages", group.position)
    return ADVANTAGES[config.advantage_name](rewards, rng=rng)


def _weights(rollouts: Sequence[DrawnRollout], config: GrpoConfig) -> list[float]:
    """What each drawn token of a rollout weighs."""
    whole = [
        Datum(tokens=(), positions=(), targets=(), weights=(1.0,) * rollout.num_drawn)
        for rollout in rollouts
    ]
    [weighted] = averaged([whole], config.loss.average, max_tokens=config.max_drawn_tokens)
    return [datum.weights[0] for datum in weighted]


def _datum(
    sequence: TokenSequence, advantage: float, weight: float, params: SamplingParams
) -> Datum:
    num = len(sequence.drawn)
    if params.is_cut and len(sequence.kept) != num:
        raise TrainError(
            f"An answer of {num} tokens has {len(sequence.kept)} sets of tokens that it was drawn "
            "from: with top_p, top_k or min_p the engine must report them for every token."
        )
    return Datum(
        tokens=sequence.tokens[: sequence.drawn[-1]],
        positions=tuple(place - 1 for place in sequence.drawn),
        targets=tuple(sequence.tokens[place] for place in sequence.drawn),
        weights=(weight,) * num,
        sampled_logprobs=sequence.logprobs,
        advantages=(advantage,) * num,
        temperature=params.temperature,
        kept=sequence.kept,
    )
