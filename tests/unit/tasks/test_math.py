import asyncio
import gc

import pytest

from rookery.errors import TaskError
from rookery.tasks.scorers import MathConfig, build_scorer

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
def scorer():
    """One for all tests: its process takes most of a second to start."""
    return build_scorer(MathConfig())


async def test_math_compares_by_value_and_many_at_once(scorer, task, completion):
    rewards = await asyncio.gather(
        *(scorer.reward(task(reference), completion(text)) for reference, text, _ in CASES)
    )
    assert rewards == [reward for _, _, reward in CASES]


async def test_a_reference_that_is_no_formula_is_an_error(scorer, task, completion):
    with pytest.raises(TaskError, match="is no formula that math-verify can read"):
        await scorer.reward(task(":("), completion("2"))


async def test_a_killed_process_is_an_error_and_is_replaced(scorer, task, completion):
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    scorer._worker._process.kill()
    with pytest.raises(TaskError, match="the math process died with exit code -9"):
        await scorer.reward(task("2"), completion("2"))
    assert await scorer.reward(task("2"), completion("3")) == 0.0


async def test_an_endless_computation_is_an_error_and_leaves_no_process(task, completion):
    scorer = build_scorer(MathConfig(timeout_s=0.3))
    process = scorer._worker._start()
    with pytest.raises(TaskError, match=r"Task set/1: comparing .* took more than 0\.3 s"):
        await scorer.reward(task("2"), completion("$9^{9^{9^{9}}}$"))
    assert process.returncode == -9
    assert scorer._worker._process is None


async def test_the_process_ends_with_its_scorer():
    scorer = build_scorer(MathConfig())
    process = scorer._worker._start()
    assert process.poll() is None
    del scorer
    gc.collect()
    assert process.returncode == -9
