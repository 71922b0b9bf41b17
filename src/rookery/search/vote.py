"""Majority vote over the answers of the best candidates, without looking at the reference.

vote(["7", "12", "12"]) == "12"; vote(["7", "12"]) == "7"
vote(["I get 7", "The answer is 12", "#### 12"], key=last_number) == "The answer is 12"
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

__all__ = ["vote", "vote_tasks"]


def vote(
    answers: Sequence[str | None], *, key: Callable[[str], Hashable | None] | None = None
) -> str | None:
    """The most frequent answer; `answers` come from the best voter to the worst.

    Answers of one `key` are one: it is what the scorer reads of an answer, or the text itself
    without one. The answer that comes back is the best voter's of the elected key. On a tie the key
    whose first voter is best wins. None (no answer, a failed one, or no key in it) does not vote;
    when nobody votes the result is None.
    """
    first: dict[Hashable, str] = {}
    counts: Counter[Hashable] = Counter()
    for answer in answers:
        read = answer if answer is None or key is None else key(answer)
        if answer is not None and read is not None:
            first.setdefault(read, answer)
            counts[read] += 1
    # Counter keeps the order of first appearance and max returns the first of equals.
    elected = max(counts, key=lambda read: counts[read], default=None)
    return None if elected is None else first[elected]


def vote_tasks(
    voters: Sequence[Mapping[str, str | None]],
    *,
    count: int,
    key: Callable[[str, str], Hashable | None] | None = None,
) -> dict[str, str | None]:
    """The vote of the first `count` voters on every task that one of them was asked.

    Each voter maps task id to answer; voters come best first, by a split that is not reported.
    `key(task, answer)` is what the task's scorer reads of an answer.
    """
    panel = voters[:count]
    tasks = dict.fromkeys(task for voter in panel for task in voter)
    return {
        task: vote(
            [voter.get(task) for voter in panel], key=None if key is None else partial(key, task)
        )
        for task in tasks
    }
