"""Puts 26 circles into the unit square: one in the middle, two rings around it."""

import math

NUM_CIRCLES = 26


# EVOLVE-BLOCK-START
def place_centers() -> list[tuple[float, float]]:
    """Where the circles are: a middle, a ring of 8 and a ring of 17, kept inside of the square."""
    centers = [(0.5, 0.5)]
    for count, distance in ((8, 0.3), (17, 0.7)):
        for i in range(count):
            angle = 2 * math.pi * i / count
            centers.append((0.5 + distance * math.cos(angle), 0.5 + distance * math.sin(angle)))
    return [(min(0.99, max(0.01, x)), min(0.99, max(0.01, y))) for x, y in centers]


def largest_radii(centers: list[tuple[float, float]]) -> list[float]:
    """Radii that reach the walls, then shrunk in pairs until none overlaps another."""
    radii = [min(x, y, 1 - x, 1 - y) for x, y in centers]
    for i in range(len(centers)):
        for j in range(i + 1, len(centers)):
            distance = math.dist(centers[i], centers[j])
            if radii[i] + radii[j] > distance:
                shrink = distance / (radii[i] + radii[j])
                radii[i] *= shrink
                radii[j] *= shrink
    return [0.9999999 * radius for radius in radii]


def pack() -> list[tuple[float, float, float]]:
    """x, y and radius of each circle. None overlaps another or leaves the square."""
    centers = place_centers()
    return [(x, y, r) for (x, y), r in zip(centers, largest_radii(centers), strict=True)]


# EVOLVE-BLOCK-END
