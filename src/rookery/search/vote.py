"""Majority vote over the answers of the best candidates, without looking at the reference.

vote(["7", "12", "12"]) == "12"; vote(["7", "12"]) == "7"
"""

from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["vote", "vote_tasks"]


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; `answers` come from the best voter to the worst.

    On a tie the answer whose first voter is best wins. None (no answer, or a failed one) does not
    vote; when nobody votes the result is None.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    # Counter keeps the order of first appearance and max returns the first of equals.
    return max(counts, key=lambda answer: counts[answer], default=None)


def vote_tasks(voters: Sequence[Mapping[str, str | None]], *, count: int) -> dict[str, str | None]:
    """The vote of the first `count` voters on every task that one of them was asked.

    Each voter maps task id to answer; voters come best first, by a split that is not reported.
    """
    panel = voters[:count]
    tasks = dict.fromkeys(task for voter in panel for task in voter)
    return {task: vote([voter.get(task) for voter in panel]) for task in tasks}
