"""A labelling: one label index per item, in item order, `UNLABELLED` where there is none yet.

labels = (0, UNLABELLED, 1)      # of three items, the first has label 0, the third label 1
"""

__all__ = ["UNLABELLED", "Labels", "labelled_items", "relabel"]

Labels = tuple[int, ...]

UNLABELLED = -1


def labelled_items(labels: Labels) -> tuple[int, ...]:
    """The items that have a label, in item order."""
    return tuple(item for item, label in enumerate(labels) if label != UNLABELLED)


def relabel(labels: Labels, item: int, label: int) -> Labels:
    """The same labelling with one label changed: relabel((0, 1), 1, 0) is (0, 0)."""
    return (*labels[:item], label, *labels[item + 1 :])
