"""The decisions of a chain as events of the run."""

import asyncio
from concurrent.futures import Future

from rookery.loops.icm.batch import Batch
from rookery.loops.icm.chain import Step
from rookery.runs import Event, NewEvent, Run

__all__ = ["DecisionLog"]

BLOCK_DECISIONS = 64
"""Decisions written together: they follow from the answers, which are written at once."""


class DecisionLog:
    """Decisions as events, written in blocks: a resumed run makes those it lost again.

    They are keyed by iteration: one that decides otherwise the second time is refused.
    """

    def __init__(self, run: Run, batch: Batch, *, chain: int) -> None:
        self._run = run
        self._batch = batch
        self._chain = chain
        self._waiting: list[NewEvent] = []
        self._blocks: list[Future[list[Event]]] = []

    def add(self, step: Step) -> None:
        """Note a decision. Does not wait: `flush` does, at the end of the chain."""
        payload = {
            "item": self._batch.items[step.item].id,
            "is_accepted": step.is_accepted,
            "utility": step.utility,
            "proposed_utility": step.proposed_utility,
            "temperature": step.temperature,
            "labels": "".join("-" if x < 0 else chr(ord("0") + x) for x in step.labels),
            "num_frustrated": step.num_frustrated,
        }
        key = f"{self._batch.index}/{self._chain}/{step.iteration}"
        self._waiting.append(NewEvent(kind="decision", payload=payload, key=key))
        if len(self._waiting) >= BLOCK_DECISIONS:
            self._submit()

    async def flush(self) -> None:
        """Wait until all decisions are stored."""
        self._submit()
        for block in self._blocks:
            await asyncio.wrap_future(block)
        self._blocks.clear()

    def _submit(self) -> None:
        self._blocks.append(self._run.submit(self._waiting))
        self._waiting = []
