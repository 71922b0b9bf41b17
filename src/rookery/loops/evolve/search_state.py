"""The state of a search: its database, novelty index, stop conditions, and sums for the report.

    state = open_state(config, database=None, seed=42, arms=arms)
    state.tell_first("first1", evaluated, island=0)
    decision = state.decide(stages, elapsed_s=12.5)       # changes nothing
    state.tell(7, stages, decision)

A pure function of the tells, in their order. The cost of a tell does not grow with the number of
attempts before it.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rookery.config import parse_config
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.program import unpack_vector
from rookery.loops.evolve.stages import (
    AttemptDecision,
    AttemptFailure,
    Evaluated,
    Generated,
    Planned,
    Stages,
)
from rookery.loops.evolve.tuning import TUNE
from rookery.search.programs.adaptive import AdaptiveDatabase, SearchBudget
from rookery.search.programs.bandit import Arm
from rookery.search.programs.database import (
    ParetoDatabase,
    ProgramDatabase,
    ProgramDatabaseConfig,
    Stopping,
    StoppingConfig,
    advance,
    begin_again,
)
from rookery.search.programs.novelty import NoveltyConfig, NoveltyIndex, Repetition
from rookery.search.programs.population import Plan
from rookery.search.programs.program import FailedRecord, Member, ScoredProgram

__all__ = [
    "ADAPTER_NAME",
    "Ancestor",
    "Answered",
    "FailureCount",
    "Improvement",
    "Learned",
    "SearchState",
    "Spending",
    "open_state",
    "program_id",
    "search_config",
    "similarity_failure",
]


SMALLEST_ARCHIVE = 10
ADAPTER_NAME = "learned-"
"""Prefix of the names of models that a run trains."""
NEVER = 10**9
"""Children between migrations: more than any run has."""


def program_id(attempt: int) -> str:
    """Return the id of the program that an attempt gives."""
    return f"p{attempt}"


def search_config(config: EvolveConfig) -> ProgramDatabaseConfig:
    """Translate the config's `database` section for the search."""
    database, prompt = config.database, config.prompt
    is_judged = config.rookery.bandit or config.rookery.learn is not None
    document: dict[str, Any] = {
        "population_size": database.population_size,
        "archive_size": database.archive_size,
        "num_islands": database.num_islands,
        "feature_dimensions": database.feature_dimensions,
        "feature_bins": database.feature_bins,
        "migration_interval": database.migration_interval,
        "migration_rate": database.migration_rate,
        "diversity_reference_size": database.diversity_reference_size,
        "objectives": config.rookery.pareto,
        "sampling": {
            "exploration_ratio": database.exploration_ratio,
            "exploitation_ratio": database.exploitation_ratio,
            "elite_selection_ratio": database.elite_selection_ratio,
            "num_inspirations": prompt.num_top_programs,
            "num_top": prompt.num_top_programs + prompt.num_diverse_programs,
        },
        "bandit": {"policy": "ucb" if is_judged else "weights"},
    }
    if database.strategy == "adaptive":
        document |= _adaptive_limits(config)
    return parse_config(ProgramDatabaseConfig, document, origin="the section database")


def _adaptive_limits(config: EvolveConfig) -> dict[str, Any]:
    """Limit archive and grid to what an adaptive search can fill. Turn migration off."""
    database = config.database
    size = min(database.archive_size, max(SMALLEST_ARCHIVE, config.max_iterations // 10))
    sized: dict[str, Any] = {"archive_size": size, "migration_interval": NEVER}
    if isinstance(database.feature_bins, int):
        num_bins = math.ceil(size ** (1 / len(database.feature_dimensions)))
        sized["feature_bins"] = min(database.feature_bins, num_bins)
    return sized


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """The lineage of a program, kept for all programs."""

    parent: str | None
    attempt: int
    model: str = ""
    answer: str = ""
    has_large_artifacts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A new best program."""

    attempt: int
    num_decided: int
    score: float
    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """The number of failures of one kind, and the first of them."""

    count: int
    attempt: int
    message: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A model's answer and the gain of its child."""

    answer: str
    """Digest of prompt and answer."""
    base: str
    """The program that the model was asked to change."""
    gain: float
    """Score of the child minus the parent's, at least 0; 0 without a child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A finished training of `rookery.learn`, as its event stores it."""

    number: int
    num_decided: int
    """Iterations decided when the adapter joined."""
    num_answers: int
    """Answers available for training. `num_rows` of them were used."""
    num_groups: int
    """Parent programs of the used answers."""
    num_rows: int = 0
    num_tokens: int = 0
    """Tokens of all epochs."""
    num_answer_tokens: int = 0
    """Tokens of answers among them, which the loss covers."""
    seconds: float = 0.0
    loss: float | None = None
    """Loss per token of the last step."""
    error: str = ""
    """Reason why there is no adapter; empty if there is one."""
    retires: tuple[str, ...] = ()
    """Earlier adapters that are no longer asked."""

    @property
    def name(self) -> str:
        """Name of the arm, and of its folder in the run."""
        return f"{ADAPTER_NAME}{self.number}"


@dataclass(slots=True, kw_only=True)
class Spending:
    """Resources spent on the attempts told so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_unreported: int = 0
    """Attempts with an answer whose tokens the model did not report."""
    evaluation_s: float = 0.0
    num_lost: int = 0
    num_tuning: int = 0
    """Evaluations for tuning numbers."""
    training_tokens: int = 0
    """Tokens of `rookery.learn`, over all epochs."""
    training_answer_tokens: int = 0
    """Answer tokens among the training tokens, which the loss covers."""
    num_rollouts: int = 0
    """Answers to tasks, if the programs are prompts."""
    dearest_rollouts: int = 0
    dearest_prompt_tokens: int = 0
    dearest_completion_tokens: int = 0
    """Largest rollouts, prompt tokens and completion tokens of a single attempt."""
    dearest_answer_tokens: float = 0.0
    """Largest mean tokens per task answer of an attempt."""
    num_choice_rollouts: int = 0
    """Answers that the final choice of a prompt will take."""

    @property
    def choice_tokens(self) -> int:
        """Estimated tokens of the answers that the final choice will take."""
        return math.ceil(self.num_choice_rollouts * self.dearest_answer_tokens)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens + self.training_tokens

    def add_attempt(self, *stages: Generated | Evaluated) -> None:
        """Add the cost of one attempt with all its stages."""
        for stage in stages:
            self.add(stage)
        prompt = sum(stage.prompt_tokens or 0 for stage in stages)
        completion = sum(stage.completion_tokens or 0 for stage in stages)
        self.dearest_prompt_tokens = max(self.dearest_prompt_tokens, prompt)
        self.dearest_completion_tokens = max(self.dearest_completion_tokens, completion)
        rollouts = sum(stage.num_rollouts for stage in stages if isinstance(stage, Evaluated))
        self.dearest_rollouts = max(self.dearest_rollouts, rollouts)

    def add(self, stage: Generated | Evaluated) -> None:
        if stage.prompt_tokens is None or stage.completion_tokens is None:
            self.num_unreported += 1
        self.prompt_tokens += stage.prompt_tokens or 0
        self.completion_tokens += stage.completion_tokens or 0
        if isinstance(stage, Evaluated):
            self.evaluation_s += stage.seconds
            self.num_lost += stage.num_lost
            self.num_tuning += stage.num_tuning
            self.num_rollouts += stage.num_rollouts
            if stage.num_rollouts:
                each = (stage.completion_tokens or 0) / stage.num_rollouts
                self.dearest_answer_tokens = max(self.dearest_answer_tokens, each)


GAIN_TO_TUNE_AGAIN = 0.01
"""Relative gain of a tuning from which its result is tuned too."""
MOST_UNANSWERED = 50
"""Unanswered iterations in a row that end the search: they spend nothing of a token budget."""


@dataclass(slots=True)
class SearchState:
    """One search: the evolution, or a baseline."""

    database: ProgramDatabase
    stopping_config: StoppingConfig
    lag: int | None = None
    """Deterministic mode: attempt k sees results of attempts up to k - lag. None: it sees all."""
    novelty: NoveltyIndex = field(default_factory=lambda: NoveltyIndex(NoveltyConfig()))
    rejects_similar: bool = False
    """True without a judge: a child similar to one that was told meanwhile is rejected too."""
    uncompared: FailureCount | None = None
    """Programs that could not be compared by embedding."""
    stopping: Stopping = field(default_factory=Stopping)
    extended_from: int = 0
    """Attempts decided when the finished run was extended. Its stop reason no longer counts."""
    ancestors: dict[str, Ancestor] = field(default_factory=dict)
    curve: list[Improvement] = field(default_factory=list)
    failures: dict[str, FailureCount] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    spending: Spending = field(default_factory=Spending)
    answers: list[Answered] = field(default_factory=list)
    """All answers, in order of decision."""
    num_unanswered: int = 0
    """Attempts in a row that no model answered."""
    learned: list[tuple[Learned, tuple[Arm, ...]]] = field(default_factory=list)
    """The trainings, with the arms' earnings at that time."""
    first_best: str = ""
    chosen: str = ""
    """The program chosen on the select tasks; empty: the one with the best score."""
    tuned: set[str] = field(default_factory=set)
    """Programs whose tuning has begun or ended, and results of tuning that gained little."""
    num_decided: int = 0
    num_committed: int = 0
    num_demoted: int = 0
    elapsed_s: float = 0.0

    @property
    def best(self) -> Member:
        best = self.database.best
        assert best is not None, "first programs are told before anything else"
        return best

    @property
    def winner(self) -> str:
        """The program that the run leaves as its best."""
        return self.chosen or self.best.id

    @property
    def stop_reason(self) -> str:
        """Reason to stop the search; empty to go on."""
        if self.num_decided < self.extended_from:
            return ""
        if self.num_unanswered >= MOST_UNANSWERED:
            return f"No model answered in {self.num_unanswered} iterations in a row."
        return self.stopping.reason

    def tell_first(self, id: str, evaluated: Evaluated, *, island: int) -> None:
        """Add a program that the evolution starts from."""
        assert evaluated.code is not None
        record = ScoredProgram(
            id=id,
            attempt=0,
            island=island,
            metrics=evaluated.metrics,
            code=evaluated.code,
            rewards=evaluated.rewards,
        )
        self.spending.add(evaluated)
        self.spending.dearest_rollouts = max(self.spending.dearest_rollouts, evaluated.num_rollouts)
        self._count_uncompared(0, evaluated.embedding_error)
        is_large = evaluated.has_large_artifacts
        ancestor = Ancestor(parent=None, attempt=0, has_large_artifacts=is_large)
        self._add_program(record, evaluated, ancestor)
        self.first_best = self.best.id

    def plan_tuning(self, plan: Plan) -> Plan:
        """Return a plan to tune the best program if its tuning has not begun; else `plan`."""
        best = self.best
        if best.id in self.tuned:
            return plan
        return replace(
            plan,
            island=best.record.island,
            parent=best.id,
            parent_score=best.score,
            generation=best.record.generation + 1,
            inspirations=(),
            top=(),
            operator=TUNE,
            mends="",
            failures=(),
            arm="",
        )

    def note_planned(self, plan: Plan) -> None:
        """Take note that an attempt with this plan has begun. Idempotent."""
        if plan.operator == TUNE:
            self.tuned |= {plan.parent, program_id(plan.attempt)}

    def find_repeated(self, attempt: int, code_hash: str) -> AttemptFailure | None:
        """Return a failure if the child repeats a program that this attempt may know."""
        repeated = self.novelty.find(code=code_hash)
        if repeated is None:
            return None
        known_since = self.ancestors[repeated.of].attempt
        if self.lag and known_since > max(0, attempt - self.lag):
            return None
        return _repetition(repeated)

    def find_similar(self, planned: Planned, embedding: str) -> Repetition | None:
        """Return the most similar program, among those that the attempt may know of."""
        num_known = planned.num_embedded if self.lag else None
        return self.novelty.find(embedding=unpack_vector(embedding), num_known=num_known)

    def decide(self, stages: Stages, *, elapsed_s: float) -> AttemptDecision:
        """Decide a finished attempt, given everything told before. Changes nothing."""
        failure, evaluated = stages.failure, stages.evaluated
        if failure is None:
            assert evaluated is not None
            is_compared = self.rejects_similar and evaluated.embedding
            vector = unpack_vector(evaluated.embedding) if is_compared else None
            repeated = self.novelty.find(code=evaluated.code_hash, embedding=vector)
            if repeated is None and evaluated.untuned_hash:
                repeated = self.novelty.find(code=evaluated.untuned_hash)
            problem = self.database.problem_with(evaluated.metrics)
            if repeated is not None:
                failure = _repetition(repeated)
            elif problem is not None:
                failure = AttemptFailure(kind="no_score", message=problem)
        return AttemptDecision(failure=failure, elapsed_s=elapsed_s)

    def tell(self, attempt: int, stages: Stages, decision: AttemptDecision) -> Member | None:
        """Apply a decided attempt. Returns its program, if it gave one."""
        member = self._tell(attempt, stages, decision)
        self._note_answer(stages, member)
        if self.num_decided == self.extended_from:
            self.stopping = begin_again(self.stopping, self.best, config=self.stopping_config)
            self.num_unanswered = 0
        return member

    def _tell(self, attempt: int, stages: Stages, decision: AttemptDecision) -> Member | None:
        planned, generated, evaluated = stages.planned, stages.generated, stages.evaluated
        assert planned is not None and generated is not None
        self.staleness[self.num_decided - planned.num_decided] += 1
        self.num_decided += 1
        self.elapsed_s = max(self.elapsed_s, decision.elapsed_s)
        self.spending.add_attempt(generated, *([evaluated] if evaluated else []))
        if evaluated is not None:
            self.num_demoted += _is_demoted(evaluated, planned.best_score)
            self._count_uncompared(attempt, evaluated.embedding_error)
        plan = planned.plan
        self.note_planned(plan)
        self._keep_arm(plan.arm)
        cost = float((generated.prompt_tokens or 0) + (generated.completion_tokens or 0))
        if decision.failure is not None:
            self._count_failure(attempt, decision.failure)
            failed = FailedRecord(
                id=program_id(attempt),
                arm=plan.arm,
                cost=cost,
                operator=plan.operator,
                mends=plan.mends,
                kind=decision.failure.kind,
                message=decision.failure.message,
                parent=plan.parent,
                parent_score=plan.parent_score,
                generation=plan.generation,
                can_be_mended=evaluated is not None and bool(evaluated.program),
            )
            self.database.tell_failure(failed)
            return None
        assert evaluated is not None and evaluated.code is not None
        record = ScoredProgram(
            id=program_id(attempt),
            attempt=attempt,
            island=plan.island,
            metrics=evaluated.metrics,
            code=evaluated.code,
            parent=plan.parent,
            parent_score=plan.parent_score,
            generation=plan.generation,
            arm=plan.arm,
            cost=cost,
            operator=plan.operator,
            mends=plan.mends,
            rewards=evaluated.rewards,
        )
        self.num_committed += 1
        ancestor = Ancestor(
            parent=plan.parent,
            attempt=attempt,
            model=plan.arm,
            answer=generated.answer,
            has_large_artifacts=evaluated.has_large_artifacts,
        )
        member = self._add_program(record, evaluated, ancestor)
        gain = member.score - plan.parent_score
        if plan.operator == TUNE and gain > GAIN_TO_TUNE_AGAIN * abs(plan.parent_score):
            self.tuned.discard(record.id)
        return member

    def _add_program(
        self, record: ScoredProgram, evaluated: Evaluated, ancestor: Ancestor
    ) -> Member:
        before = self.database.best
        member = self.database.tell(record)
        self.novelty.add(
            record.id, code=evaluated.code_hash, embedding=self._vector(record, evaluated)
        )
        if evaluated.untuned_hash:
            self.novelty.add(record.id, code=evaluated.untuned_hash)
        self.ancestors[record.id] = ancestor
        self.stopping = advance(self.stopping, member, config=self.stopping_config)
        if before is None or member.score > before.score:
            self.curve.append(
                Improvement(
                    attempt=record.attempt,
                    num_decided=self.num_decided,
                    score=member.score,
                    program=record.id,
                )
            )
        return member

    def tell_learned(self, learned: Learned) -> None:
        """Add a training, and its adapter as an arm with the mean weight of the others."""
        self.spending.training_tokens += learned.num_tokens
        self.spending.training_answer_tokens += learned.num_answer_tokens
        self.learned.append((learned, self.database.arms))
        if not learned.error:
            weights = [arm.weight for arm in self.database.arms if arm.weight > 0]
            arm = Arm(name=learned.name, weight=fmean(weights or [1.0]))
            self.database.join_arm(arm, retires=learned.retires)

    def _note_answer(self, stages: Stages, member: Member | None) -> None:
        planned, generated = stages.planned, stages.generated
        assert planned is not None and generated is not None
        if generated.answer:
            plan = planned.plan
            gain = 0.0 if member is None else max(0.0, member.score - plan.parent_score)
            answered = Answered(generated.answer, plan.mends or plan.parent, gain)
            self.answers.append(answered)
        if planned.plan.operator != TUNE:
            self.num_unanswered = 0 if generated.answer else self.num_unanswered + 1

    def _keep_arm(self, name: str) -> None:
        """Add an arm of weight 0 for a model that a resumed run no longer has."""
        if name and name not in {arm.name for arm in self.database.arms}:
            self.database.add_arm(Arm(name=name, weight=0.0))

    def _vector(self, record: ScoredProgram, evaluated: Evaluated) -> tuple[float, ...] | None:
        """Return the embedding, or None if the server changed the length of its vectors."""
        vector = unpack_vector(evaluated.embedding) if evaluated.embedding else None
        if vector is None or self.novelty.can_compare(vector):
            return vector
        error = f"Its embedding has {len(vector)} numbers, and those before it have not."
        self._count_uncompared(record.attempt, error)
        return None

    def _count_uncompared(self, attempt: int, message: str) -> None:
        if message:
            known = self.uncompared or FailureCount(count=0, attempt=attempt, message=message)
            self.uncompared = replace(known, count=known.count + 1)

    def _count_failure(self, attempt: int, failure: AttemptFailure) -> None:
        known = self.failures.get(failure.kind)
        if known is None:
            known = FailureCount(count=0, attempt=attempt, message=failure.message)
        self.failures[failure.kind] = replace(known, count=known.count + 1)


def open_state(
    config: EvolveConfig, *, database: ProgramDatabase | None, seed: int, arms: tuple[Arm, ...]
) -> SearchState:
    """Create the state of a search before any tell."""
    lag = config.lag if config.rookery.mode == "deterministic" else None
    return SearchState(
        database or _open_database(config, seed=seed, arms=arms),
        StoppingConfig(
            patience=config.early_stopping_patience,
            threshold=config.convergence_threshold,
            metric=config.early_stopping_metric,
            target_score=config.rookery.target_score,
        ),
        lag=lag,
        novelty=NoveltyIndex(_novelty_config(config, lag)),
        rejects_similar=config.database.novelty_llm is False,
    )


def _open_database(config: EvolveConfig, *, seed: int, arms: tuple[Arm, ...]) -> ProgramDatabase:
    database = search_config(config)
    if config.database.strategy == "openevolve":
        return ProgramDatabase(database, seed=seed, arms=arms)
    if config.database.strategy == "pareto":
        return ParetoDatabase(database, seed=seed, arms=arms)
    max_cost = config.rookery.budget.max_tokens
    budget = SearchBudget(num_attempts=config.max_iterations, max_cost=max_cost)
    return AdaptiveDatabase(database, seed=seed, budget=budget, arms=arms)


def _novelty_config(config: EvolveConfig, lag: int | None) -> NoveltyConfig:
    if not config.database.is_compared:
        return NoveltyConfig()
    threshold = config.database.similarity_threshold
    return NoveltyConfig(similarity_threshold=threshold, num_later=lag or 0)


def _repetition(repeated: Repetition) -> AttemptFailure:
    if repeated.kind == "embedding":
        return similarity_failure(repeated)
    return AttemptFailure(kind="repeated", message=f"It is the same program as {repeated.of}.")


def similarity_failure(similar: Repetition) -> AttemptFailure:
    """Return the failure of a program that is similar to an earlier one."""
    message = f"Its embedding is like that of {similar.of} (cosine {similar.similarity:.4f})."
    return AttemptFailure(kind="similar", message=message)


def _is_demoted(evaluated: Evaluated, best_score: float) -> bool:
    """Return True if its first score was the best, but its mean is not."""
    if not evaluated.scores or evaluated.failure is not None:
        return False
    mean = sum(evaluated.scores) / len(evaluated.scores)
    return evaluated.scores[0] > best_score >= mean
