"""Scores a search: how low it gets on a function with many dips, in 200 calls."""

import math
import runpy


def bumpy(x: float, y: float) -> float:
    return 0.1 * (x * x + y * y) - 2 * math.cos(2 * x) - math.cos(3 * y) - 0.3 * math.sin(5 * x)


def evaluate(program_path: str) -> dict[str, float]:
    search = runpy.run_path(program_path)["search"]
    calls = 0

    def counted(x: float, y: float) -> float:
        nonlocal calls
        calls += 1
        if calls > 200:
            raise ValueError("more than 200 calls")
        return bumpy(x, y)

    x, y = search(counted)
    value = bumpy(float(x), float(y))
    return {"combined_score": -value, "value": value, "calls": float(calls)}
