"""genome: evolves a population of LoRA adapters, without gradients.

config.py            what a run is told
founders.py          where the first adapters come from: files, zero, random
checks.py            what is refused before the first question
adapter_builder.py   plans -> adapters; the lineage, from which any ancestor is rebuilt bit for bit
loading.py           adapters on their way into the engine
search_evaluator.py  adapters -> fitness: all together, in one batch, with racing
stages/              the ways to search: random, surrogate, ga, es, cmaes
generation_log.py    what is recorded of each generation, and who is told
final_report.py      choosing on the select split, measuring on the report split, once
parts.py             what a run is made of, put together once
documents.py         what is left behind, and the warnings
loop.py              the loop
"""

from rookery.loops.genome.adapter_builder import rebuild
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.genome.loop import evolve
from rookery.loops.genome.parts import GenomeInputs

__all__ = ["GenomeConfig", "GenomeInputs", "evolve", "rebuild"]
