"""26 circles in the unit square, checked with zero tolerance, beside published sums of radii.

    python benchmarks/circle_packing.py openevolve_output/best/best_program.py
    python benchmarks/circle_packing.py circles.json        # a list of [x, y, radius]
    python benchmarks/circle_packing.py --slsqp-s 240       # an optimizer without a model

The check computes with exact rationals: any overlap fails. A program has a function `pack()` and
runs in the sandbox. `--slsqp-s` runs SLSQP from random starts for that many seconds (needs scipy);
its result is shrunk until it passes the same check.
"""

import argparse
import asyncio
import importlib.util
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rookery.errors import SandboxError
from rookery.sandbox import EvaluatorConfig, SandboxConfig, open_sandbox
from rookery.sandbox.inside.contract import provide_openevolve

TASK = Path(__file__).parent / "evolve_tasks" / "circle_packing"
PUBLISHED = {
    "AlphaEvolve": 2.63586,
    "ShinkaEvolve, about 150 evaluations": 2.63598,
    "GEPA, about 114 evaluations": 2.63598,
    "SLSQP multistart, 484 starts": 2.63006,
}
"""Sums of radii as published, not measured here. The last needs no model."""
MOST_ROUNDING = 1e-6
Circle = tuple[float, float, float]


def load_check() -> ModuleType:
    """Load the task's own check. It needs no `openevolve` module, which only the sandbox has."""
    provide_openevolve()
    spec = importlib.util.spec_from_file_location("circle_packing_task", TASK / "evaluator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def run_program(text: str) -> list[Circle]:
    """Run a program in the sandbox and return its circles."""
    evaluator = EvaluatorConfig(file=TASK / "evaluator.py", timeout_s=600)
    async with open_sandbox(SandboxConfig(), evaluator) as sandbox:
        outcome = await sandbox.evaluate(text)
    if outcome.failure is not None:
        raise SystemExit(f"The program gives no packing: {outcome.failure.reason}")
    circles: list[Circle] = json.loads(str(outcome.artifacts["circles"]))
    return circles


def shrink(circles: Sequence[Circle], check: ModuleType) -> list[Circle]:
    """Shrink the radii just enough to be valid. Empty if rounding alone does not explain the
    overlap, because then the start did not converge."""
    step = 1e-15
    while step < MOST_ROUNDING:
        smaller: list[Circle] = [(x, y, r - step) for x, y, r in circles]
        if not check.find_violation(smaller):
            return smaller
        step *= 2
    return []


def slsqp_start(rng: random.Random, count: int) -> list[Circle]:
    """One local optimum from random centers."""
    import numpy as np
    from scipy.optimize import minimize

    i, j = np.triu_indices(count, 1)
    rows = np.arange(len(i))

    def slack(v: "np.ndarray") -> "np.ndarray":
        x, y, r = v.reshape(3, count)
        apart = (x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2 - (r[i] + r[j]) ** 2
        return np.concatenate([apart, x - r, y - r, 1 - x - r, 1 - y - r])

    def slope(v: "np.ndarray") -> "np.ndarray":
        x, y, r = v.reshape(3, count)
        apart = np.zeros((len(i), 3, count))
        for axis, values, sign in ((0, x, -1.0), (1, y, -1.0), (2, r, 1.0)):
            change = values[i] + sign * values[j]
            factor = -2.0 if axis == 2 else 2.0
            apart[rows, axis, i] = factor * change
            apart[rows, axis, j] = factor * sign * change
        one, none = np.eye(count), np.zeros((count, count))
        walls = [[one, none], [none, one], [-one, none], [none, -one]]
        square = np.block([[*pair, -one] for pair in walls])
        return np.concatenate([apart.reshape(len(i), -1), square])

    places = [rng.random() for _ in range(2 * count)]
    found = minimize(
        lambda v: -v[2 * count :].sum(),
        np.array([*places, *[0.05] * count]),
        jac=lambda _: np.repeat([0.0, 0.0, -1.0], count),
        bounds=[(0, 1)] * (2 * count) + [(1e-4, 0.5)] * count,
        constraints={"type": "ineq", "fun": slack, "jac": slope},
        method="SLSQP",
        options={"maxiter": 300},
    )
    return [(x, y, r) for x, y, r in found.x.reshape(3, count).T.tolist()]


def multistart(seconds: float, check: ModuleType) -> tuple[float, int]:
    """Best sum of radii over random starts, and the number of starts."""
    rng, end = random.Random(0), time.monotonic() + seconds
    best, num_starts = 0.0, 0
    while time.monotonic() < end:
        num_starts += 1
        circles = slsqp_start(rng, check.NUM_CIRCLES)
        if sum(r for _, _, r in circles) > best:
            best = max(best, sum(r for _, _, r in shrink(circles, check)))
    return best, num_starts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packing", type=Path, nargs="?", help="a program, or circles as JSON")
    parser.add_argument("--slsqp-s", type=float, default=0.0, help="seconds for SLSQP")
    options = parser.parse_args()
    check = load_check()
    rows = [(total, name) for name, total in PUBLISHED.items()]
    if options.packing is not None:
        text = options.packing.read_text(encoding="utf-8")
        is_json = options.packing.suffix == ".json"
        circles = check.read_circles(
            json.loads(text) if is_json else asyncio.run(run_program(text))
        )
        if violation := check.find_violation(circles):
            raise SystemExit(f"{options.packing} is no packing: {violation}.")
        rows.append((sum(r for _, _, r in circles), f"{options.packing}, valid exactly"))
    if options.slsqp_s and importlib.util.find_spec("scipy") is None:
        print("scipy is not installed: SLSQP is not measured", file=sys.stderr)
    elif options.slsqp_s:
        best, num_starts = multistart(options.slsqp_s, check)
        rows.append((best, f"SLSQP here, {num_starts} starts, valid exactly"))
    for total, name in sorted(rows, reverse=True):
        print(f"{total:.8f}  {name}")


if __name__ == "__main__":
    try:
        main()
    except SandboxError as error:
        raise SystemExit(str(error)) from error
