"""Search over programs, one child at a time.

program    what is kept of a program           population islands, archive, front; who is drawn
database   ask and tell, as OpenEvolve draws   island     members by score, feature grid
adaptive   operators that compete for attempts novelty    what repeats another program
bandit     which model writes the next, which operator gets the next attempt
stopping   when to end early
"""

__all__: list[str] = []
