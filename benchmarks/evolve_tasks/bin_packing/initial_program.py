"""Puts items into bins: a new bin whenever the next item does not fit the last one."""


# EVOLVE-BLOCK-START
def pack(sizes: list[float], capacity: float) -> list[list[float]]:
    """Bins of items; the sum of a bin is at most `capacity`. Fewer bins are better."""
    bins: list[list[float]] = [[]]
    for size in sizes:
        if sum(bins[-1]) + size > capacity:
            bins.append([])
        bins[-1].append(size)
    return bins


# EVOLVE-BLOCK-END
