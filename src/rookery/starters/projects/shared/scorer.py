"""The reward of an answer. Replace it by your own."""

from rookery.types import Completion, Task


def score(task: Task, completion: Completion) -> float:
    """Return a reward from 0 to 1: half for naming the reference, half for a short answer."""
    words = completion.text.split()
    is_named = str(task.reference).lower() in completion.text.lower()
    return 0.5 * is_named + 0.5 / max(1, len(words))
