"""Tuning of a program's numbers without a model (`rookery.tune`).

tuner      a program tuned: its numbers, then those of its tables
constants  the numbers in a program, and a search for better ones
tables     functions written out as the numbers that they return
"""

from rookery.loops.evolve.tuning.constants import (
    TUNE,
    Constant,
    NumberSearch,
    lift_constants,
    write_constants,
)
from rookery.loops.evolve.tuning.tuner import TuneLimit, Variant, tune

__all__ = [
    "TUNE",
    "Constant",
    "NumberSearch",
    "TuneLimit",
    "Variant",
    "lift_constants",
    "tune",
    "write_constants",
]
