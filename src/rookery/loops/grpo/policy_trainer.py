"""Training steps of the policy: data -> gradients -> step, and the check against the engine.

    rows = await trainer.prepare(7, batch, policy=policy)
    metrics = await trainer.gradients(rows)
    metrics["train/loss"], metrics["grpo/logprob_gap"]
    metrics |= await trainer.apply(7)

Under the same weights, the log-probabilities of engine and trainer must agree. Otherwise the engine
does not serve the policy that is trained. Answers drawn with the current weights are compared as
they are. If a batch was drawn with older weights, the engine scores a few answers again.

A rollout becomes one or more rows, with its advantage on every drawn token.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from rookery.errors import AdapterError, TaskError, TrainError
from rookery.loops.grpo.batch import ADVANTAGES, Batch, DrawnGroup, DrawnRollout
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.group_source import Policy
from rookery.loops.grpo.policy_weights import POLICY, REFERENCE, PolicyWeights
from rookery.ports import Engine, Sampler, Trainer
from rookery.rollout import TasksetEvaluator
from rookery.seeding import stream
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset
from rookery.train.losses.loss import averaged
from rookery.train.schedule import learning_rate_at
from rookery.types import (
    Adapter,
    Datum,
    OptimStep,
    SamplingParams,
    ScoreRequest,
    TokenSequence,
    TrainOutput,
    TrainRequest,
)

__all__ = [
    "MIN_REPORT_TASKS",
    "PolicyTrainer",
    "StepData",
    "check_inputs",
    "check_splits",
    "make_data",
    "mean_gap",
    "token_gaps",
]


MIN_REPORT_TASKS = 2
"""One task has no spread, so it gives no interval."""


def check_inputs(
    config: GrpoConfig,
    *,
    start: Adapter | None,
    tasksets: Sequence[Taskset],
    engine: Engine,
    evaluator: TasksetEvaluator | None,
) -> None:
    """Raise the first error that would fail the run or make its result meaningless.

    `start` is the initial adapter; None: all weights are trained. Without an evaluator lengths are
    not checked, because the texts of a game are known only once it is played.
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
    """Raise TaskError unless each split has enough tasks for its use. Without tasksets there is
    nothing to check: an environment elsewhere has the tasks."""
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
            if any(name in taskset.splits.hidden for taskset in tasksets):
                continue  # reserved for another run
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
    """Build the rows of a step, with weights that average as the loss requires.

    A rollout counts as one sequence, however many rows it has.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    advantages = [advantage for group in batch.groups for advantage in _advantages(group, config)]
    weights = _weights(rollouts, config)
    params = config.drawing.params(group_size=config.group_size)
    return tuple(
        _with_environment_values(rollout, _datum(sequence, advantage, weight, params))
        for rollout, advantage, weight in zip(rollouts, advantages, weights, strict=True)
        for sequence in rollout.sequences
    )


def _with_environment_values(rollout: DrawnRollout, datum: Datum) -> Datum:
    """Override values that follow from the group by those that the environment gave."""
    values: dict[str, Any] = {}
    if rollout.advantages is not None:
        values["advantages"] = rollout.advantages
    if rollout.reference_logprobs:
        values["reference_logprobs"] = rollout.reference_logprobs
    if rollout.temperature is not None:
        values["temperature"] = rollout.temperature
    return replace(datum, **values) if values else datum


def mean_gap(data: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    """Return the mean of |log p now - log p when drawn| over all drawn tokens."""
    gaps = [abs(gap) for row in token_gaps(data, logprobs) for gap in row]
    return fsum(gaps) / len(gaps)


def token_gaps(
    data: Sequence[Datum], logprobs: Sequence[Sequence[float]]
) -> tuple[tuple[float, ...], ...]:
    """Return log p now - log p when drawn, by row and drawn token."""
    return tuple(
        tuple(now - then for now, then in zip(logprobs_now, datum.sampled_logprobs, strict=True))
        for datum, logprobs_now in zip(data, logprobs, strict=True)
    )


def _advantages(group: DrawnGroup, config: GrpoConfig) -> tuple[float, ...]:
    rewards = [rollout.reward for rollout in group.rollouts]
    if all(rollout.advantages is not None for rollout in group.rollouts):
        return (0.0,) * len(rewards)
    rng = stream(config.seed, "grpo-advantages", group.position)
    return tuple(
        group.weight * advantage
        for advantage in ADVANTAGES[config.advantage_name](rewards, rng=rng)
    )


def _weights(rollouts: Sequence[DrawnRollout], config: GrpoConfig) -> list[float]:
    """Return the weight of each rollout's drawn tokens."""
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


NUM_PROBES = 8
"""Rollouts that the engine scores again: a few hundred tokens reveal any wrong layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The rows of one step."""

    step: int
    data: tuple[Datum, ...]
    is_fresh: bool
    """True if the weights before this step drew the batch."""
    gap: float | None
    """Gap between engine and trainer, if the engine scored some rows again."""


class PolicyTrainer:
    def __init__(self, weights: PolicyWeights, *, engine: Sampler, config: GrpoConfig) -> None:
        self._trainer = weights.trainer
        self._reference = weights.reference
        self._engine = engine
        self._config = config
        self.gaps: tuple[tuple[float, ...], ...] = ()
        """Trainer log p minus engine log p of the last `gradients` call, by row and drawn token."""

    async def publish(self, step: int) -> Policy:
        """Publish the current weights, which have taken `step` steps, to the engine."""
        return Policy(await self._trainer.publish(POLICY), step)

    async def prepare(self, step: int, batch: Batch, *, policy: Policy) -> StepData:
        """Build the rows of the batch. If older weights drew it, the engine scores some rows again:
        call this while no draw is under way, because requests computed together may differ in the
        last bits from requests computed apart."""
        if not batch.groups:
            return StepData(step=step, data=(), is_fresh=False, gap=None)
        data = await asyncio.to_thread(make_data, batch, self._config)
        gap = await self._probe(step, data, batch, policy)
        return StepData(step=step, data=data, is_fresh=batch.model_step == step, gap=gap)

    async def gradients(self, rows: StepData) -> dict[str, float]:
        """Compute the gradients of a step and the gap between engine and trainer.

        Does not change weights. A batch without groups has no gradients.
        """
        self.gaps = ()
        if not rows.data:
            return {}
        data = await self._with_logprobs(rows.data)
        request = TrainRequest(
            trainee=POLICY,
            data=data,
            loss=self._config.loss.type,
            loss_options=self._config.loss.model_dump(mode="json", exclude={"type"}),
        )
        [output] = _checked(await self._trainer.forward_backward([request]))
        drift = mean_gap(data, output.logprobs)
        self.gaps = token_gaps(data, output.logprobs)
        gap = drift if rows.is_fresh else rows.gap
        self._check_gap(rows.step, gap)
        gaps = {"grpo/logprob_drift": drift}
        if gap is not None:
            gaps["grpo/logprob_gap"] = gap
        return {**output.metrics, **gaps}

    async def apply(self, step: int) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradients."""
        rate = learning_rate_at(step, config=self._config, num_steps=self._config.steps)
        optimizer = self._config.optimizer.model_dump()
        [output] = await self._trainer.optim_step(
            [OptimStep(trainee=POLICY, learning_rate=rate, **optimizer)]
        )
        if output.error:
            raise TrainError(output.error)
        return dict(output.metrics)

    async def _with_logprobs(self, data: tuple[Datum, ...]) -> tuple[Datum, ...]:
        """Add the log-probabilities that the loss needs: those of the start, and those of the
        policy before this step. Environments may have given the start's for some or all rows."""
        needs = self._config.loss.needs
        if (
            not all(datum.reference_logprobs for datum in data)
            and "reference_logprobs" not in needs
        ):
            data = _without_reference(data)
        elif not all(datum.reference_logprobs for datum in data):
            logprobs = await _logprobs(self._reference, REFERENCE, data)
            data = tuple(
                datum if datum.reference_logprobs else replace(datum, reference_logprobs=reference)
                for datum, reference in zip(data, logprobs, strict=True)
            )
        if "old_logprobs" in needs:
            logprobs = await _logprobs(self._trainer, POLICY, data)
            data = tuple(
                replace(datum, old_logprobs=old) for datum, old in zip(data, logprobs, strict=True)
            )
        return data

    async def _probe(
        self, step: int, data: Sequence[Datum], batch: Batch, policy: Policy
    ) -> float | None:
        """Return the gap under this step's weights; None if the engine lacks them or drew the batch
        with them."""
        if policy.step != step or batch.model_step == step:
            return None
        probes = [replace(datum, temperature=1.0, kept=()) for datum in data[:NUM_PROBES]]
        ours = await _logprobs(self._trainer, POLICY, probes)
        scores = await self._engine.score(
            [
                ScoreRequest(
                    model=policy.ref,
                    tokens=(*probe.tokens, probe.targets[-1]),
                    start=probe.positions[0] + 1,
                )
                for probe in probes
            ]
        )
        scored = [
            replace(probe, sampled_logprobs=_pick(probe.positions, score.logprobs))
            for probe, score in zip(probes, scores, strict=True)
        ]
        return mean_gap(scored, ours)

    def _check_gap(self, step: int, gap: float | None) -> None:
        # Written as `not <=` so that NaN fails too.
        if gap is not None and not gap <= self._config.max_gap:
            raise TrainError(
                f"Step {step}: under the same weights the log-probabilities of engine and trainer "
                f"differ by {gap:.3g} nats on average, more than max_gap "
                f"({self._config.max_gap:g}). The engine does not answer with the weights that "
                "are trained: check that both load the same model in the same dtype, or raise "
                "max_gap if the difference is rounding."
            )


async def _logprobs(
    trainer: Trainer, trainee: str, data: Sequence[Datum]
) -> tuple[tuple[float, ...], ...]:
    request = TrainRequest(trainee=trainee, data=_without_reference(data))
    [output] = _checked(await trainer.forward([request]))
    return output.logprobs


def _without_reference(data: Sequence[Datum]) -> tuple[Datum, ...]:
    """Drop the column, because all rows of a request must have the same columns."""
    return tuple(replace(datum, reference_logprobs=()) for datum in data)


def _pick(positions: Sequence[int], logprobs: Sequence[float]) -> tuple[float, ...]:
    """Pick the log-probabilities at `positions` from a score that starts at the first of them."""
    return tuple(logprobs[position - positions[0]] for position in positions)


def _checked(outputs: Sequence[TrainOutput]) -> Sequence[TrainOutput]:
    for output in outputs:
        if output.error:
            raise TrainError(output.error)
    return outputs
