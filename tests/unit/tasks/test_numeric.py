import asyncio
import gc
import os
import select
import signal
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks.drawn import completion, task

from rookery.errors import TaskError
from rookery.tasks.scorers import MathConfig, NumericConfig, build_scorer
from rookery.tasks.scorers.numeric import MathScorer, find_answer
from rookery.types import Json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", 72),
        ("48/2 = <<48/2=24>>24 and 48+24 = 72.\n#### 72", 72),
        ("#### 5\nThat took 3 steps.", 5),
        ("#### 5\n#### 6", 6),
        ("####\n**7**", 7),
        ("#### $1,234.50.", Fraction(2469, 2)),
        ("#### -3 and 9", -3),
        ("#### \\(8\\)", 8),
        ("#### Step 1: think\nso it is 33", 33),
        ("##### 5 is a heading, 6", 6),
        ("12 apples ####", 12),
        ("The answer is 42.", 42),
        ("$1,000", 1000),
        ("1,000.00", 1000),
        ("1,000,000", 1_000_000),
        ("1{,}000", 1000),
        ("1\u202f000", 1000),
        ("-$5", -5),
        ("$-5", -5),
        ("US$5", 5),
        ("\\$5", 5),
        ("€ 5", 5),
        ("-3", -3),
        ("\u22123", -3),
        ("(-3)", -3),
        ("x=-3", -3),
        ("f(3)-5", 5),
        ("10-12", 12),
        ("- 3 apples", 3),
        ("50%", 50),
        ("72kg", 72),
        ("5 m^2", 5),
        ("H2O", None),
        ("x2", None),
        ("\u517172\u4e2a", 72),
        ("1/2", Fraction(1, 2)),
        ("1/2.", Fraction(1, 2)),
        ("3 / 4", Fraction(3, 4)),
        ("-1/2", Fraction(-1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("1,000 1/2", Fraction(2001, 2)),
        ("Step 3 12/4", 3),
        ("1½", Fraction(3, 2)),
        ("-½", Fraction(-1, 2)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("5/12/2024", 2024),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1e3", 1000),
        ("1.5E-2", Fraction(3, 200)),
        ("5eggs", 5),
        ("1.5.2", Fraction(3, 2)),
        ("3, 4, 5", 5),
        ("\\boxed{-7}", -7),
        ("007", 7),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("1/" + "9" * 5000, None),
        ("", None),
        ("no number", None),
        ("٣", None),
        ("####", None),
        ("-", None),
    ],
)
def test_find_answer(text: str, value: Fraction | int | None) -> None:
    assert find_answer(text) == value


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    value = find_answer(text)
    assert value is None or isinstance(value, Fraction)


@given(st.fractions(max_denominator=10**6), st.text(alphabet="abc \n.,;#"))
def test_the_last_number_is_found_whatever_is_said_before(value: Fraction, before: str) -> None:
    text = f"{value.numerator}/{value.denominator}"
    assert find_answer(f"{before} so it is {text}") == value


@given(st.decimals(-(10**9), 10**9, places=4))
def test_decimals_are_read_exactly(value: Decimal) -> None:
    assert find_answer(f"= {value:,f}") == Fraction(value)


@pytest.mark.parametrize(
    ("config", "reference", "text", "reward"),
    [
        ({}, 1000, "$1,000.00", 1),
        ({}, "#### 72", "72", 1),
        ({}, 0.1, "1/10", 1),
        ({}, 0.5, "50%", 0),
        ({}, "50%", "50", 1),
        ({}, 72, "72.0000001", 0),
        ({}, 72, "seventy-two", 0),
        ({}, 72, "", 0),
        ({}, 72, "1/0", 0),
        ({}, [72, 73], "73", 1),
        ({}, 10**30, f"{10**30:,}", 1),
        ({}, 10**30, str(10**30 + 1), 0),
        ({"abs_tolerance": 0.1}, 1, "1.1", 1),
        ({"abs_tolerance": 0.1}, 1, "1.1000001", 0),
        ({"rel_tolerance": 0.01}, 200, "198", 1),
        ({"rel_tolerance": 0.01}, 200, "197.99", 0),
        ({"rel_tolerance": 0.01}, -200, "-202", 1),
        ({"rel_tolerance": 0.01, "abs_tolerance": 5.0}, 200, "205", 1),
    ],
)
async def test_numeric(config: dict[str, Any], reference: Json, text: str, reward: float) -> None:
    scorer = build_scorer(NumericConfig(**config))
    assert await scorer.reward(task(reference), completion(text)) == reward


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


async def test_math_compares_by_value_and_many_at_once(scorer: MathScorer) -> None:
    rewards = await asyncio.gather(
        *(scorer.reward(task(reference), completion(text)) for reference, text, _ in CASES)
    )
    assert rewards == [reward for _, _, reward in CASES]


async def test_a_reference_that_is_no_formula_is_an_error(scorer: MathScorer) -> None:
    with pytest.raises(TaskError, match="is no formula that math-verify can read"):
        await scorer.reward(task(":("), completion("2"))


async def test_a_killed_process_is_an_error_and_is_replaced(scorer: MathScorer) -> None:
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    assert scorer.process_id is not None
    os.kill(scorer.process_id, signal.SIGKILL)
    with pytest.raises(TaskError, match="the math process died with exit code -9"):
        await scorer.reward(task("2"), completion("2"))
    assert await scorer.reward(task("2"), completion("3")) == 0.0


async def test_an_endless_computation_is_an_error_and_leaves_no_process() -> None:
    scorer = MathScorer(MathConfig(timeout_s=2.0))
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    process_id = scorer.process_id
    with pytest.raises(TaskError, match=r"Task set/1: comparing .* took more than 2 s"):
        await scorer.reward(task("2"), completion("$9^{9^{9^{9}}}$"))
    assert process_id is not None and scorer.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert await scorer.reward(task("2"), completion("2")) == 1.0
    assert scorer.process_id is not None, "another one, which ends with its scorer"
    process = os.pidfd_open(scorer.process_id)
    del scorer
    gc.collect()
    # The scorer's thread may still hold its last call for a moment.
    ended, _, _ = select.select([process], [], [], 30)
    os.close(process)
    assert ended
