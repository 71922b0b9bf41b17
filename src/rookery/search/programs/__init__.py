"""Search over programs, one child at a time.

program    what is kept of a program           adaptive   operators that compete for attempts
database   ask and tell, as OpenEvolve draws;  operators  what each operator gets and won
           order of asks and tells by attempt  bandit     which model writes the next
population islands, archive and front          sampling   parents and inspirations
island     members of a group, feature grid    novelty    what repeats another program
ranking    members by score, Pareto front      stopping   when to end early
"""

__all__: list[str] = []
