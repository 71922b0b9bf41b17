"""How far a search for the lowest point of a function jumps from the best point so far."""

# EVOLVE-BLOCK-START
REACH = 10.0  # the first jump
SHRINK = 1.0  # every jump is this many times the one before


def jumps(num_calls: int) -> list[float]:
    """The largest jump of each call, from the first to the last."""
    return [REACH * SHRINK**call for call in range(num_calls)]


# EVOLVE-BLOCK-END
