"""Majority vote over the answers of the best candidates, without looking at the reference.

vote(["7", "12", "12"]) == "12"; vote(["7", "12"]) == "7"
"""

from collections import Counter
from collections.abc import Sequence

__all__ = ["vote"]


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; `answers` come from the best voter to the worst.

    An answer is what the scorer reads of a text: texts that it reads alike vote together. On a tie
    the answer whose first voter is best wins. None (no answer, or a failed one) does not vote;
    when nobody votes the result is None.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    # Counter keeps the order of first appearance and max returns the first of equals.
    return max(counts, key=lambda answer: counts[answer], default=None)
