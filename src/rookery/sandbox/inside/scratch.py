"""Removes what a candidate wrote, whatever it wrote. Used inside the jail and outside of it."""

import itertools
import os

__all__ = ["empty_folder"]


def empty_folder(folder: str) -> None:
    """Remove all that is in a folder, also what was locked, however deep it is nested.

    A folder inside is moved up before it is emptied: no path is longer than two names below
    `folder`, and nothing recurses. Links are removed, not followed.
    """
    os.chmod(folder, 0o700)
    names = map(str, itertools.count())
    waiting = [os.path.join(folder, name) for name in _remove_files(folder)]
    while waiting:
        place = waiting.pop()
        for name in _remove_files(place):
            free = next(p for n in names if not os.path.lexists(p := os.path.join(folder, n)))
            os.rename(os.path.join(place, name), free)
            waiting.append(free)
        os.rmdir(place)


def _remove_files(folder: str) -> list[str]:
    """The names of the folders that are left, which can now be moved and read."""
    left = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            left.append(name)
        else:
            os.unlink(path)
    return left
