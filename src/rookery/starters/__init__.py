"""Demo and project files that are installed with the package, so that a first run needs no clone.

    rookery.run_genome(DEMOS / "genome.yaml", seed=0)    # the run of `rookery demo`

demos/             configs of `rookery demo`, with their data and adapters
projects/          templates of `rookery new`, one folder per kind
addition.py        the tiny model that `rookery demo grpo` trains
number_changer.py  the proposer of programs in `rookery demo evolve`
"""

from pathlib import Path

__all__ = ["DEMOS", "PROJECTS"]

DEMOS = Path(__file__).parent / "demos"
"""Configs of `rookery demo`, with their data and adapters."""
PROJECTS = Path(__file__).parent / "projects"
"""One folder per project kind of `rookery new`, and `shared` for files of several kinds."""
