"""One generation of the genome loop timed through the loop's own parts, and its requests alone.

Not a script: `genome.py` and `genome_gpu.py` use it.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rookery.embedded import EmbeddedEngine
from rookery.fleet import Fleet
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.search_evaluator import CandidateLoader, SearchEvaluator
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.rollout.asking import Asking
from rookery.runs import Run
from rookery.search.racing import RaceConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import Adapter, Completion, ModelRef, SampleRequest, Score, ScoreRequest, Task

__all__ = ["TimedGeneration", "Timing", "WaitingEngine"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Duration of a measurement and its number of answers."""

    seconds: float
    num_answers: int

    def overhead(self, alone_s: float, num_answers: int) -> float:
        """Share of the time not spent on answering. The requests alone take `alone_s` for
        `num_answers`."""
        return 1 - alone_s * self.num_answers / num_answers / self.seconds


class WaitingEngine:
    """Simulates, by sleeping, a GPU with 256 parallel sequences and `step_s` per token."""

    def __init__(self, *, step_s: float = 0.0145, num_slots: int = 256) -> None:
        self._step_s = step_s
        self._slots = asyncio.Semaphore(num_slots)

    async def load(self, adapter: Adapter) -> ModelRef:
        return ModelRef(name=adapter.name, version=adapter.version)

    async def unload(self, ref: ModelRef) -> None:
        pass

    async def reset_prefix_cache(self) -> None:
        pass

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        raise NotImplementedError

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: SampleRequest) -> tuple[Completion, ...]:
        num = request.params.max_tokens
        async with self._slots:
            await asyncio.sleep(num * self._step_s)
        return (
            Completion(
                model=request.model,
                tokens=tuple(range(num)),
                logprobs=tuple(-0.1234567 * i for i in range(num)),
                text="word " * num,
                finish_reason="length",
            ),
        )


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """One generation: all candidates `names` of a builder on all tasks."""

    engine: EmbeddedEngine | Fleet | WaitingEngine
    template: Template
    tasksets: Sequence[Taskset]
    tasks: Sequence[Task]
    builder: AdapterBuilder
    names: Sequence[str]

    async def through_the_loop(self, *, is_made: bool = False) -> "Timing":
        """Make, load, ask, race as shipped, score, log and unload; no making if `is_made`.

        At least half of the candidates survive the race.
        """
        await self.engine.reset_prefix_cache()
        if is_made:
            for name in self.names:
                self.builder.adapter(name)
        else:
            self.builder.keep(())
        with (
            tempfile.TemporaryDirectory() as scratch,
            Run.create(Path(scratch), kind="genome", config={}, name="run") as run,
        ):
            evaluator = TasksetEvaluator(
                self.engine, template=self.template, tasksets=self.tasksets, log=RolloutLog(run)
            )
            search = SearchEvaluator(
                evaluator,
                loader=CandidateLoader(self.engine, run=run),
                builder=self.builder,
                tasks=self.tasks,
                weights={taskset.name: taskset.weight for taskset in self.tasksets},
                race=RaceConfig(),
                is_remote=not isinstance(self.engine, EmbeddedEngine),
            )
            keep = max(1, len(self.names) // 2)
            start = time.perf_counter()
            measured = await search.measure(self.names, rivals=(), seed=0, keep=keep)
            seconds = time.perf_counter() - start
        assert not any(found.error for found in measured.values())
        return Timing(seconds, evaluator.num_rollouts)

    @property
    def num_answers(self) -> int:
        """Answers of all candidates to all tasks."""
        return len(self.names) * len(self.tasks)

    async def requests_alone(self) -> float:
        """Seconds of the same requests in one call, with the adapters already loaded."""
        refs = [await self.engine.load(self.builder.adapter(name)) for name in self.names]
        await self._ask(refs, self.tasks[:1])
        await self.engine.reset_prefix_cache()
        seconds = await self._ask(refs, self.tasks)
        for ref in refs:
            await self.engine.unload(ref)
        return seconds

    async def one_by_one(self) -> float:
        """Seconds of the same requests, one candidate at a time, each with an empty cache."""
        total = 0.0
        for name in self.names:
            ref = await self.engine.load(self.builder.adapter(name))
            await self._ask([ref], self.tasks[:1])
            await self.engine.reset_prefix_cache()
            total += await self._ask([ref], self.tasks)
            await self.engine.unload(ref)
        return total

    async def _ask(self, refs: Sequence[ModelRef], tasks: Sequence[Task]) -> float:
        askings = {
            taskset.name: Asking(taskset, sampler=self.engine, template=self.template)
            for taskset in self.tasksets
        }
        chosen, drawn = [], []
        for task in tasks:
            for ref in refs:
                if task.choices:
                    chosen += askings[task.source].choice_requests(ref, task)
                else:
                    drawn.append(askings[task.source].sample_request(ref, task))
        start = time.perf_counter()
        if chosen:
            await self.engine.score(chosen)
        if drawn:
            await self.engine.sample(drawn)
        return time.perf_counter() - start
