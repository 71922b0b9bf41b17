"""Checkpoints in OpenEvolve's format.

checkpoint.py    the population at one iteration
program_file.py  one program as a document
writing.py       folders that OpenEvolve reads
reading.py       folders of OpenEvolve or our own
"""

from rookery.loops.evolve.checkpoints.checkpoint import Checkpoint, FeatureRange
from rookery.loops.evolve.checkpoints.reading import list_checkpoints, read_checkpoint
from rookery.loops.evolve.checkpoints.writing import WriteOptions, fill_best, fill_checkpoint

__all__ = [
    "Checkpoint",
    "FeatureRange",
    "WriteOptions",
    "fill_best",
    "fill_checkpoint",
    "list_checkpoints",
    "read_checkpoint",
]
