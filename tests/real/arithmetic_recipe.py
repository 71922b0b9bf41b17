"""Run by a Python that has the tinker cookbook: its arithmetic recipe, as it is.

python arithmetic_recipe.py plain|shuffled OPTION=VALUE ...

`shuffled` deals the advantages of a batch out anew, so that they tell nothing of the answers.
"""

import random
import runpy
import sys
from typing import Any

import torch
from tinker_cookbook.rl import train

compute_advantages = train.compute_advantages


def shuffled_advantages(groups: Any) -> Any:
    """The same numbers, each with an answer of another problem or of its own at random."""
    rows = compute_advantages(groups)
    values = [value for row in rows for value in row.tolist()]
    random.Random(len(values)).shuffle(values)
    dealt = iter(values)
    return [torch.tensor([next(dealt) for _ in row.tolist()]) for row in rows]


if __name__ == "__main__":
    if sys.argv.pop(1) == "shuffled":
        train.compute_advantages = shuffled_advantages
    runpy.run_module("tinker_cookbook.recipes.math_rl.train", run_name="__main__", alter_sys=True)
