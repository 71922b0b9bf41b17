"""genome: evolves a population of LoRA adapters, without gradients.

loop.py      the loop and its config
founders.py  where the first adapters come from: files, zero, random, pair merges
nursery.py   plans -> adapters; the lineage, from which any ancestor is rebuilt bit for bit
trials.py    adapters -> fitness: all together, in one batch, with racing
stages/      the ways to search: ga, es, cmaes
finals.py    choosing on the select split, measuring on the report split, once, with baselines
"""

from rookery.loops.genome.loop import GenomeConfig, GenomeResult, evolve
from rookery.loops.genome.nursery import rebuild

__all__ = ["GenomeConfig", "GenomeResult", "evolve", "rebuild"]
