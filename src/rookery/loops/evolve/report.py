"""The results of a finished run: its report, its population, its training data.

All functions read programs from disk: call them in a thread.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rookery.loops.comparison import warn_of_failed_tasks, warn_of_small_samples
from rookery.loops.evolve.answers import code_diff
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.order import price
from rookery.loops.evolve.parts import FIRST_PROGRAM, SearchParts, first_id
from rookery.loops.evolve.problem import FORGEABLE
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.search_state import SearchState, Spending, program_id, search_config
from rookery.loops.evolve.stages import Evaluated, Stages, from_data, read_stages
from rookery.reports import SpentRecord
from rookery.reports.evolve import (
    ArmRecord,
    BaselineRecord,
    CellRecord,
    CurvePoint,
    EvolveReport,
    FailureRecord,
    LearnedRow,
    OperatorRow,
    PaidTokensRecord,
    ProgramRow,
    TasksReport,
)
from rookery.runs import RunView
from rookery.search.programs.bandit import Arm
from rookery.search.programs.program import Member, numeric_metrics, score_of

__all__ = ["FinishedSearch", "export_population", "export_training_data", "make_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSearch:
    """A finished evolution or baseline."""

    name: str = ""
    """Name of the baseline; empty for the evolution."""
    state: SearchState
    stop_reason: str
    elapsed_s: float


def make_report(
    parts: SearchParts,
    search: FinishedSearch,
    baselines: Sequence[FinishedSearch],
    *,
    seed: int,
    tasks: TasksReport | None = None,
) -> EvolveReport:
    """Build the report that page and terminal show."""
    config, state = parts.config, search.state
    population = state.database.state.population
    by_id = {member.id: member for member in population.members}
    line = list(_winning_line(parts, state))
    return EvolveReport(
        run=parts.run.name,
        models=_models(state.database.arms),
        learned=_learned(state),
        seed=seed,
        mode=config.rookery.mode,
        strategy=config.database.strategy,
        operators=_operators(state),
        language=line[-1].language,
        feature_dimensions=config.database.feature_dimensions,
        bins=search_config(config).bins,
        num_iterations=state.num_decided,
        num_committed=state.num_committed,
        num_failed=state.num_decided - state.num_committed,
        failed_share=_failed_share(state),
        num_islands=config.database.num_islands,
        num_programs=len(by_id),
        stop_reason=search.stop_reason,
        first=_row(parts.store.get(state.first_best), state, config),
        best=_row(line[-1], state, config).model_copy(update={"code": line[-1].code}),
        winning_line=_rows_with_diffs(line, state, config),
        curve=_curve(state),
        cells=tuple(
            CellRecord(island=number, cell=cell, program=id, score=by_id[id].score)
            for number, island in enumerate(population.islands)
            for cell, id in island.cells.items()
        ),
        front=tuple(_member_row(by_id[id]) for id in population.front),
        objectives=config.rookery.pareto,
        failures=_failures(state),
        num_demoted=state.num_demoted,
        staleness={str(lag): count for lag, count in sorted(state.staleness.items())},
        tokens=_tokens(state.spending),
        spent=_spent(state.spending, tasks),
        usd=price(state.spending, config.rookery.budget),
        seconds=search.elapsed_s,
        evaluation_seconds=state.spending.evaluation_s,
        num_tuning_evaluations=state.spending.num_tuning,
        num_workers_lost=state.spending.num_lost,
        baselines=tuple(_baseline(baseline) for baseline in baselines),
        is_forgeable=not parts.evaluator.isolate,
        tasks=tasks,
        warnings=(
            *_warnings(config, state, is_forgeable=not parts.evaluator.isolate),
            *(_warn_of_tasks(tasks) if tasks is not None else ()),
        ),
    )


def _winning_line(parts: SearchParts, state: SearchState) -> Iterator[ProgramRecord]:
    """Yield the programs from the first to the winner."""
    ids, id = [state.winner], state.ancestors[state.winner].parent
    while id is not None:
        ids.append(id)
        id = state.ancestors[id].parent
    return (parts.store.get(id) for id in reversed(ids))


def _rows_with_diffs(
    line: Sequence[ProgramRecord], state: SearchState, config: EvolveConfig
) -> tuple[ProgramRow, ...]:
    rows = [_row(line[0], state, config)]
    for parent, child in pairwise(line):
        diff = code_diff(parent.code, child.code)
        rows.append(_row(child, state, config).model_copy(update={"diff": diff}))
    return tuple(rows)


def _row(program: ProgramRecord, state: SearchState, config: EvolveConfig) -> ProgramRow:
    metrics = numeric_metrics(program.metrics)
    return ProgramRow(
        id=program.id,
        iteration=program.iteration,
        generation=program.generation,
        island=program.island or 0,
        parent=program.parent_id or "",
        score=score_of(metrics, features=config.database.feature_dimensions),
        metrics=dict(metrics),
        model=state.ancestors[program.id].model,
        changes=program.changes,
    )


def _member_row(member: Member) -> ProgramRow:
    record = member.record
    return ProgramRow(
        id=record.id,
        iteration=record.attempt,
        generation=record.generation,
        island=record.island,
        parent=record.parent or "",
        score=member.score,
        metrics=dict(record.metrics),
        model=record.arm,
    )


def _models(arms: Iterable[Arm]) -> tuple[ArmRecord, ...]:
    return tuple(
        ArmRecord(
            name=arm.name,
            weight=arm.weight,
            num_plays=arm.num_plays,
            gain=arm.gain,
            cost=arm.cost,
        )
        for arm in arms
    )


def _learned(state: SearchState) -> tuple[LearnedRow, ...]:
    ends = [*(arms for _, arms in state.learned[1:]), state.database.arms]
    return tuple(
        LearnedRow(
            name=learned.name,
            iteration=learned.num_decided,
            num_answers=learned.num_answers,
            num_rows=learned.num_rows,
            num_groups=learned.num_groups,
            tokens=learned.num_tokens,
            seconds=learned.seconds,
            loss=learned.loss,
            error=learned.error,
            models=_models(_earned_between(arms, end)),
        )
        for (learned, arms), end in zip(state.learned, ends, strict=False)
    )


def _earned_between(begin: Iterable[Arm], end: Iterable[Arm]) -> Iterator[Arm]:
    """Yield what each arm earned in between, skipping arms that were not used."""
    known = {arm.name: arm for arm in begin}
    for arm in end:
        before = known.get(arm.name, Arm(name=arm.name))
        num_plays = arm.num_plays - before.num_plays
        if num_plays:
            gain, cost = arm.gain - before.gain, arm.cost - before.cost
            yield replace(arm, num_plays=num_plays, gain=gain, cost=cost)


def _operators(state: SearchState) -> tuple[OperatorRow, ...]:
    are_counted = state.spending.tokens > 0 and not state.spending.num_unreported
    return tuple(
        OperatorRow(
            name=one.name,
            num_given=one.num_given,
            num_accepted=one.num_accepted,
            num_improved=one.num_improved,
            tokens=one.cost if are_counted else None,
        )
        for one in sorted(state.database.operators, key=lambda one: -one.num_given)
    )


def _failed_share(state: SearchState) -> float | None:
    if not state.num_decided:
        return None
    return (state.num_decided - state.num_committed) / state.num_decided


def _curve(state: SearchState) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            iteration=point.attempt,
            num_decided=point.num_decided,
            best=point.score,
            program=point.program,
        )
        for point in state.curve
    )


def _failures(state: SearchState) -> tuple[FailureRecord, ...]:
    ordered = sorted(state.failures.items(), key=lambda pair: (-pair[1].count, pair[0]))
    return tuple(
        FailureRecord(
            kind=kind,
            count=failure.count,
            first_iteration=failure.attempt,
            first_message=failure.message,
        )
        for kind, failure in ordered
    )


def _tokens(spending: Spending) -> PaidTokensRecord:
    if spending.num_unreported:
        return PaidTokensRecord()
    return PaidTokensRecord(prompt=spending.prompt_tokens, completion=spending.completion_tokens)


def _spent(spending: Spending, tasks: TasksReport | None) -> SpentRecord:
    return SpentRecord(
        drawn_tokens=spending.completion_tokens + (tasks.num_choice_tokens if tasks else 0),
        trained_tokens=spending.training_answer_tokens,
    )


def _baseline(baseline: FinishedSearch) -> BaselineRecord:
    state = baseline.state
    return BaselineRecord(
        name=baseline.name,
        best=state.best.score,
        num_iterations=state.num_decided,
        num_failed=state.num_decided - state.num_committed,
        tokens=_tokens(state.spending),
        num_tuning_evaluations=state.spending.num_tuning,
        note=baseline.stop_reason,
    )


def _warnings(config: EvolveConfig, state: SearchState, *, is_forgeable: bool) -> Iterator[str]:
    if is_forgeable:
        yield FORGEABLE
    if config.rookery.sandbox.backend == "none":
        yield "Generated programs ran without a sandbox (unsafe): they could do what you may do."
    if state.spending.num_unreported:
        yield f"{state.spending.num_unreported} answers came without a count of their tokens."
    if state.uncompared is not None:
        num, first = state.uncompared.count, state.uncompared.message
        yield f"{num} programs could not be compared by embedding as asked. The first: {first}"
    if state.num_decided and not state.num_committed:
        yield "No iteration gave a program that could be scored."


def _warn_of_tasks(tasks: TasksReport) -> Iterator[str]:
    if not tasks.taskset.num_select:
        yield "There are no select tasks: the prompt was chosen by the tasks it was found on."
    if not tasks.rows:
        yield "There are no report tasks: the gain of the chosen prompt was not measured."
    yield from warn_of_failed_tasks(tasks.rows)
    yield from warn_of_small_samples(tasks.rows)


def export_population(run: RunView) -> str:
    """Return the population as JSON lines without timestamps: first programs, then attempts in
    order of decision, each with its program or failure.

    Two deterministic runs of one config give the same bytes, however many workers they had and
    however often they were killed.
    """
    lines = [*_first_programs(run), *_attempts(run)]
    return "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)


def _first_programs(run: RunView) -> Iterator[dict[str, Any]]:
    events = sorted(run.events(FIRST_PROGRAM), key=lambda event: int(event.key))
    for event in events:
        evaluated = from_data(Evaluated, event.payload)
        yield {"id": first_id(int(event.key)), **_program(run, evaluated)}


def _attempts(run: RunView) -> Iterator[dict[str, Any]]:
    known, decided = read_stages(run)
    for number in decided:
        yield _line(run, number, known[number])


def _line(run: RunView, number: int, stages: Stages) -> dict[str, Any]:
    planned, evaluated, decision = stages.planned, stages.evaluated, stages.decision
    assert planned is not None and decision is not None
    plan = planned.plan
    line: dict[str, Any] = {
        "iteration": number,
        "island": plan.island,
        "parent": plan.parent,
        "inspirations": plan.inspirations,
        "top": plan.top,
        "model": plan.arm,
        "generation": plan.generation,
    }
    if plan.operator:
        line["operator"] = plan.operator
    if decision.failure is not None:
        failure = {"kind": decision.failure.kind, "message": decision.failure.message}
        return line | {"failure": failure}
    assert evaluated is not None
    return line | {"id": program_id(number), **_program(run, evaluated)}


def _program(run: RunView, evaluated: Evaluated) -> dict[str, Any]:
    document = json.loads(run.blobs.read_bytes(evaluated.program))
    names = ("code", "metrics", "changes_description")
    return {name: document[name] for name in names}


def export_training_data(run: RunView, *, features: Collection[str]) -> str:
    """Return the answers that improved a program, one JSON line each, in order of decision, for
    `rookery sft`.

    A row is a chat: the prompt with parent and metrics, then the answer whose child scored higher.
    """
    known, decided = read_stages(run)
    rows = (_training_row(run, number, known[number], features) for number in decided)
    return "".join(json.dumps(row) + "\n" for row in rows if row is not None)


def _training_row(
    run: RunView, number: int, stages: Stages, features: Collection[str]
) -> dict[str, Any] | None:
    """Return None if the attempt failed, did not beat its parent, or asked no model."""
    planned, generated, evaluated = stages.planned, stages.generated, stages.evaluated
    assert planned is not None and generated is not None and stages.decision is not None
    if stages.decision.failure is not None or evaluated is None or not generated.answer:
        return None
    score = score_of(evaluated.metrics, features=features)
    if score is None or score <= planned.plan.parent_score:
        return None
    exchange = json.loads(run.blobs.read_bytes(generated.answer))
    roles = {"system": "system", "user": "user", "answer": "assistant"}
    return {
        "id": f"{run.name}-{program_id(number)}",
        "messages": [{"role": role, "content": exchange[name]} for name, role in roles.items()],
        "score": score,
        "parent_score": planned.plan.parent_score,
        "model": planned.plan.arm,
    }
