"""genome: evolves a population of LoRA adapters, without gradients.

config.py            what a run is told; what is refused before the first question
founders.py          where the first adapters come from: files, zero, random
adapter_builder.py   plans -> adapters; the lineage, from which any ancestor is rebuilt bit for bit
search_evaluator.py  adapters -> engine -> fitness: all together, in one batch, with racing
stages/              the ways to search: random, surrogate, ga, es, cmaes
generation_log.py    what is recorded of each generation, and who is told
final_report.py      choosing on the select split, measuring on the report split, once
documents.py         what a run is made of; what is left behind, and the warnings
loop.py              the loop
"""

from rookery.loops.genome.adapter_builder import rebuild
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.genome.documents import GenomeInputs
from rookery.loops.genome.loop import evolve

__all__ = ["GenomeConfig", "GenomeInputs", "evolve", "rebuild"]
