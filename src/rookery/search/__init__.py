"""Search as pure ask and tell: no I/O, no clock, no global random; every state is a value.

fitness     what is compared               orders       orders of items
selection/  who is picked                  candidate    what is planned
children    plans of children              succession   survivors, moves of a swarm
population  the generation                 founders     plans without a population
es, cmaes   update directions              islands      groups and migration
archive     quality-diversity grid         pareto       several objectives
racing      dropping who cannot win        statistics   intervals for reports
vote        majority of the best           state        saving and reloading
"""

__all__: list[str] = []
