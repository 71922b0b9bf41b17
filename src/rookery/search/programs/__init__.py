"""Search over programs, one child at a time: islands with feature grids, as in OpenEvolve.

program    what is kept of a program           island     members of one group and their draws
database   ask and tell                        ranking    members by score
sampling   parents and inspirations            grid       cells with bounds that move
diversity  distance to reference programs      front      Pareto front, one program at a time
bandit     which model writes the next         novelty    what repeats another program
stopping   when to end early                   window     order of asks and tells by attempt
"""

__all__: list[str] = []
