"""What can be refused is refused here, before a run is made."""

from collections.abc import Sequence

from rookery.errors import AdapterError, TaskError
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import Engine
from rookery.rollout import TasksetEvaluator
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter

__all__ = ["MIN_REPORT_TASKS", "check_inputs", "check_splits"]

MIN_REPORT_TASKS = 2
"""One task shows no spread, and so has no interval."""


def check_inputs(
    config: GrpoConfig,
    *,
    start: Adapter | None,
    tasksets: Sequence[Taskset],
    engine: Engine,
    evaluator: TasksetEvaluator | None,
) -> None:
    """Raise the first thing that would make the run fail, or its result mean nothing.

    `start` is the adapter to begin with; None: all weights are trained. Without an evaluator
    lengths are not checked: what a game says is known when it is played.
    """
    check_splits(tasksets)
    if start is not None and start.rank > engine.max_rank:
        where = "lora.rank" if config.init_from is None else f"The rank of {config.init_from}"
        raise AdapterError(
            f"{where} is {start.rank}, and the engine takes adapters up to rank "
            f"{engine.max_rank}: write {engine.max_rank} or less, or raise the engine's limit."
        )
    if evaluator is not None and engine.context_tokens is not None:
        tasks = [task for taskset in tasksets for name in SPLITS for task in taskset.split(name)]
        evaluator.check_lengths(tasks, context_tokens=engine.context_tokens)


def check_splits(tasksets: Sequence[Taskset]) -> None:
    """Raise TaskError unless each split has tasks for what it is used for. Without any taskset
    there is none to check: then an environment elsewhere has the tasks."""
    if not tasksets:
        return
    uses = {
        "search": "trained on",
        "select": "read to choose a checkpoint",
        "report": "read once, for the result",
    }
    for name in SPLITS:
        count = sum(len(taskset.split(name)) for taskset in tasksets)
        if count == 0:
            raise TaskError(
                f"No taskset has tasks of the {name} split, which are {uses[name]}: give at least "
                f"one of them splits.{name} above 0."
            )
        if name == "report" and count < MIN_REPORT_TASKS:
            raise TaskError(
                f"The report split has {count} task, which gives no interval: add tasks, or raise "
                "splits.report."
            )
