"""What an answer earns: yours decides in place of this."""

from rookery.types import Completion, Task


def score(task: Task, completion: Completion) -> float:
    """Half for naming the reference, half for saying little else: from 0 to 1."""
    words = completion.text.split()
    is_named = str(task.reference).lower() in completion.text.lower()
    return 0.5 * is_named + 0.5 / max(1, len(words))
