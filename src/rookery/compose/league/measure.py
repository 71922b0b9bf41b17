"""Measures the untouched model and all results of a league on the report tasks, once, at the end.

    adapter     loaded, measured and unloaded, one after the other
    prompt      the untouched model answers the tasks as this prompt asks them
    best_of_n   the most frequent of several answers; no reference is used to choose it

Each seed is measured by itself. An entrant's reward for a task is the mean over its seeds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rookery.compose.evaluation import BASE, model_row
from rookery.compose.league.entrants import BEST_OF_N, Entrant, League
from rookery.compose.running import open_shown_engine
from rookery.compose.steps import ADAPTERS, place_of
from rookery.engines import with_rank
from rookery.loops.comparison import (
    compare,
    compare_pairs,
    elected,
    mean_rewards,
    warn_of_batches,
    warn_of_failed_tasks,
    warn_of_precision,
    warn_of_small_samples,
)
from rookery.loops.evolve.prompt_tasks import find_form
from rookery.ports import Engine
from rookery.reports import (
    Estimate,
    LeaguePair,
    LeagueReport,
    LeagueRow,
    LeagueRun,
    LeftOut,
    ModelRow,
    ReportRow,
    SpentRecord,
    TaskRecord,
    describe_task,
    parse_evolve_report,
)
from rookery.rollout import BlockProgress, RolloutLog, TasksetEvaluator
from rookery.runs import NewEvent, Run
from rookery.runs.budget import Budget, BudgetConfig
from rookery.runtime.concurrency import run_in_thread
from rookery.seeding import stream_seed
from rookery.tasks.splits import question_of
from rookery.types import Adapter, Evaluation, Group, Task
from rookery.ui.display import Bar, Display
from rookery.weights import read_adapter

__all__ = ["EntrantResult", "find_results", "open_measurement"]

ROUND = "league/round"
"""Event of one round of best_of_n: one answer to every report task."""
SHOWN_TASKS = 200
"""Maximum number of tasks that the page shows with their texts."""
NO_ADAPTER = "It trained all weights of the model, which are not measured beside others."


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrantResult:
    """The result of an entrant with one seed: an adapter, a prompt or, for best_of_n, neither."""

    entrant: Entrant
    adapter: Adapter | None = None
    prompt: str = ""
    runs: tuple[str, ...] = ()
    spent: SpentRecord = field(default_factory=SpentRecord)
    seconds: float = 0.0
    stop_reason: str = ""


def find_results(
    league: League, place: Path, failed: Mapping[str, str]
) -> tuple[list[EntrantResult], list[LeftOut]]:
    """Read the results beside the league's run in `place`, and list the entrants without one.
    `failed` maps failed steps to their errors."""
    left_out = [LeftOut(name=name, reason=reason) for name, reason in league.reasons.items()]
    results = []
    for entrant in league.entrants(place):
        errors = [failed[step] for step in entrant.steps if step in failed]
        result = None if errors else _find_result(entrant, place)
        if result is None:
            reason = (errors or [NO_ADAPTER])[0]
            left_out.append(LeftOut(name=entrant.id, reason=reason, is_failure=True))
        else:
            results.append(result)
    return results, left_out


def _find_result(entrant: Entrant, place: Path) -> EntrantResult | None:
    if not entrant.steps:
        return EntrantResult(entrant=entrant)
    paths = [place_of(place, step) for step in entrant.steps]
    reports: list[dict[str, Any]] = []
    for path in paths:
        with Run.view(path) as run:
            reports.append(run.read_json("report.json"))
    last = list(entrant.steps.values())[-1]
    adapter, prompt = None, ""
    if last.loop == "evolve":
        best = parse_evolve_report(reports[-1]).best
        prompt = "" if best is None else best.code
    else:
        folder = paths[-1] / ADAPTERS[last.loop]
        if not (folder / "adapter_config.json").is_file():
            return None
        adapter = replace(read_adapter(folder), name=entrant.id)
    spent = [SpentRecord.model_validate(report.get("spent") or {}) for report in reports]
    return EntrantResult(
        entrant=entrant,
        adapter=adapter,
        prompt=prompt,
        runs=tuple(path.name for path in paths),
        spent=SpentRecord(
            drawn_tokens=sum(step.drawn_tokens for step in spent),
            trained_tokens=sum(step.trained_tokens for step in spent),
        ),
        seconds=sum(float(report.get("seconds") or 0.0) for report in reports),
        stop_reason=str(reports[-1].get("stop_reason") or ""),
    )


@asynccontextmanager
async def open_measurement(
    league: League, results: Sequence[EntrantResult], left_out: Sequence[LeftOut], display: Display
) -> AsyncIterator[Callable[[Run], Awaitable[LeagueReport]]]:
    """Open the engine; yields a function that measures the results and writes the report."""
    display.note(league.taskset.notes)
    ranks = [result.adapter.rank for result in results if result.adapter is not None]
    config = with_rank(league.config.engine, max(ranks, default=0))
    async with open_shown_engine(config, display) as engine:

        async def measure(run: Run) -> LeagueReport:
            tasks = league.taskset.split("report")
            votes = sum(result.entrant.name == BEST_OF_N for result in results)
            rounds = 1 + len(results) - votes + votes * league.config.num_answers
            total = len(tasks) * rounds
            with display.bar(league.taskset.name, total=total, run=run) as bar:
                measurement = Measurement(league, engine, run, bar)
                measured = await measurement.measure(results)
            parts = ReportParts(league, results, left_out, measured, measurement)
            report = await asyncio.to_thread(parts.report, run, engine)
            document = report.model_dump(mode="json", exclude_none=True)
            await run_in_thread(run.write_json, "report.json", document)
            return report

        yield measure


class Measurement:
    """Asks the report tasks, and records the answers in the run."""

    def __init__(self, league: League, engine: Engine, run: Run, bar: Bar) -> None:
        self._league, self._engine, self._run, self._bar = league, engine, run, bar
        self.tasks = league.taskset.split("report")

        def advance(progress: BlockProgress) -> None:
            bar.advance(progress.num_rollouts, tokens=progress.num_tokens)

        self._evaluator = TasksetEvaluator(
            engine,
            template=league.template,
            tasksets=[league.taskset],
            log=RolloutLog(run),
            on_progress=advance,
        )
        self.votes: dict[str, Votes] = {}
        """Votes of best_of_n, by entrant id."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers, without the votes of best_of_n."""
        return self._evaluator.num_tokens

    async def measure(self, results: Sequence[EntrantResult]) -> dict[str, Evaluation]:
        """Return the evaluations by result id; the untouched model comes first."""
        [base] = await self._evaluator.evaluate([self._engine.base], self.tasks)
        measured = {BASE: base}
        for result in results:
            measured[result.entrant.id] = await self._measure(result)
        return measured

    async def _measure(self, result: EntrantResult) -> Evaluation:
        if result.adapter is not None:
            ref = await self._engine.load(result.adapter)
            try:
                [evaluation] = await self._evaluator.evaluate([ref], self.tasks)
            finally:
                await self._engine.unload(ref)
            return evaluation
        if result.entrant.name == BEST_OF_N:
            return await self._vote(result.entrant)
        tasks = await asyncio.to_thread(self._tasks_asked_with, result.prompt)
        [evaluation] = await self._evaluator.evaluate([self._engine.base], tasks)
        return evaluation

    def _tasks_asked_with(self, prompt: str) -> list[Task]:
        """Return the report tasks as this prompt asks them, in the form of the search."""
        form, _ = find_form(self._league.first_prompt, self._league.taskset)
        rows, is_chat = self._league.taskset.fields, self._league.template.chat
        return [
            form.ask(prompt, task, rows.get(task.id, {}), is_chat=is_chat) for task in self.tasks
        ]

    async def _vote(self, entrant: Entrant) -> Evaluation:
        """Draw one answer to every task per round, until there are enough or the budget ends."""
        config = self._league.config
        votes = self.votes[entrant.id] = Votes()
        budget = Budget(config.budget, self._run, key=entrant.id, elapsed_s=lambda: votes.seconds)
        seed = config.seed + entrant.index
        while len(votes.rounds) < config.num_answers:
            number = len(votes.rounds)
            known = self._run.get(ROUND, f"{entrant.id}/{number}")
            before = votes.num_tokens
            needed = before + votes.dearest_tokens
            num_done = number + 1 if known is not None else 0
            if not await budget.has_room(number, tokens=needed, num_done=num_done):
                break
            began = time.monotonic()
            drawing = self._evaluator.drawing(1, seed=stream_seed(seed, BEST_OF_N, number))
            groups = await drawing.rollout([self._engine.base], self.tasks)
            new = NewEvent(
                kind=ROUND,
                key=f"{entrant.id}/{number}",
                payload={"seconds": time.monotonic() - began},
                first_wins=True,
            )
            [event] = await self._run.append_many([new])
            votes.add(groups, seconds=float(event.payload["seconds"]))
            self._bar.advance(len(self.tasks), tokens=votes.num_tokens - before)
        self._bar.skip((config.num_answers - len(votes.rounds)) * len(self.tasks))
        votes.stop_reason = budget.stop_reason
        return votes.count(self.tasks, read=self._evaluator.read_answer, base=self._engine.base)


@dataclass(slots=True)
class Votes:
    """Rounds of answers to the report tasks, for a majority vote."""

    rounds: list[list[Group]] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    dearest_tokens: int = 0
    """Most tokens of any round."""
    stop_reason: str = ""

    def add(self, groups: list[Group], *, seconds: float) -> None:
        """Add a round: one answer to every task."""
        drawn = [r.completion for group in groups for r in group.rollouts if r.completion]
        tokens = sum(len(completion.tokens) for completion in drawn)
        self.rounds.append(groups)
        self.seconds += seconds
        self.num_tokens += tokens
        self.dearest_tokens = max(self.dearest_tokens, tokens)

    def count(self, tasks: Sequence[Task], *, read: Any, base: Any) -> Evaluation:
        """Return the rewards of the most frequent answers. Answers without a reward do not vote."""
        rewards: dict[str, float] = {}
        errors: dict[str, str] = {}
        for task, groups in zip(tasks, zip(*self.rounds, strict=True), strict=True):
            rollouts = [group.rollouts[0] for group in groups]
            judged = [(r, r.reward) for r in rollouts if r.reward is not None]
            if judged:
                earned = [reward for _, reward in judged]
                rewards[task.id] = elected((read(rollout) for rollout, _ in judged), earned)
            else:
                errors[task.id] = rollouts[0].error
        return Evaluation(
            model=base,
            rewards=rewards,
            errors=errors,
            num_tokens=self.num_tokens,
            num_answer_tokens=self.num_tokens,
            seconds=self.seconds,
        )


def _describe_task(task: Task) -> TaskRecord:
    described = describe_task(task)
    return TaskRecord(task=task.id, prompt=described["prompt"], reference=described["reference"])


# The report: rows ordered by mean, and all pairs.


@dataclass(frozen=True)
class ReportParts:
    """Makes the report from the measurements."""

    league: League
    results: Sequence[EntrantResult]
    left_out: Sequence[LeftOut]
    measured: Mapping[str, Evaluation]
    """Evaluations by id; the untouched model comes first."""
    measurement: Measurement

    def report(self, run: Run, engine: Engine) -> LeagueReport:
        """Compute the report. Call it in a thread: it computes many intervals."""
        taskset, tasks = self.league.taskset, self.measurement.tasks
        rows, pairs = self._rows()
        return LeagueReport(
            run=run.name,
            model=engine.base.version,
            taskset=taskset.name,
            num_tasks=len(tasks),
            num_questions=len(set(map(question_of, tasks))),
            num_skipped_rows=taskset.skipped.num_skipped,
            budget=describe_budget(self.league),
            warnings=(
                *taskset.notes,
                *_warn_of_overspending(rows, self.league.config.budget),
                *warn_of_small_samples(self._means),
                *warn_of_failed_tasks(self._means),
                *warn_of_batches(engine),
                *warn_of_precision(self.league.config.engine),
            ),
            models=self._models(),
            tasks=tuple(map(_describe_task, tasks[:SHOWN_TASKS])),
            rows=rows,
            pairs=pairs,
            left_out=tuple(self.left_out),
            seconds=run.worked_s,
            tokens={"asked_and_answered": self.measurement.num_tokens},
        )

    def _models(self) -> tuple[ModelRow, ...]:
        """Return one row per seed, as in an evaluation."""
        tasks, base = self.measurement.tasks, self.measured[BASE]
        earned = {reward for each in self.measured.values() for reward in each.rewards.values()}
        return tuple(
            model_row(name, evaluation, base, tasks, earned)
            for name, evaluation in self.measured.items()
        )

    @property
    def _entrants(self) -> dict[str, list[EntrantResult]]:
        results: dict[str, list[EntrantResult]] = {}
        for result in self.results:
            results.setdefault(result.entrant.name, []).append(result)
        return results

    @property
    def _rewards(self) -> dict[str, Mapping[str, float]]:
        """Rewards by entrant, as means over its seeds."""
        return {
            BASE: self.measured[BASE].rewards,
            **{
                name: mean_rewards([self.measured[result.entrant.id].rewards for result in seeds])
                for name, seeds in self._entrants.items()
            },
        }

    @property
    def _means(self) -> list[ReportRow]:
        weights = {self.league.taskset.name: 1.0}
        rewards = self._rewards
        if len(rewards) == 1:  # all failed: compare the model with itself
            rewards = {**rewards, "": rewards[BASE]}
        rows = compare(rewards, self.measurement.tasks, weights=weights, seed=0)
        known = [row for row in rows if row.name]
        return sorted(known, key=lambda row: (row.mean is None, -(row.mean or 0.0)))

    def _rows(self) -> tuple[tuple[LeagueRow, ...], tuple[LeaguePair, ...]]:
        means, tasks = self._means, self.measurement.tasks
        rewards = {row.name: self._rewards[row.name] for row in means}
        weights = {self.league.taskset.name: 1.0}
        differences = compare_pairs(rewards, tasks, weights=weights, seed=0)
        best = means[0].name
        entrants = self._entrants
        rows = tuple(
            LeagueRow(
                name=row.name,
                mean=row.mean,
                low=row.low,
                high=row.high,
                num_failed=row.num_failed,
                what=self._describe(row.name),
                settings=describe_settings(self.league, row.name),
                gain=_find_difference(differences, row.name, BASE),
                lead=_find_difference(differences, row.name, best),
                runs=tuple(self._run(result) for result in entrants.get(row.name, ())),
            )
            for row in means
        )
        pairs = tuple(
            LeaguePair(first=first, second=second, difference=difference)
            for (first, second), difference in differences.items()
        )
        return rows, pairs

    def _run(self, result: EntrantResult) -> LeagueRun:
        id, spent, seconds, reason = (
            result.entrant.id, result.spent, result.seconds, result.stop_reason,
        )  # fmt: skip
        votes = self.measurement.votes.get(id)
        if votes is not None:
            spent = SpentRecord(drawn_tokens=votes.num_tokens)
            seconds, reason = votes.seconds, votes.stop_reason
        measured = self.measured[id]
        rewards = [] if measured.errors else list(measured.rewards.values())
        return LeagueRun(
            name=id,
            runs=result.runs,
            mean=sum(rewards) / len(rewards) if rewards else None,
            spent=spent,
            seconds=seconds,
            stop_reason=reason,
        )

    def _describe(self, name: str) -> str:
        if name != BEST_OF_N:
            return describe_entrant(self.league, name)
        sizes = sorted({len(votes.rounds) for votes in self.measurement.votes.values()})
        return f"what most of {' or '.join(map(str, sizes))} answers say"


def _find_difference(
    differences: Mapping[tuple[str, str], Estimate], ours: str, theirs: str
) -> Estimate | None:
    difference = differences.get((ours, theirs))
    reverse = differences.get((theirs, ours))
    if difference is not None or reverse is None:
        return difference
    negative = {
        key: None if value is None else 0.0 - value  # -0.0 is shown as a loss
        for key, value in (("mean", reverse.mean), ("low", reverse.high), ("high", reverse.low))
    }
    return Estimate.model_validate(negative)


def _warn_of_overspending(rows: Sequence[LeagueRow], budget: BudgetConfig) -> Iterator[str]:
    """Warn of runs over budget: a last round was long, or founders had to be measured."""
    tokens, hours = budget.max_answer_tokens, budget.max_hours
    for run in (run for row in rows for run in row.runs):
        took = []
        if tokens is not None and run.spent.tokens > tokens:
            took.append(f"{run.spent.tokens:,} answer tokens of {tokens:,}")
        seconds = run.seconds or 0.0
        if hours is not None and seconds > hours * 3600:
            took.append(f"{seconds / 60:.4g} minutes of {hours * 60:g}")
        if took:
            yield (
                f"{run.name} took {' and '.join(took)}: a round that has begun is finished, and "
                "founders are measured in any case."
            )


WHAT = {
    BASE: "the model as it is",
    "sft": "trained on the answers",
    "grpo": "trained from rewards",
    "es": "evolved from zero, without gradients",
    "prompt": "an evolved prompt",
    "icm": "trained on labels of its own",
}


def describe_entrant(league: League, name: str) -> str:
    """Say in a few words how the entrant's result is made."""
    if name != "genome":
        return WHAT[name]
    if league.config.founders:
        return f"{len(league.config.founders)} given adapters combined"
    return f"{league.config.num_founders} adapters of {league.founders_by} combined"


def describe_settings(league: League, name: str) -> str:
    """Return the non-default settings of an entrant, and of its trained founders or labels."""
    trained: dict[str, list[str]] = {"icm": ["sft"]}
    if not league.config.founders:
        trained["genome"] = [league.founders_by]
    texts = []
    settings = {str(key): values for key, values in league.config.settings.items()}
    for part in (name, *trained.get(name, ())):
        values = _flat(settings.get(part, {}))
        if values:
            texts.append(("" if part == name else f"{part}: ") + ", ".join(values))
    return "; ".join(texts)


def _flat(document: Mapping[str, Any], key: str = "") -> list[str]:
    lines = []
    for name, value in document.items():
        where = f"{key}.{name}" if key else name
        lines += _flat(value, where) if isinstance(value, Mapping) else [f"{where} {value}"]
    return lines


def describe_budget(league: League) -> str:
    """Return the budget in words."""
    budget = league.config.budget
    limits = []
    if budget.max_answer_tokens is not None:
        limits.append(f"{budget.max_answer_tokens:,} answer tokens")
    if budget.max_hours is not None:
        limits.append(f"{budget.max_hours * 60:g} minutes")
    return " and ".join(limits)
