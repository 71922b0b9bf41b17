"""Questions by key, each asked once: who asks for one that is under way waits for its answer.

    once = AskOnce[Context, Read]()
    reads = await once.know(contexts_by_key, ask_block, size=32, places=asyncio.Semaphore(16))

| stage  | consumes              | produces                | waits for                          |
|--------|-----------------------|-------------------------|------------------------------------|
| blocks | questions not in hand | blocks of `size`        | a place among the blocks in flight |
| answer | a block               | its answers, stored     | the engine, the disk               |
| others | questions in hand     | what their asker found  | that asker; asked here if it ended |
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from rookery.concurrency import together

__all__ = ["AskOnce"]

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class AskOnce(Generic[Question, Answer]):
    """What is being asked right now. What was answered before is for the caller to remember."""

    def __init__(self) -> None:
        # Filled and drained by `know`; one that ends early leaves None to those who wait.
        self._in_hand: dict[str, asyncio.Future[tuple[Answer] | None]] = {}

    async def know(
        self,
        questions: Mapping[str, Question],
        answer: Callable[[Mapping[str, Question]], Awaitable[Mapping[str, Answer]]],
        *,
        size: int,
        places: asyncio.Semaphore,
    ) -> dict[str, Answer]:
        """The answer to each. `answer` finds or asks those of one block of `size`, in order."""
        known: dict[str, Answer] = {}
        while left := [key for key in questions if key not in known]:
            waited = {key: self._in_hand[key] for key in left if key in self._in_hand}
            own = [key for key in left if key not in waited]
            known |= await self._ask({key: questions[key] for key in own}, answer, size, places)
            for key, future in waited.items():
                found = await asyncio.shield(future)
                if found is not None:
                    known[key] = found[0]
        return known

    async def _ask(
        self,
        questions: Mapping[str, Question],
        answer: Callable[[Mapping[str, Question]], Awaitable[Mapping[str, Answer]]],
        size: int,
        places: asyncio.Semaphore,
    ) -> dict[str, Answer]:
        loop, keys, known = asyncio.get_running_loop(), list(questions), dict[str, Answer]()
        futures = {key: loop.create_future() for key in keys}
        self._in_hand |= futures

        async def ask(block: Sequence[str]) -> None:
            async with places:
                answers = await answer({key: questions[key] for key in block})
            known.update(answers)
            for key in block:
                futures[key].set_result((answers[key],))

        try:
            await together(ask(keys[first : first + size]) for first in range(0, len(keys), size))
        finally:
            for key, future in futures.items():
                del self._in_hand[key]
                if not future.done():
                    future.set_result(None)
        return known
