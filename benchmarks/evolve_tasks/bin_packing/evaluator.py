"""Scores a packing of items into bins: lower bound on the bins over the bins used."""

import math
import random
import runpy
from collections import Counter

NUM_INSTANCES = 20
NUM_ITEMS = 60
CAPACITY = 100


def evaluate(program_path: str) -> dict[str, float]:
    pack = runpy.run_path(program_path)["pack"]
    shares = []
    for number in range(NUM_INSTANCES):
        rng = random.Random(number)
        sizes = [rng.randint(10, 70) for _ in range(NUM_ITEMS)]
        bins = [list(items) for items in pack(list(sizes), CAPACITY) if len(items)]
        if Counter(size for items in bins for size in items) != Counter(sizes):
            raise ValueError("the bins hold other items than were given")
        if max(map(sum, bins)) > CAPACITY:
            raise ValueError("a bin holds more than its capacity")
        shares.append(math.ceil(sum(sizes) / CAPACITY) / len(bins))
    return {"combined_score": sum(shares) / len(shares)}
