"""Search as pure ask and tell: no I/O, no clock, no global random; every state is a value.

fitness     what is compared               orders       orders of items
selection/  who is picked                  candidate    what is planned
children    plans of children              succession   survivors, moves of a swarm
population  the generation                 founders     plans without a population
es, cmaes   update directions              emitters     the same as operators
surrogate   a model proposes               merit        what an answer counts
archive     quality-diversity grid         islands      groups and migration
racing      dropping who cannot win        waves        what a race asks next
pareto      several objectives             statistics   intervals for reports
vote        majority of the best           programs/    program evolution, one by one
"""

__all__: list[str] = []
