r"""Prompts as programs: scored on tasks, changed by reflection, chosen and reported.

    first = "Answer with a number."                    # or "Q: {{ question }}\nA:"
    search    a child answers a minibatch; if it beats its parent there, it answers all tasks
    select    the best prompts on the search tasks are compared, and one is chosen
    report    the chosen prompt is compared with the first one, once, with a paired interval

Answers are rollouts of the run: none is asked for twice, and a failed one stays failed. A prompt
that has a `{{ field }}` of the tasks is the whole question. Any other prompt is a system message
before the question. Other braces have no meaning.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from rookery.errors import ConfigError, TaskError
from rookery.loops.comparison import (
    compare,
    describe_taskset,
)
from rookery.loops.evolve.config import EvolveConfig, TasksConfig
from rookery.loops.evolve.program import ProgramRecord, ProgramStore, has_large, split_files
from rookery.loops.evolve.program_evaluator import Lease
from rookery.loops.evolve.prompts import NOTHING_ELSE, Asked, Prompt, ShownPrograms, load_templates
from rookery.loops.evolve.proposer import Child, make_child
from rookery.loops.evolve.search_state import SearchState
from rookery.loops.evolve.stages import AttemptFailure, Evaluated
from rookery.ports import Sampler
from rookery.reports import describe_task
from rookery.reports.evolve import FinalistRow, TasksReport
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread, together
from rookery.search.programs.program import COMBINED
from rookery.seeding import stream
from rookery.tasks.splits import SplitName, hash_fraction
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import Group, Message, ModelRef, Rollout, Task

__all__ = [
    "Answerer",
    "PromptEvaluator",
    "PromptForm",
    "PromptTasks",
    "Reflection",
    "TaskAnswers",
    "choose_prompt",
    "draw_minibatch",
    "find_form",
]

PROMPT = "prompt"
"""Field of every task: its own prompt."""
_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")
FAILED_SHARE = 0.75
"""Share of a minibatch that the parent failed. The other tasks show what works."""
SHOWN_CHARS = 1500
"""Characters of each task, answer and reference that a proposal shows."""
ANSWERS, REWARDS = "answers", "rewards"
"""Parts of an evaluation that a prompt's program keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """The form that all prompts of a run share."""

    fields: tuple[str, ...] = ()
    """Fields of the tasks that prompts name. Without any, a prompt is a system message."""

    def complete(self, prompt: str) -> str:
        """Append `{{ prompt }}` if that is the only field that the prompt lost."""
        named = set(_PLACEHOLDER.findall(prompt))
        if not prompt.strip() or set(self.fields) - named != {PROMPT}:
            return prompt
        return f"{prompt.rstrip()}\n\n{{{{ {PROMPT} }}}}"

    def find_problem(self, prompt: str) -> str | None:
        """Return why the prompt cannot be used for the tasks, or None."""
        if not prompt.strip():
            return "The prompt is empty."
        if split_files(prompt):
            return "The prompt begins with a line that separates the files of a program."
        named = set(_PLACEHOLDER.findall(prompt))
        lost = [name for name in self.fields if name not in named]
        return (
            f"The prompt has lost {{{{ {lost[0]} }}}}: the tasks would lack it." if lost else None
        )

    def ask(self, prompt: str, task: Task, row: Mapping[str, object], *, is_chat: bool) -> Task:
        """Return the task as asked with this prompt, with the same id and reference. Without
        `is_chat` the model takes no messages."""
        task_prompt = task.prompt
        messages = (
            (Message(role="user", content=task_prompt),)
            if isinstance(task_prompt, str)
            else task_prompt
        )
        if self.fields:
            values = {**row, PROMPT: messages[-1].content}
            text = _fill(prompt, {name: str(values[name]) for name in self.fields})
            asked = (*messages[:-1], replace(messages[-1], content=text))
        elif messages[0].role == "system":
            system = replace(messages[0], content=f"{prompt}\n\n{messages[0].content}")
            asked = (system, *messages[1:])
        else:
            asked = (Message(role="system", content=prompt), *messages)
        if isinstance(task_prompt, str) and (self.fields or not is_chat):
            return replace(task, prompt="\n\n".join(message.content for message in asked))
        return replace(task, prompt=asked)


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Fill in one pass, so that a value is never read as a field."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def find_form(prompt: str, taskset: Taskset) -> tuple[PromptForm, list[str]]:
    """Return the form of the first prompt and its children, with warnings."""
    named = dict.fromkeys(_PLACEHOLDER.findall(prompt))
    rows = [taskset.fields.get(task.id, {}) for task in taskset.tasks]
    known = {PROMPT, *chain.from_iterable(rows)}
    fields = tuple(name for name in named if name in known)
    for task, row in zip(taskset.tasks, rows, strict=True):
        if lacking := [name for name in fields if name not in row and name != PROMPT]:
            raise ConfigError(
                f"The prompt names {{{{ {lacking[0]} }}}}, and the task {task.id} has no such "
                f"field: it has {', '.join(sorted({PROMPT, *row}))}."
            )
    warnings = [
        f"{{{{ {name} }}}} of the prompt is no field of the tasks and stays as it is; they have "
        f"{', '.join(sorted(known))}"
        for name in named
        if name not in known
    ]
    return PromptForm(fields=fields), warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTasks:
    """The tasks that prompts are scored on."""

    taskset: Taskset
    """The taskset, with the fields of its rows."""
    form: PromptForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """The model that answers the tasks."""

    sampler: Sampler
    model: ModelRef
    template: Template


class TaskAnswers:
    """A model's answers to the tasks of one run, under any prompt."""

    def __init__(
        self, tasks: PromptTasks, config: TasksConfig, *, answerer: Answerer, run: Run
    ) -> None:
        self._template = answerer.template
        self.config = config
        self.form = tasks.form
        self.taskset = tasks.taskset
        self.model = answerer.model
        self.search = _draw_search(tasks.taskset.split("search"), config.num_search)
        self._evaluator = TasksetEvaluator(
            answerer.sampler,
            template=answerer.template,
            tasksets=[tasks.taskset],
            log=RolloutLog(run),
        )

    def split(self, name: SplitName) -> tuple[Task, ...]:
        return self.search if name == "search" else self.taskset.split(name)

    @property
    def num_choice_rollouts(self) -> int:
        """Answers to the select tasks by all finalists."""
        num_prompts = self.config.num_finalists + 1
        return num_prompts * len(self.taskset.split("select")) * self.taskset.sampling.n

    async def answer(self, prompt: str, tasks: Sequence[Task]) -> list[Group]:
        """Return a group per task. Raises TaskError if a task cannot be put to the model."""
        asked = await run_in_thread(self._ask, prompt, tasks)
        return await self._evaluator.rollout([self.model], asked) if asked else []

    def _ask(self, prompt: str, tasks: Sequence[Task]) -> list[Task]:
        rows, is_chat = self.taskset.fields, self._template.chat
        asked = [
            self.form.ask(prompt, task, rows.get(task.id, {}), is_chat=is_chat) for task in tasks
        ]
        for task in asked:
            if isinstance(task.prompt, tuple):
                self._require_chat(task.prompt)
        return asked

    def _require_chat(self, messages: tuple[Message, ...]) -> None:
        try:
            self._template.render_chat(messages)
        except TaskError as error:
            raise TaskError(
                f"{error} If the model takes no system message, write {{{{ prompt }}}} into the "
                "prompt: it is then the user's message."
            ) from error

    def count_tokens(self, groups: Sequence[Group]) -> tuple[int, int]:
        """Count the tokens of prompts and of answers."""
        encode = self._template.encode
        prompts = sum(len(encode(group.task)) * len(group.rollouts) for group in groups)
        drawn = [r.completion for group in groups for r in group.rollouts if r.completion]
        return prompts, sum(len(completion.tokens) for completion in drawn)

    def describe(self, task: Task, group: Group) -> dict[str, str]:
        """Return a task, its worst answer, the answer as read, and the reference."""
        rollout = min(group.rollouts, key=lambda rollout: rollout.reward or 0.0)
        read = self._evaluator.read_answer(rollout)
        answer = rollout.completion.text if rollout.completion else ""
        described = describe_task(task)
        return {
            "task": described["prompt"][:SHOWN_CHARS],
            "answer": answer[:SHOWN_CHARS],
            "read": "" if read is None else read[:SHOWN_CHARS],
            "expected": _text(task.reference)[:SHOWN_CHARS],
        }


def _text(reference: object) -> str:
    return reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)


def _draw_search(tasks: tuple[Task, ...], num: int | None) -> tuple[Task, ...]:
    """Draw tasks independently of the order of rows."""
    if not tasks:
        raise TaskError("splits.search is 0, and prompts are searched on these tasks: raise it.")
    ordered = sorted(tasks, key=lambda task: hash_fraction(task.id, salt="search"))
    kept = {task.id for task in ordered[:num]}
    return tuple(task for task in tasks if task.id in kept)


def draw_minibatch(
    rewards: Sequence[float], *, size: int, seed: int, attempt: int
) -> tuple[int, ...]:
    """Draw the positions of the tasks that an attempt shows and tries first. Most are tasks that
    the parent, with these rewards, failed."""
    rng = stream(seed, "minibatch", attempt)
    top = max(1.0, *rewards)
    order = [int(place) for place in rng.permutation(len(rewards))]
    failed = [place for place in order if rewards[place] < top]
    solved = [place for place in order if rewards[place] >= top]
    num_failed = max(1, round(FAILED_SHARE * size), size - len(solved))
    drawn = failed[:num_failed]
    return tuple((drawn + solved)[:size])


class PromptEvaluator:
    """Scores prompts in place of a ProgramEvaluator."""

    isolate = True
    """A prompt runs nowhere, so it cannot forge its score."""

    def __init__(
        self, config: EvolveConfig, answers: TaskAnswers, *, store: ProgramStore, seed: int
    ) -> None:
        self._answers = answers
        self._store = store
        self._seed = seed
        self._large_bytes = config.database.artifact_size_threshold

    async def tune(self, child: Child, *, lease: Lease, best_score: float) -> Evaluated:
        """Never called: the config refuses tuning of prompts."""
        raise NotImplementedError(f"{child.program.id} {lease.attempt} {best_score}")

    async def evaluate(self, child: Child, *, lease: Lease, best_score: float | None) -> Evaluated:
        """Score a prompt. It fails if it does not beat its parent on the minibatch, or if any
        answer has no reward: missing rewards are not averaged away."""
        del best_score
        await lease.renew()
        began, answers = time.monotonic(), self._answers
        child = await run_in_thread(_complete, child, answers.form)
        prompt = child.program.code
        if problem := answers.form.find_problem(prompt):
            return _failed("bad_prompt", problem)
        groups: list[Group] = []
        try:
            if not lease.is_first:
                batch, before = await run_in_thread(self._minibatch, child, lease.attempt)
                groups = await answers.answer(prompt, batch)
                if failure := _find_failure(groups) or _compare(groups, before):
                    return await run_in_thread(self._spent, _failed(*failure), groups, began)
            groups = await answers.answer(prompt, answers.search)
        except TaskError as error:
            return _failed("bad_prompt", str(error))
        if failure := _find_failure(groups):
            return await run_in_thread(self._spent, _failed(*failure), groups, began)
        evaluated = await run_in_thread(self._keep, child, groups)
        return await run_in_thread(self._spent, evaluated, groups, began)

    def _minibatch(self, child: Child, attempt: int) -> tuple[list[Task], list[float]]:
        assert child.program.parent_id is not None
        parent = self._store.get(child.program.parent_id)
        places = _places(parent, self._answers.config, seed=self._seed, attempt=attempt)
        rewards = _rewards_of(parent)
        return [self._answers.search[place] for place in places], [rewards[at] for at in places]

    def _keep(self, child: Child, groups: Sequence[Group]) -> Evaluated:
        """Store the prompt with its answers, which proposals show. Waits for the disk."""
        rewards = tuple(map(_reward, groups))
        tasks = self._answers.search
        described = [self._answers.describe(*pair) for pair in zip(tasks, groups, strict=True)]
        metrics = {COMBINED: float(np.mean(rewards))}
        program = replace(
            child.program,
            timestamp=time.time(),
            metrics=metrics,
            metadata={**child.program.metadata, REWARDS: list(rewards)},
            artifacts={ANSWERS: json.dumps(described, ensure_ascii=False)},
        )
        return Evaluated(
            program=self._store.put(program),
            metrics=metrics,
            code=child.summary,
            code_hash=child.code_hash,
            has_large_artifacts=has_large(program.artifacts, max_bytes=self._large_bytes),
            rewards=rewards,
        )

    def _spent(self, evaluated: Evaluated, groups: Sequence[Group], began: float) -> Evaluated:
        prompt_tokens, completion_tokens = self._answers.count_tokens(groups)
        return replace(
            evaluated,
            num_rollouts=sum(len(group.rollouts) for group in groups),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            seconds=time.monotonic() - began,
        )


def _complete(child: Child, form: PromptForm) -> Child:
    code = form.complete(child.program.code)
    return child if code == child.program.code else make_child(replace(child.program, code=code))


def _failed(kind: str, message: str) -> Evaluated:
    return Evaluated(failure=AttemptFailure(kind=kind, message=message))


def _find_failure(groups: Sequence[Group]) -> tuple[str, str] | None:
    """Return a failure's kind and sentence if an answer has no reward."""
    failed = [r for group in groups for r in group.rollouts if r.reward is None]
    if not failed:
        return None
    num = len({rollout.task.id for rollout in failed})
    return "no_reward", f"{num} of {len(groups)} tasks have no reward. The first: {failed[0].error}"


def _compare(groups: Sequence[Group], before: Sequence[float]) -> tuple[str, str] | None:
    earned, known = sum(map(_reward, groups)), sum(before)
    if earned > known:
        return None
    return (
        "minibatch",
        f"It earns {earned:g} on {len(groups)} tasks on which its parent earns {known:g}.",
    )


def _reward(group: Group) -> float:
    """Average over the answers of a task. All of them have a reward."""
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards)


def _rewards_of(program: ProgramRecord) -> list[float]:
    rewards: list[float] = program.metadata[REWARDS]
    return rewards


def _places(
    parent: ProgramRecord, config: TasksConfig, *, seed: int, attempt: int
) -> tuple[int, ...]:
    return draw_minibatch(_rewards_of(parent), size=config.minibatch, seed=seed, attempt=attempt)


class Reflection:
    """Builds prompts that show where the parent failed, in place of `Prompts`."""

    num_top_programs = 0

    def __init__(self, config: EvolveConfig, answers: TaskAnswers, *, seed: int) -> None:
        self._templates = load_templates(config.prompt)
        self._config = answers.config
        self._form = answers.form
        self._seed = seed
        system = config.prompt.system_message
        name = "reflection_system" if system == "system_message" else system
        self._system = self._templates.text_or_template(name)

    def build(
        self,
        parent: ProgramRecord,
        *,
        shown: ShownPrograms,
        attempt: int,
        asked: Asked = NOTHING_ELSE,
    ) -> Prompt:
        """Build the prompt for a child of `parent`, with the tasks of its minibatch."""
        del shown, asked
        answers = json.loads(str(parent.artifacts[ANSWERS]))
        rewards = _rewards_of(parent)
        places = _places(parent, self._config, seed=self._seed, attempt=attempt)
        examples = [
            _show(number, answers[place], rewards[place])
            for number, place in enumerate(places, start=1)
        ]
        fields = ", ".join(f"{{{{ {name} }}}}" for name in self._form.fields)
        demands = f"Keep {fields}: there each task is filled in.\n" if fields else ""
        user = self._templates.fill(
            "reflection_user",
            current_prompt=parent.code,
            examples="\n\n".join(examples),
            demands=demands,
        )
        return Prompt(system=self._system, user=user, template="reflection_user")


def _show(number: int, answer: Mapping[str, str], reward: float) -> str:
    lines = [
        f"## Task {number}",
        answer["task"],
        f"### Answer, which earned {reward:g}",
        answer["answer"] or "(nothing)",
    ]
    if answer["read"].strip() != answer["answer"].strip():
        lines += ["### What the scorer read of it", answer["read"] or "(no answer was found)"]
    return "\n".join([*lines, "### Expected", answer["expected"]])


CHOSEN = "prompt/chosen"
"""Event kind of the choice. The report tasks are answered after it."""


async def choose_prompt(
    answers: TaskAnswers, state: SearchState, *, store: ProgramStore, run: Run, seed: int
) -> TasksReport:
    """Choose on the select tasks, then compare with the first prompt on the report tasks, once."""
    first = state.first_best
    ranked = sorted(state.database.members.values(), key=lambda member: member.rank)
    names = [member.id for member in ranked[: answers.config.num_finalists]]
    names = list(dict.fromkeys([*names, first]))
    prompts = {id: (await run_in_thread(store.get, id)).code for id in names}
    select = answers.split("select")
    groups = await together(answers.answer(prompts[id], select) for id in names)
    finalists = [
        _finalist(state, store, id, answered) for id, answered in zip(names, groups, strict=True)
    ]
    known = await run.append(CHOSEN, {"program": _best(finalists)}, key="chosen")
    chosen = state.chosen = str(known.payload["program"])
    report = answers.split("report")
    measured = await together(answers.answer(prompts[id], report) for id in (chosen, first))
    rewards = {"chosen prompt": _earned(measured[0]), "first prompt": _earned(measured[1])}
    rows = (
        await asyncio.to_thread(
            compare, rewards, report, weights={answers.taskset.name: 1.0}, seed=seed
        )
        if report
        else []
    )
    return TasksReport(
        taskset=describe_taskset(answers.taskset),
        num_search=len(answers.search),
        model=answers.model.served_name,
        num_rollouts=state.spending.num_rollouts,
        num_final_rollouts=len(_distinct([*groups, *measured])),
        num_choice_tokens=answers.count_tokens(_distinct(groups))[1],
        finalists=tuple(finalists),
        chosen=chosen,
        rows=tuple(rows),
    )


def _distinct(groups: Sequence[Sequence[Group]]) -> list[Group]:
    """Keep one group per question, as equal questions are answered once."""
    return list({(g.task.id, g.task.prompt): g for answered in groups for g in answered}.values())


def _finalist(
    state: SearchState, store: ProgramStore, id: str, groups: Sequence[Group]
) -> FinalistRow:
    failure = _find_failure(groups)
    rewards = [] if failure else list(map(_reward, groups))
    return FinalistRow(
        id=id,
        search=float(np.mean(_rewards_of(store.get(id)))),
        select=float(np.mean(rewards)) if rewards else None,
        error="" if failure is None else failure[1],
        iteration=state.ancestors[id].attempt,
    )


def _best(finalists: Sequence[FinalistRow]) -> str:
    """Return the best by select tasks, then search tasks, then the earliest. Failures come last."""

    def key(row: FinalistRow) -> tuple[bool, float, float, int]:
        return (bool(row.error), -(row.select or 0.0), -(row.search or 0.0), row.iteration)

    return min(finalists, key=key).id


def _earned(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards by task, for tasks whose answers all have one."""

    def is_whole(rollouts: Sequence[Rollout]) -> bool:
        return all(rollout.reward is not None for rollout in rollouts)

    return {group.task.id: _reward(group) for group in groups if is_whole(group.rollouts)}
