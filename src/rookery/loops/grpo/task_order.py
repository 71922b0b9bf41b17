"""Which task each draw of a run takes: every task once per epoch, each epoch in its own order."""

from collections.abc import Sequence

from rookery.seeding import bulk_stream
from rookery.types import Task

__all__ = ["TaskOrder"]


class TaskOrder:
    """The tasks at positions 0, 1, 2, ... without end; a pure function of tasks and seed.

    Only the order of the epoch that was asked for last is held.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> Task:
        epoch, place = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            order = bulk_stream("grpo-tasks", self._seed, epoch).permutation(len(self._tasks))
            self._order, self._epoch = order.tolist(), epoch
        return self._tasks[self._order[place]]
