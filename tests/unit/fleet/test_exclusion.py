"""Two kinds of calls that never meet."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.fleet.routing.paused import CallExclusion


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3), st.booleans())))
def test_kinds_never_meet_and_all_get_their_turn(calls: list[tuple[str, int, bool]]) -> None:
    async def run() -> int:
        exclusion, inside, done = CallExclusion(), {"a": 0, "b": 0, "": 0}, 0

        async def call(kind: str, length: int) -> None:
            nonlocal done
            async with exclusion.take(kind):
                inside[kind] += 1
                try:
                    assert not (inside["a"] and inside["b"])
                    for _ in range(length):
                        await asyncio.sleep(0)
                finally:
                    inside[kind] -= 1
            done += 1

        tasks = [asyncio.create_task(call(kind, length)) for kind, length, _ in calls]
        await asyncio.sleep(0)
        for task, (_, _, is_cancelled) in zip(tasks, calls, strict=True):
            if is_cancelled:
                task.cancel()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [e for e in found if isinstance(e, Exception)]
        assert exclusion.is_idle
        return done

    num_left = sum(not is_cancelled for _, _, is_cancelled in calls)
    assert asyncio.run(run()) >= num_left


async def test_all_that_wait_for_a_kind_have_their_turn_together() -> None:
    exclusion = CallExclusion()
    order: list[str] = []

    async def call(kind: str) -> None:
        async with exclusion.take(kind):
            order.append(kind)
            await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for kind in "abababab":
            group.create_task(call(kind))
    assert order == list("abbbbaaa")


@pytest.mark.parametrize("kind", ["", "a"])
async def test_an_error_ends_the_turn(kind: str) -> None:
    exclusion = CallExclusion()
    with pytest.raises(ValueError, match="x"):
        async with exclusion.take(kind):
            raise ValueError("x")
    assert exclusion.is_idle


async def test_calls_of_one_kind_run_together() -> None:
    exclusion = CallExclusion()
    async with exclusion.take("a"), exclusion.take("a"), exclusion.take(""):
        waiting = asyncio.create_task(exclusion.take("b").__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
