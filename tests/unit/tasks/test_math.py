import asyncio
import gc
import os
import select
import signal
from collections.abc import Callable

import pytest

from rookery.errors import TaskError
from rookery.tasks.scorers import MathConfig
from rookery.tasks.scorers.math import MathScorer
from rookery.types import Completion, Task

CASES = [
    ("1/2", "so it is $0.5$", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", 1),
    ("x^2+2x+1", "$(x+1)^2$", 1),
    (r"\{1,2\}", r"$\{2,1\}$", 1),
    ("72", "The answer is 72.", 1),
    ("some steps\n#### 72", "The answer is 72.", 1),
    (["71", "72"], "72", 1),
    (72, "72", 1),
    ("72", "73", 0),
    ("72", "", 0),
    ("72", "I do not know", 0),
    ("72", "((((((((", 0),
    ("72", "\ud800 72", 1),
]


@pytest.fixture(scope="module")
def scorer() -> MathScorer:
    """One for all tests: its process takes most of a second to start."""
    return MathScorer(MathConfig())


async def test_math_compares_by_value_and_many_at_once(
    scorer: MathScorer, task: Callable[..., Task], completion: Callable[..., Completion]
) -> None:
    rewards = await asyncio.gather(
        *(scorer.reward(task(reference), completion(text)) for reference, text, _ in CASES)
    )
    assert rewards == [reward for _, _, reward in CASES]


async def test_a_reference_that_is_no_formula_is_an_error(
    scorer: MathScorer, task: Callable[..., Task], completion: Callable[..., Completion]
) -> None:
    with pytest.raises(TaskError, match="is no formula that math-verify can read"):
        await scorer.reward(task(":("), completion("2"))


async def test_a_killed_process_is_an_error_and_is_replaced(
    scorer: MathScorer, task: Callable[..., Task], completion: Callable[..., Completion]
) -> None:
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    assert scorer.process_id is not None
    os.kill(scorer.process_id, signal.SIGKILL)
    with pytest.raises(TaskError, match="the math process died with exit code -9"):
        await scorer.reward(task("2"), completion("2"))
    assert await scorer.reward(task("2"), completion("3")) == 0.0


async def test_an_endless_computation_is_an_error_and_leaves_no_process(
    task: Callable[..., Task], completion: Callable[..., Completion]
) -> None:
    scorer = MathScorer(MathConfig(timeout_s=2.0))
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    process_id = scorer.process_id
    with pytest.raises(TaskError, match=r"Task set/1: comparing .* took more than 2 s"):
        await scorer.reward(task("2"), completion("$9^{9^{9^{9}}}$"))
    assert process_id is not None and scorer.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


async def test_the_process_ends_with_its_scorer(
    task: Callable[..., Task], completion: Callable[..., Completion]
) -> None:
    scorer = MathScorer(MathConfig())
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    assert scorer.process_id is not None
    process = os.pidfd_open(scorer.process_id)
    del scorer
    gc.collect()
    # The scorer's thread may still hold its last call for a moment.
    ended, _, _ = select.select([process], [], [], 30)
    os.close(process)
    assert ended
