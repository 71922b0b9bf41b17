"""Groups to train on: several answers to each task, drawn at random and judged.

sampler = GroupSampler(engine, template=template, tasksets=tasksets, params=SamplingParams(n=8))
groups = await sampler.draw(policy, [Draw(task=task, seed=7)])

An evaluation puts the same question to many models and never asks twice; here every draw is a new
one, named by its seed, and the caller keeps what came of it.
"""

from collections.abc import Sequence
from dataclasses import replace

from rookery.concurrency import together
from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError, TaskError
from rookery.ports import Sampler
from rookery.rollout.asking import Asking
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    Draw,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Task,
    TokenSequence,
)

__all__ = ["GroupSampler"]


class GroupSampler:
    """Draws groups from one sampler, with one set of sampling parameters."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        template: Template,
        tasksets: Sequence[Taskset],
        params: SamplingParams,
    ) -> None:
        self._sampler = sampler
        self._template = template
        self._params = params
        self._askings = {
            taskset.name: Asking(taskset, sampler=sampler, template=template)
            for taskset in tasksets
        }
        for taskset in tasksets:
            if self._askings[taskset.name].is_choice:
                raise TaskError(
                    f"{taskset.name} has choices to be scored, and training needs answers that "
                    "are drawn: give it another scorer, exact or numeric for example."
                )

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """A group for each draw, in their order. What fails is in its group, with the reason."""
        answers = await self._answers(model, draws)
        judged = iter(await together(self._judge(draw.task, answer) for draw, answer in answers))
        rollouts = [tuple(next(judged) for _ in range(self._params.n)) for _ in draws]
        return [
            Group(task=draw.task, model=model, rollouts=own)
            for draw, own in zip(draws, rollouts, strict=True)
        ]

    async def _answers(
        self, model: ModelRef, draws: Sequence[Draw]
    ) -> list[tuple[Draw, Completion | str]]:
        """`n` answers to each draw, or `n` times why there are none."""
        try:
            drawn = await self._sampler.sample([self._request(model, draw) for draw in draws])
        except (EngineDownError, FleetDownError):
            raise  # nobody can answer anything: the run ends, and goes on when somebody can
        except (EngineError, FleetError) as error:
            if len(draws) == 1:
                return [(draws[0], str(error))] * self._params.n
            alone = await together(self._answers(model, [draw]) for draw in draws)
            return [pair for pairs in alone for pair in pairs]
        pairs = zip(draws, drawn, strict=True)
        return [(draw, completion) for draw, completions in pairs for completion in completions]

    def _request(self, model: ModelRef, draw: Draw) -> SampleRequest:
        return SampleRequest(
            model=model,
            prompt=self._template.encode(draw.task),
            params=replace(self._params, seed=draw.seed),
            affinity=draw.task.id,
        )

    async def _judge(self, task: Task, answer: Completion | str) -> Rollout:
        if isinstance(answer, str):
            return Rollout(task=task, completion=None, reward=None, error=answer)
        rollout = await self._askings[task.source].judge(task, answer)
        return replace(rollout, sequences=(self._sequence(task, answer),))

    def _sequence(self, task: Task, answer: Completion) -> TokenSequence:
        prompt = self._template.encode(task)
        return TokenSequence(
            tokens=prompt + answer.tokens,
            drawn=tuple(range(len(prompt), len(prompt) + len(answer.tokens))),
            logprobs=answer.logprobs,
            kept=answer.kept,
        )
