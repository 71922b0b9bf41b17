"""Puts 26 circles into the unit square: one in the middle, two rings around it."""

import numpy as np

NUM_CIRCLES = 26


# EVOLVE-BLOCK-START
def place_centers() -> np.ndarray:
    """Where the circles are: a middle, a ring of 8 and a ring of 17, cut off at the square."""
    centers = [(0.5, 0.5)]
    for count, distance in ((8, 0.3), (17, 0.7)):
        for i in range(count):
            angle = 2 * np.pi * i / count
            centers.append((0.5 + distance * np.cos(angle), 0.5 + distance * np.sin(angle)))
    return np.clip(np.array(centers), 0.01, 0.99)


def largest_radii(centers: np.ndarray) -> np.ndarray:
    """Radii that reach the walls, then shrunk in pairs until none overlaps another."""
    radii = np.minimum(centers, 1 - centers).min(axis=1)
    for i in range(len(centers)):
        for j in range(i + 1, len(centers)):
            distance = np.linalg.norm(centers[i] - centers[j])
            if radii[i] + radii[j] > distance:
                shrink = distance / (radii[i] + radii[j])
                radii[i] *= shrink
                radii[j] *= shrink
    return 0.9999999 * radii


def pack() -> list[tuple[float, float, float]]:
    """x, y and radius of each circle. None overlaps another or leaves the square."""
    centers = place_centers()
    return [(x, y, r) for (x, y), r in zip(centers, largest_radii(centers), strict=True)]


# EVOLVE-BLOCK-END
