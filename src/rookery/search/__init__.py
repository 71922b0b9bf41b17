"""Search as pure ask and tell: no I/O, no clock, no global random; every state is a value.

candidate   records of candidates: fitness, plans
children    selection of parents; plans of children
population  plans without a population; the generation, its survivors
  es          evolution strategies           surrogate    proposals by a model
  merit       what an answer counts, votes
  racing      dropping candidates early      annealing    temperatures, the next tasks of a race
  labelling   labels and orders of items, constraints on labels
  statistics  intervals for reports, tests that may stop early
  programs/   program evolution, one by one
"""

__all__: list[str] = []
