"""genome: evolution of a population of LoRA adapters, without gradients.

config.py            the config of a run, and its checks before the first request
founders.py          the first adapters: from files, zero or random
adapter_builder.py   plans -> adapters; the lineage, from which any ancestor is rebuilt bit for bit
search_evaluator.py  adapters -> engine -> fitness: all together, in one batch, with racing
stages/              the ways to search: random, surrogate, ga, es, cmaes
generation_log.py    the record of each generation, for the run and the observer
final_report.py      choosing on the select split, measuring on the report split, once
documents.py         the parts of a run; the files it leaves, and the warnings
loop.py              the loop
"""

from rookery.loops.genome.adapter_builder import rebuild
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.genome.documents import GenomeInputs
from rookery.loops.genome.loop import evolve

__all__ = ["GenomeConfig", "GenomeInputs", "evolve", "rebuild"]
