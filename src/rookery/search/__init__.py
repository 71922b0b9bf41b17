"""Search as pure ask and tell: no I/O, no clock, no global random; every state is a value.

candidate   what is compared; what was measured, what is planned
children    who is picked; plans of children
population  plans without a population; the generation, its survivors
es          update directions              surrogate    a model proposes
merit       what an answer counts, votes
racing      dropping who cannot win        annealing    temperatures, what a race asks next
labelling   labels and orders of items, what labels must keep
statistics  intervals for reports, tests that may stop early
programs/   program evolution, one by one
"""

__all__: list[str] = []
