"""Search over programs, one child at a time.

program    the record of a program              population islands, archive, front; draws of parents
database   ask and tell, as OpenEvolve draws    island     members by score, feature grid
  adaptive   operators that compete for attempts  novelty    detection of repeated programs
  bandit     shares of models and operators in the attempts
"""

__all__: list[str] = []
