"""Search as pure ask and tell: no I/O, no clock, no global random; every state is a value.

fitness     what is compared               candidate    what is planned
selection   who is picked                  founders     plans without a population
children    plans of children              population   the generation, its survivors
es          update directions              surrogate    a model proposes
merit       what an answer counts, votes
racing      dropping who cannot win        annealing    temperatures, what a race asks next
labelling   labels and orders of items     constraints  what labels must keep
sequential  tests that may stop early      statistics   intervals for reports
programs/   program evolution, one by one
"""

__all__: list[str] = []
