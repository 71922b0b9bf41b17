"""Puts 26 circles into the unit square: one in the middle, two rings around it."""

import math

NUM_CIRCLES = 26


# EVOLVE-BLOCK-START
def centers() -> list[tuple[float, float]]:
    """Where the circles are: a middle, a ring of 8 and a ring of 17."""
    points = [(0.5, 0.5)]
    for count, distance in ((8, 0.15), (17, 0.3)):
        for i in range(count):
            angle = 2 * math.pi * i / count
            points.append((0.5 + distance * math.cos(angle), 0.5 + distance * math.sin(angle)))
    return points


def pack() -> list[tuple[float, float, float]]:
    """x, y and radius of each circle. None overlaps another or leaves the square."""
    points = centers()
    circles = []
    for i, (x, y) in enumerate(points):
        gap = min(math.dist((x, y), other) for j, other in enumerate(points) if j != i)
        circles.append((x, y, 0.999 * min(x, y, 1 - x, 1 - y, gap / 2)))
    return circles


# EVOLVE-BLOCK-END
