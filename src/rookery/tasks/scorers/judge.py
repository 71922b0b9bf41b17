"""Judge scorer: a model reads the prompt and the answer and gives a score within a range.

    {type: judge, model: 'base@smollm2', low: 1, high: 5}

The reward is the score scaled to 0..1. A reply without a score, or with one out of range, is an
error of that task and never counts as 0.
"""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.errors import TaskError
from rookery.ports import Sampler
from rookery.tasks.scorers.text import ScorerOptions
from rookery.tasks.template import (
    Template,
    check_prompt_template,
    compile_prompt_template,
    render_prompt_template,
)
from rookery.types import Completion, Message, ModelRef, SampleRequest, SamplingParams, Task

__all__ = ["JudgeConfig", "JudgeScorer"]

DEFAULT_PROMPT = """\
You grade the answer to a question.

Question:
{{ prompt }}

{% if reference is not none %}Reference answer:
{{ reference }}

{% endif %}Answer to grade:
{{ completion }}

How good is the answer, from {{ low }} (worst) to {{ high }} (best)? End with one line:
Score: N"""


class JudgeConfig(ScorerOptions):
    """Judge model, its prompt, and how its reply is parsed."""

    type: Literal["judge"] = "judge"
    model: str
    """Served name of the judge, `name@version`. It must not be the model in training, which would
    learn to please itself."""
    prompt: str = DEFAULT_PROMPT
    """jinja2 template over prompt, completion, reference, choices, low and high."""
    pattern: str = r"(?i)score[\s:=*]*(-?\d+(?:\.\d+)?)"
    """Regular expression; group 1 of its last match in the reply is the score."""
    low: float = Field(default=0.0)
    """Score with reward 0."""
    high: float = Field(default=10.0)
    """Score with reward 1."""
    max_tokens: int = Field(default=512, ge=1)
    """Limit on the judge's reply, including its reasoning before the score."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        name, _, version = self.model.rpartition("@")
        if not name or not version:
            raise ValueError(f"model is {self.model!r}; write name@version, such as base@smollm2")
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; low must be less")
        check_prompt_template(self.prompt)
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"the pattern {self.pattern!r} is not a regular expression: {error}"
            ) from None
        if num_groups < 1:
            raise ValueError(f"the pattern {self.pattern!r} has no group: put (...) on the number")
        return self


class JudgeScorer:
    """Asks the judge once per completion, at temperature 0."""

    answer: Literal["sample"] = "sample"

    def __init__(self, config: JudgeConfig, *, sampler: Sampler, template: Template) -> None:
        self._config = config
        self._sampler = sampler
        self._template = template
        self._prompt = compile_prompt_template(config.prompt)
        name, _, version = config.model.rpartition("@")
        self._model = ModelRef(name=name, version=version)

    def read(self, completion: Completion) -> str | None:
        return completion.text.strip() or None

    async def reward(self, task: Task, completion: Completion) -> float:
        request = SampleRequest(
            model=self._model,
            prompt=self._template.encode(self._question(task, completion)),
            params=SamplingParams(max_tokens=self._config.max_tokens, temperature=0.0),
        )
        [[reply]] = await self._sampler.sample([request])
        return self._read_score(task, reply)

    def _question(self, task: Task, completion: Completion) -> Task:
        # Without this, an answer could end its turn and write the judge's reply itself.
        answer = self._template.without_special(completion.text)
        fields = {
            "prompt": task.prompt if isinstance(task.prompt, str) else _transcript(task.prompt),
            "completion": answer,
            "reference": task.reference,
            "choices": list(task.choices),
            "low": f"{self._config.low:g}",
            "high": f"{self._config.high:g}",
        }
        where = f"Judging task {task.id}"
        text = render_prompt_template(self._prompt, fields, where=where)
        return Task(id=task.id, prompt=text, reference=None)

    def _read_score(self, task: Task, reply: Completion) -> float:
        matches = list(re.finditer(self._config.pattern, reply.text))
        is_cut = reply.finish_reason == "length"
        low, high = self._config.low, self._config.high
        who = f"Task {task.id}: the judge {self._config.model}"
        # "Score: 1" at the very end of a cut reply may be the first half of "Score: 10".
        if not matches or (is_cut and matches[-1].end() == len(reply.text)):
            cut = " before it was cut: raise scorer.max_tokens" if is_cut else ""
            raise TaskError(f"{who} gave no score in {_tail(reply.text)}{cut}.")
        try:
            score = float(matches[-1][1])
        except (TypeError, ValueError):
            raise TaskError(f"{who} gave {matches[-1][1]!r}, which is not a number.") from None
        if not low <= score <= high:
            raise TaskError(f"{who} gave {score:g}, which is not between {low:g} and {high:g}.")
        return (score - low) / (high - low)


def _transcript(messages: tuple[Message, ...]) -> str:
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _tail(text: str) -> str:
    return repr(text if len(text) <= 200 else "..." + text[-197:])
