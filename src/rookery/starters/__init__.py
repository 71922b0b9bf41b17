"""Files that are installed with the package, so that a first run needs no clone.

    rookery.run_genome(DEMOS / "genome.yaml", seed=0)    # what `rookery demo` runs

demos/             configs of `rookery demo`, with the data and the adapters they name
projects/          what `rookery new` writes, a folder for each kind
addition.py        the tiny model that `rookery demo grpo` trains
number_changer.py  what proposes programs in `rookery demo evolve`
"""

from pathlib import Path

__all__ = ["DEMOS", "PROJECTS"]

DEMOS = Path(__file__).parent / "demos"
"""The configs of `rookery demo`, with the data and the adapters they name."""
PROJECTS = Path(__file__).parent / "projects"
"""A folder for each kind of project of `rookery new`, and `shared` for files of several."""
