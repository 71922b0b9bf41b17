"""What every scorer's config shares: a check of one task, made when the taskset is read.

A subclass says in `complaint` what it needs of a task, so that a bad reference stops the run at
its line of the file and not in the middle of a search.
"""

from rookery.config import Config
from rookery.errors import TaskError
from rookery.types import Json, Task

__all__ = ["ScorerOptions", "reference_texts", "require_judgeable"]


class ScorerOptions(Config):
    """The parent of the scorer configs."""

    def complaint(self, task: Task) -> str:  # noqa: ARG002 (most scorers need something of it)
        """Why no completion of this task can ever be judged; "" when it can."""
        return ""


def require_judgeable(config: ScorerOptions, task: Task) -> None:
    """Raise the complaint about a task that did not come through `load_taskset`."""
    complaint = config.complaint(task)
    if complaint:
        raise TaskError(f"Task {task.id}: {complaint}")


def reference_texts(reference: Json) -> tuple[str, ...]:
    """The texts a reference accepts: itself, or each of a list. Objects and null accept none.

    "4" -> ("4",); 4 -> ("4",); true -> ("true", "True"); ["4", "four"] -> ("4", "four")
    """
    if isinstance(reference, str):
        return (reference,)
    if isinstance(reference, bool):
        return (str(reference).lower(), str(reference))
    if isinstance(reference, int | float):
        return (str(reference),)
    if isinstance(reference, list):
        return tuple(text for item in reference for text in reference_texts(item))
    return ()
