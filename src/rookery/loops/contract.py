"""Contract of a loop without assembly of its own: a config, and a function from inputs to report.

    LOOP = Loop(config=MyConfig, run=my_loop)
    report = await my_loop(inputs, engine=engine, run=run, observer=observer)

`compose` reads the tasksets, opens the engine, makes or opens the run, and writes the page.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import Field

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import EngineChoice, engine_from_folder, local_model
from rookery.loops.comparison import compare
from rookery.ports import Engine, Observer
from rookery.reports import LoopReport, ReportRow
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.tasks.splits import SplitName
from rookery.tasks.taskset import Taskset, TasksetConfig, from_folder
from rookery.types import ModelRef, Task

__all__ = ["Loop", "LoopConfig", "LoopInputs"]


class LoopConfig(Config):
    """Config keys of every loop over tasksets."""

    engine: EngineChoice = EngineConfig()
    """The engine that answers: embedded, or a fleet of vLLM servers."""
    tokenizer: str = ""
    """A model folder or Hugging Face id. Empty: the engine's model. Required for servers by URL."""
    tasksets: tuple[TasksetConfig, ...] = Field(min_length=1)
    """Tasks to search, select and report on."""
    seed: int = 0
    """Seed of all random numbers of the run."""

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its paths resolved against the folder of its file."""
        return self.model_copy(
            update={
                "engine": engine_from_folder(self.engine, folder),
                "tokenizer": local_model(self.tokenizer, folder),
                "tasksets": tuple(from_folder(taskset, folder) for taskset in self.tasksets),
            }
        )


Settings = TypeVar("Settings", bound=LoopConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs(Generic[Settings]):
    """The inputs of a loop. The evaluator reuses answers that the run has recorded."""

    config: Settings
    tasksets: Sequence[Taskset]
    evaluator: TasksetEvaluator

    def tasks(self, split: SplitName) -> list[Task]:
        """Return the tasks of a split over all tasksets."""
        return [task for taskset in self.tasksets for task in taskset.split(split)]

    async def rewards(self, model: ModelRef, split: SplitName) -> dict[str, float]:
        """Return the rewards by task, without failed tasks."""
        [evaluation] = await self.evaluator.evaluate([model], self.tasks(split))
        return dict(evaluation.rewards)

    async def compare(self, models: Mapping[str, ModelRef]) -> tuple[ReportRow, ...]:
        """Compare on the report tasks. The first model is the result, the second its reference."""
        rewards = {name: await self.rewards(ref, "report") for name, ref in models.items()}
        weights = {taskset.name: taskset.weight for taskset in self.tasksets}
        tasks, seed = self.tasks("report"), self.config.seed
        rows = await run_in_thread(compare, rewards, tasks, weights=weights, seed=seed)
        return tuple(rows)


class RunLoop(Protocol[Settings]):
    """A loop that starts a run or resumes it."""

    def __call__(
        self, inputs: LoopInputs[Settings], *, engine: Engine, run: Run, observer: Observer[Any]
    ) -> Awaitable[LoopReport]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Generic[Settings]):
    """A loop as `KINDS` of `rookery.compose` names it."""

    config: type[Settings]
    run: RunLoop[Settings]
    scored: tuple[str, ...] = ()
    """Kinds of events that follow from rewards. `--rescore` computes them again."""
