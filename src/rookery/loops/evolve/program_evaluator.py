"""Evaluation of programs: jobs on the executor, judges, confirmation, tuning.

    evaluated = await evaluator.evaluate(child, lease=lease, best_score=0.4)

| result of a job             | reaction                                                      |
|-----------------------------|---------------------------------------------------------------|
| an outcome                  | it counts; an evaluator that raised may be tried again        |
| a lost worker               | submitted again with the next epoch; twice: failure `poison`  |
| an error of the task        | submitted again; twice: failure `evaluation`                  |
| cancelled                   | the executor is closing: ExecutorError, the run can resume    |
"""

import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from rookery.errors import ExecutorError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import EvaluationRequest, say_not_isolated
from rookery.loops.evolve.program import (
    SOURCE,
    Metrics,
    ProgramStore,
    has_large,
    is_number,
    keep_artifacts,
)
from rookery.loops.evolve.prompts import Prompts
from rookery.loops.evolve.proposer import Child, Endpoint, ModelFailed, make_child, seed_of
from rookery.loops.evolve.stages import AttemptFailure, Evaluated
from rookery.loops.evolve.tuning import TuneLimit, Variant, tune
from rookery.ports import Executor
from rookery.runtime.concurrency import run_in_thread, together
from rookery.sandbox import Artifact, EvaluationOutcome, Metric, decode_outcome, read_variants
from rookery.search.programs.program import numeric_metrics, score_of
from rookery.seeding import stream_seed
from rookery.types import Job, JobCancelled, JobDone, JobFailed, TokenUsage, WorkerLost

__all__ = [
    "Feedback",
    "Judge",
    "Judgement",
    "Judges",
    "Lease",
    "ProgramEvaluator",
    "merge_feedback",
    "read_feedback",
]


_FENCED = re.compile(r"```json\n(.*?)\n```", re.DOTALL)
_SHARE = 0.3
"""Share of the judges in combined_score, as in OpenEvolve. Independent of `llm_feedback_weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """The judges' scores by name, as weighted means, and their other remarks."""

    scores: dict[str, float]
    artifacts: dict[str, str]


def read_feedback(answers: Sequence[str], *, weights: Sequence[float]) -> Feedback | None:
    """Parse the judges' answers. None if one is not a JSON object or has no score."""
    scores: dict[str, float] = {}
    artifacts: dict[str, str] = {}
    for answer, weight in zip(answers, weights, strict=True):
        document = _read_object(answer)
        numbers = {name: float(value) for name, value in document.items() if is_number(value)}
        if not numbers:
            return None
        for name, value in numbers.items():
            scores[name] = scores.get(name, 0.0) + value * weight / sum(weights)
        remarks = {name: value for name, value in document.items() if name not in numbers}
        artifacts |= {name: _text(value) for name, value in remarks.items()}
    return Feedback(scores=scores, artifacts=artifacts)


def merge_feedback(metrics: Metrics, feedback: Feedback, *, weight: float) -> dict[str, Any]:
    """Add `llm_<name>` and `llm_average` to the metrics, and mix the judges into combined_score.

    feedback = read_feedback(['{"readability": 0.8, "reasoning": "short"}'], weights=[1.0])
    merge_feedback({"combined_score": 0.5}, feedback, weight=0.1)
    {"combined_score": 0.59, "llm_readability": 0.08, "llm_average": 0.08}
    """
    merged = dict(metrics)
    merged |= {f"llm_{name}": value * weight for name, value in feedback.scores.items()}
    average = sum(feedback.scores.values()) / len(feedback.scores)
    merged["llm_average"] = average * weight
    if is_number(metrics.get("combined_score")):
        merged["combined_score"] = metrics["combined_score"] * (1 - _SHARE) + average * _SHARE
    return merged


def _read_object(answer: str) -> dict[str, Any]:
    fenced = _FENCED.search(answer)
    text = fenced[1] if fenced else answer[answer.find("{") : answer.rfind("}") + 1]
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that judges programs, and its weight."""

    endpoint: Endpoint
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """All judges' feedback and its cost. `usage` is None if a judge does not report it."""

    feedback: Feedback
    usage: TokenUsage | None


class Judges:
    """Asks every judge about every program."""

    def __init__(
        self, judges: tuple[Judge, ...], *, prompts: Prompts, weight: float, seed: int
    ) -> None:
        self._judges = judges
        self._prompts = prompts
        self._weight = weight
        self._seed = seed

    async def judge(self, code: str, *, attempt: int) -> Judgement | AttemptFailure:
        """Judge a program. It fails if a judge fails, as its score would not be comparable."""
        prompt = self._prompts.build_feedback(code)
        seed = seed_of(self._seed, "judge", attempt)
        try:
            replies = await together(
                judge.endpoint.reply(
                    judge.endpoint.request(system=prompt.system, user=prompt.user, seed=seed)
                )
                for judge in self._judges
            )
        except ModelFailed as error:
            return AttemptFailure(kind="judge", message=str(error))
        weights = [judge.weight for judge in self._judges]
        feedback = read_feedback([reply.text for reply in replies], weights=weights)
        if feedback is None:
            message = "A judge's answer is no JSON object with a score in it."
            return AttemptFailure(kind="judge", message=message)
        usages = [reply.usage for reply in replies]
        known = [usage for usage in usages if usage is not None]
        usage = TokenUsage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            completion_tokens=sum(usage.completion_tokens for usage in known),
        )
        return Judgement(feedback=feedback, usage=usage if len(known) == len(usages) else None)

    def merge(
        self,
        metrics: Mapping[str, Metric],
        artifacts: Mapping[str, Artifact],
        judgement: Judgement,
    ) -> tuple[dict[str, Metric], dict[str, Artifact]]:
        """Add the judges' metrics and artifacts to the evaluator's."""
        feedback = judgement.feedback
        merged = merge_feedback(metrics, feedback, weight=self._weight)
        return merged, {**artifacts, **feedback.artifacts}


MAX_LOST = 2
"""Lost workers after which a program is taken for the cause."""
MAX_ERRORS = 2
GRACE_S = 180.0
"""Time to open a new sandbox, on top of the evaluator's time limits."""
NUM_STAGES = 3
SMALL_BYTES = 4096
"""Outcomes up to this size are decoded faster than a thread starts."""
FAST_S = 0.2
"""Variants share a job if an evaluation takes less. Then a job takes a few seconds at most."""
SMALLEST_S = 0.001
MOST_FAILED = 2
"""Failed shared jobs after which a tuning shares none: together programs need more memory, time."""
FEWEST_TOGETHER = 4
"""Variants of a shared job, at least: half of its time is then the evaluations."""
LANE = 2**24
"""Job numbers between two lanes: more than a run has attempts."""
NOTHING = TokenUsage(prompt_tokens=0, completion_tokens=0)


ERROR = "error"
"""Artifact of a failed program that holds its error."""
ERROR_LINES, ERROR_CHARS = 12, 1500
"""Limits of an error in a prompt."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A program without a score. `error` is None if it cannot be repaired."""

    failure: AttemptFailure
    error: str | None = None
    seconds: float = 0.0
    """Seconds of the evaluation, or spent on its workers if they failed."""


@dataclass(slots=True)
class Lease:
    """The right to evaluate one attempt. Every job takes the next epoch."""

    attempt: int
    note: Callable[["Lease"], Awaitable[None]]
    """Makes the lease durable."""
    epoch: int = 0
    num_lost: int = 0

    @property
    def is_first(self) -> bool:
        """True for a first program, which is the user's own."""
        return self.attempt < 1

    async def renew(self, *, is_noted: bool = True) -> int:
        """Return the next job's epoch. With `is_noted`, the lease is durable before it begins."""
        self.epoch += 1
        if is_noted:
            await self.note(self)
        return self.epoch


class ProgramEvaluator:
    """Evaluates programs. Concurrency is up to the caller."""

    def __init__(
        self,
        config: EvolveConfig,
        *,
        executor: Executor,
        store: ProgramStore,
        judges: Judges | None,
        seed: int,
        job_offset: int = 0,
    ) -> None:
        self._config = config
        self._job_offset = job_offset
        self._seed = seed
        self.isolate = config.rookery.sandbox.isolate != "never"
        """True if programs run in a separate process from the evaluator."""
        self._executor = executor
        self._store = store
        self._judges = judges
        self._features = config.database.feature_dimensions
        evaluator = config.evaluator
        self._limit_s = evaluator.timeout * NUM_STAGES + GRACE_S
        self._num_tries = 1 if evaluator.cascade_evaluation else 1 + evaluator.max_retries

    async def evaluate(
        self,
        child: Child,
        *,
        lease: Lease,
        best_score: float | None,
    ) -> Evaluated:
        """Score a program, its numbers tuned first with `tune.children`, and store it. If it beats
        `best_score`, it is scored `confirm` more times and gets mean metrics."""
        evaluated = await self._measure(child, lease=lease, best_score=best_score)
        settings = self._config.rookery.tune
        num_tuning = settings.children if settings and self._judges is None else 0
        if not num_tuning or lease.is_first or evaluated.failure is not None:
            return evaluated
        limit = TuneLimit(evaluations=num_tuning)
        score = self.score(evaluated.metrics)
        tuned, seconds = await self._tune(child, score, lease, limit)
        seconds += evaluated.seconds
        if tuned is not child:
            again = await self._measure(tuned, lease=lease, best_score=best_score)
            seconds += again.seconds
            if again.failure is None and self._is_better(again, evaluated):
                evaluated = replace(again, untuned_hash=child.code_hash)
        return replace(evaluated, num_tuning=limit.num, seconds=seconds, num_lost=lease.num_lost)

    async def _measure(self, child: Child, *, lease: Lease, best_score: float | None) -> Evaluated:
        """Score a program with the numbers that it has, and store it."""
        outcomes = await self._score_enough(child, lease, best_score)
        if isinstance(outcomes, _Failed):
            program = await run_in_thread(self._keep_failed, child, outcomes)
            return Evaluated(program=program, failure=outcomes.failure, num_lost=lease.num_lost)
        judgement: Judgement | None = None
        if self._judges is not None:
            judged = await self._judges.judge(child.program.code, attempt=lease.attempt)
            if isinstance(judged, AttemptFailure):
                return Evaluated(failure=judged, num_lost=lease.num_lost)
            judgement = judged
        return await run_in_thread(self._keep, child, outcomes, judgement, lease.num_lost)

    async def tune(self, child: Child, *, lease: Lease, best_score: float) -> Evaluated:
        """Tune the child's parent, a new best program. Fails if no variant beats it."""
        settings = self._config.rookery.tune
        assert settings is not None, "only a run that tunes plans a tuning"
        limit = TuneLimit(evaluations=settings.evaluations, seconds=settings.seconds)
        parent_score = self.score(child.program.parent_metrics)
        tuned, seconds = await self._tune(child, parent_score, lease, limit)
        if tuned is not child:
            evaluated = await self._measure(tuned, lease=lease, best_score=best_score)
        else:
            message = f"None of {limit.num} programs with other numbers is better."
            if not limit.num:
                message = "The program has no numbers to tune."
            evaluated = Evaluated(failure=AttemptFailure(kind="not_tuned", message=message))
        seconds += evaluated.seconds
        return replace(evaluated, num_tuning=limit.num, seconds=seconds, num_lost=lease.num_lost)

    async def _tune(
        self, child: Child, score: float | None, lease: Lease, limit: TuneLimit
    ) -> tuple[Child, float]:
        """Return the best variant of a child, or the child itself, and the evaluations' seconds."""
        program = child.program
        if program.language != "python" or program.files:
            return child, 0.0

        is_steady = self._config.rookery.mode == "steady"
        lanes = self._config.workers if is_steady else 0
        scorer = _VariantScorer(self, lease, limit, lanes=lanes)
        await lease.renew()
        first = Variant(program.code, score)
        seed = stream_seed(self._seed, "tune", lease.attempt)
        best = await tune(first, score=scorer.score, run=scorer.run, seed=seed, limit=limit)
        if best is first:
            return child, scorer.seconds
        # The oldest source: that of a later tuning has the tables of the one before.
        source = {SOURCE: best.source} if best.source else {}
        metadata = {**source, **program.metadata}
        tuned = replace(program, code=best.code, metadata=metadata)
        return await run_in_thread(make_child, tuned), scorer.seconds

    def _keep_failed(self, child: Child, failed: "_Failed") -> str:
        """Store a failed program for repair by another attempt. Waits for the disk."""
        if self._config.database.strategy != "adaptive" or failed.error is None:
            return ""
        artifacts = {ERROR: f"{failed.failure.kind}: {failed.failure.message}\n{failed.error}"}
        return self._store.put(replace(child.program, artifacts=artifacts, prompts={}))

    def _keep(
        self,
        child: Child,
        outcomes: Sequence[EvaluationOutcome],
        judgement: Judgement | None,
        num_lost: int,
    ) -> Evaluated:
        """Store the program with its metrics and artifacts. Waits for the disk."""
        evaluator = self._config.evaluator
        metrics = _mean_metrics(outcomes)
        artifacts = dict(outcomes[0].artifacts) if evaluator.enable_artifacts else {}
        if self._judges is not None and judgement is not None:
            metrics, artifacts = self._judges.merge(metrics, artifacts, judgement)
        program = replace(
            child.program,
            timestamp=time.time(),
            metrics=metrics,
            artifacts=keep_artifacts(artifacts, max_bytes=evaluator.max_artifact_storage),
        )
        scores = [self.score(outcome.metrics) for outcome in outcomes] if len(outcomes) > 1 else []
        usage = judgement.usage if judgement is not None else NOTHING
        return Evaluated(
            program=self._store.put(program),
            metrics=numeric_metrics(metrics),
            code=child.summary,
            code_hash=child.code_hash,
            has_large_artifacts=has_large(
                program.artifacts, max_bytes=self._config.database.artifact_size_threshold
            ),
            scores=tuple(score for score in scores if score is not None),
            seconds=sum(outcome.seconds for outcome in outcomes),
            num_lost=num_lost,
            is_forgeable=any(outcome.is_forgeable for outcome in outcomes),
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
        )

    async def _score_enough(
        self, child: Child, lease: Lease, best_score: float | None
    ) -> "list[EvaluationOutcome] | _Failed":
        code = child.program.code
        once = await self._run(code, lease)
        if isinstance(once, _Failed):
            return once
        outcomes = [once]
        score = self.score(once.metrics)
        if best_score is None or score is None or score <= best_score:
            return outcomes
        for number in range(1, self._config.rookery.confirm + 1):
            again = await self._run(code, lease, repetition=number)
            if isinstance(again, _Failed):
                message = f"Scored again, time {number}: {again.failure.message}"
                failure = AttemptFailure(kind=again.failure.kind, message=message)
                return replace(again, failure=failure)
            outcomes.append(again)
        return outcomes

    async def run(
        self, codes: Sequence[str], lease: Lease, *, lane: int = 0
    ) -> "EvaluationOutcome | _Failed":
        """Evaluate a variant, or several in one job. If it fails, it is not tried again. Jobs of
        one attempt run at the same time if their lanes differ."""
        variants = codes if len(codes) > 1 else ()
        return await self._run(
            codes[0], lease, is_noted=False, most_tries=1, variants=variants, lane=lane
        )

    async def _run(
        self,
        code: str,
        lease: Lease,
        *,
        repetition: int = 0,
        is_noted: bool = True,
        most_tries: int | None = None,
        variants: Sequence[str] = (),
        lane: int = 0,
    ) -> "EvaluationOutcome | _Failed":
        """Return one valid outcome. Its seed follows from attempt, repetition and try, not the
        worker. With `is_noted` false, the lease becomes durable only after a lost worker."""
        began, most_tries = time.monotonic(), most_tries or self._num_tries
        num_tries = num_errors = 0
        while True:
            epoch = await lease.renew(is_noted=is_noted)
            seed = stream_seed(self._seed, "evaluation", lease.attempt, repetition, num_tries)
            request = EvaluationRequest(
                code=code, seed=seed, isolate=self.isolate, variants=variants
            )
            job = Job(
                attempt=self._job_offset + lane * LANE + lease.attempt,
                epoch=epoch,
                payload=request.encode(),
                limit_s=self._limit_s,
            )
            ended = await self._executor.submit(job)
            match ended:
                case JobDone():
                    outcome = await _decode(ended.output)
                    if outcome.unsupported and lease.is_first:
                        if self._config.rookery.sandbox.isolate == "always":
                            message = say_not_isolated(outcome)
                            return _Failed(AttemptFailure(kind="isolation", message=message))
                        self.isolate = False
                        continue
                    num_tries += 1
                    if outcome.failure is None:
                        return outcome
                    if outcome.failure.kind != "error" or num_tries >= most_tries:
                        failure, error = _failure(outcome), _error_of(outcome)
                        return _Failed(failure, error=error, seconds=outcome.seconds)
                case WorkerLost():
                    lease.num_lost += 1
                    is_noted = True
                    if lease.num_lost >= MAX_LOST:
                        message = f"{lease.num_lost} workers ended on it. {ended.reason}"
                        failure = AttemptFailure(kind="poison", message=message)
                        return _Failed(failure, seconds=time.monotonic() - began)
                case JobFailed():
                    num_errors += 1
                    if num_errors >= MAX_ERRORS:
                        message = ended.error[-1000:]
                        failure = AttemptFailure(kind="evaluation", message=message)
                        return _Failed(failure, seconds=time.monotonic() - began)
                case JobCancelled():
                    raise ExecutorError(f"The evaluation was cancelled. {ended.reason}")

    def _is_better(self, one: Evaluated, other: Evaluated) -> bool:
        scores = self.score(one.metrics), self.score(other.metrics)
        return scores[0] is not None and (scores[1] is None or scores[0] > scores[1])

    def score(self, metrics: Metrics) -> float | None:
        return score_of(numeric_metrics(metrics), features=self._features)


class _VariantScorer:
    """Scores variants of a program. Fast ones share jobs, in `lanes` at the same time; with 0 each
    has a job of its own."""

    def __init__(
        self, evaluator: ProgramEvaluator, lease: Lease, limit: TuneLimit, *, lanes: int
    ) -> None:
        self._evaluator = evaluator
        self._lease = lease
        self._limit = limit
        self._lanes = lanes
        self._slowest_s = math.inf
        """Seconds of the slowest evaluation in a job of its own."""
        self._best = -math.inf
        self._num_failed = 0
        self._is_checked = False
        self.seconds = 0.0

    async def run(self, code: str) -> str:
        """Evaluate a program and return the end of its output."""
        outcome = await self._run([code])
        return "" if isinstance(outcome, _Failed) else outcome.output_tail

    async def score(self, codes: Sequence[str]) -> list[float | None]:
        """Score the programs, fewer if the limit is reached."""
        if self._lanes and len(codes) > 1 and self._slowest_s < FAST_S:
            scores = await self._score_together(codes)
            if scores:
                return scores
        scores = []
        slowest_s = 0.0
        for code in codes:
            if scores and not self._limit.left():
                break
            outcome = await self._run([code])
            slowest_s = max(slowest_s, outcome.seconds)
            scores.append(self._score(outcome))
        self._slowest_s = slowest_s or math.inf
        self._best = max([self._best, *(score for score in scores if score is not None)])
        return scores

    async def _score_together(self, codes: Sequence[str]) -> list[float | None]:
        """Score all in few jobs. Returns [] if one failed, or if a program has another score in a
        job of its own: the evaluator or the program remembers earlier evaluations. Checked are each
        new best program, and once the last one."""
        num = max(1, min(self._lanes, len(codes) // FEWEST_TOGETHER))
        ends = [len(codes) * lane // num for lane in range(num + 1)]
        parts = [codes[start:end] for start, end in pairwise(ends)]
        outcomes = await together(self._run(part, lane=lane) for lane, part in enumerate(parts))
        variants = [
            [] if isinstance(outcome, _Failed) else read_variants(outcome, num=len(part))
            for part, outcome in zip(parts, outcomes, strict=True)
        ]
        if not all(variants):
            self._num_failed += 1
            self._lanes = self._lanes if self._num_failed < MOST_FAILED else 0
            return []
        scores = [self._evaluator.score(each) if each else None for each in chain(*variants)]
        best = max((score for score in scores if score is not None), default=-math.inf)
        places = set() if self._is_checked else {len(codes) - 1}
        if best > self._best:
            places.add(scores.index(best))
        for place in sorted(places):
            if self._score(await self._run([codes[place]])) != scores[place]:
                self._lanes = 0
                return []
        self._is_checked = True
        self._best = max(best, self._best)
        return scores

    def _score(self, outcome: "EvaluationOutcome | _Failed") -> float | None:
        metrics = {} if isinstance(outcome, _Failed) else outcome.metrics
        return self._evaluator.score(metrics) if metrics else None

    async def _run(self, codes: Sequence[str], *, lane: int = 0) -> "EvaluationOutcome | _Failed":
        self._limit.num += len(codes)
        outcome = await self._evaluator.run(codes, self._lease, lane=lane)
        self._limit.spent_s += max(outcome.seconds, SMALLEST_S)
        if not isinstance(outcome, _Failed):
            self.seconds += outcome.seconds
        return outcome


async def _decode(output: bytes) -> EvaluationOutcome:
    """Decode in a thread if the outcome is large."""
    if len(output) <= SMALL_BYTES:
        return decode_outcome(output)
    return await run_in_thread(decode_outcome, output)


def _mean_metrics(outcomes: Sequence[EvaluationOutcome]) -> dict[str, Metric]:
    """Average numbers that all outcomes have. Other metrics are those of the first."""
    first, *others = outcomes
    metrics = dict(first.metrics)
    numbers = [numeric_metrics(outcome.metrics) for outcome in outcomes]
    for name in numbers[0] if others else ():
        if all(name in values for values in numbers):
            metrics[name] = sum(values[name] for values in numbers) / len(numbers)
    return metrics


def _error_of(outcome: EvaluationOutcome) -> str:
    """Return the end of the traceback, or of the output if there is none."""
    assert outcome.failure is not None
    text = outcome.failure.traceback or outcome.output_tail
    return "\n".join(text.splitlines()[-ERROR_LINES:])[-ERROR_CHARS:]


def _failure(outcome: EvaluationOutcome) -> AttemptFailure:
    failure = outcome.failure
    assert failure is not None
    place = f" ({outcome.stage})" if outcome.stage.startswith("stage") else ""
    reason = " ".join(failure.reason.split())[:1000]
    name = f"{failure.type}: " if failure.type and failure.type not in reason else ""
    return AttemptFailure(kind=failure.kind, message=f"{name}{reason}{place}")
