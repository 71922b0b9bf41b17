"""A toy search of prompts: a task is of one of four kinds, and is answered right when the prompt
names its kind. The proposer adds the kind of a task that it is shown as failed."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loops.evolve.toy import open_toy_run

from rookery.compat import openevolve
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.loop import EvolveInputs, evolve
from rookery.loops.evolve.parts import Models
from rookery.loops.evolve.problem import FirstProgram
from rookery.loops.evolve.prompt_tasks import Answerer, PromptTasks, find_form
from rookery.ports import TextModel
from rookery.reports import EvolveReport
from rookery.tasks.scorers import ExactConfig, PythonConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.testing import FakeSampler, FakeTextModel
from rookery.types import Json, ModelRef, SampleRequest, Task, TextRequest, TokenIds

KINDS = "abcd"
FIRST = "Answer."
FIELDS = "{{ kind }} asks {{ prompt }}"
MODEL = ModelRef(name="base", version="toy")


class CharTokenizer:
    """A token is a character; a chat is `role: content` lines."""

    chat_template: str | dict[str, str] | None = "chat"
    eos_token_id: int | None = None
    added_tokens_decoder: Mapping[int, Any] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return list(map(chr, ids))

    def apply_chat_template(self, conversation: list[dict[str, Json]], **_: object) -> str:
        return "".join(f"{one['role']}: {one['content']}\n" for one in conversation)


def toy_taskset(num: int = 60, **changes: Any) -> Taskset:
    tasks = tuple(
        Task(id=f"toy/{i}", prompt=f"{KINDS[i % 4]}{i}", reference=f"yes{i}", source="toy")
        for i in range(num)
    )
    fields = {task.id: {"kind": str(task.prompt)[0]} for task in tasks}
    values: dict[str, Any] = {"scorer": ExactConfig(), "fields": fields, **changes}
    return Taskset(name="toy", tasks=tasks, **values)


def answer(request: SampleRequest, _: int) -> TokenIds:
    """`yesN` where the prompt says `know K` of the kind of the task `KN`."""
    text = "".join(map(chr, request.prompt))
    task = re.findall(r"\b([a-d])(\d+)\b", text)[-1]
    is_known = f"know {task[0]}" in text
    return tuple(map(ord, f"{'yes' if is_known else 'no'}{task[1]}"))


def propose(request: TextRequest) -> str:
    """The prompt that is shown, which also knows the kind of the first failed task."""
    user = request.messages[-1].content
    shown = user.split("```")[1].strip()
    failed = re.search(r"## Task \d+\n([a-d])\d+\n### Answer, which earned 0", user)
    return f"Why not:\n```\n{shown} know {failed[1] if failed else 'nothing'}\n```"


def sampler(reply: Callable[[SampleRequest, int], TokenIds] = answer) -> FakeSampler:
    return FakeSampler(reply=reply, decode=lambda tokens: "".join(map(chr, tokens)))


def prompt_config(**values: Any) -> EvolveConfig:
    own = values.pop("rookery", {})
    tasks = {"taskset": "toy", "minibatch": 3, **own.pop("tasks", {})}
    document = {
        "max_iterations": 12,
        "llm": {"retries": 0},
        **values,
        "rookery": {
            "in_flight": 2,
            "mode": "deterministic",
            "engine": {"model": "toy"},
            "tasks": tasks,
            **own,
        },
    }
    return EvolveConfig.model_validate(document)


async def evolve_prompts(
    folder: Path,
    config: EvolveConfig | None = None,
    *,
    first: str = FIRST,
    taskset: Taskset | None = None,
    model: TextModel | None = None,
    answering: FakeSampler | None = None,
) -> EvolveReport:
    """One session in the run `toy` of a folder."""
    config, taskset = config or prompt_config(), taskset or toy_taskset()
    form, _ = find_form(first, taskset)
    inputs = EvolveInputs(
        config=config,
        programs=[FirstProgram(code=first, language="text", suffix=".txt")],
        tasks=PromptTasks(taskset=taskset, form=form),
        output_format=openevolve,
    )
    engine = Models(
        models={"base": model or FakeTextModel(propose, name="base")},
        answerer=Answerer(
            sampler=answering or sampler(), model=MODEL, template=Template(CharTokenizer())
        ),
    )
    with open_toy_run(folder, config) as run:
        return await evolve(inputs, engine=engine, run=run)


def refuses_kind_d(task: Task, completion: Any) -> float:
    """A scorer that raises at right answers to tasks of one kind."""
    if completion.text == task.reference and str(task.reference) in D_ANSWERS:
        raise ValueError("it cannot be judged")
    return float(completion.text == task.reference)


D_ANSWERS = {f"yes{number}" for number in range(3, 60, 4)}
RAISING = PythonConfig(function=f"{__name__}:refuses_kind_d")
