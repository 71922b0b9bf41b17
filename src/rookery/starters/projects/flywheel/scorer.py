"""What an answer earns: yours decides in place of this."""

from rookery.types import Completion, Task


def score(task: Task, completion: Completion) -> float:
    """Half for naming the reference, half for saying more about it: from 0 to 1."""
    is_named = str(task.reference).lower() in completion.text.lower()
    return 0.5 * is_named + 0.5 * min(1.0, len(completion.text.split()) / 16)
