"""Cost of an evaluation: warm (a fork) beside cold (a new jail), with numpy. A minute, no GPU.

    python benchmarks/sandbox.py [--backend bubblewrap]

The evaluator imports numpy and sums a few numbers, so the time is the sandbox's. Cold opens one
sandbox per evaluation, warm one for all. The output has medians and the ratio of cold to warm.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from rookery.sandbox import EvaluatorConfig, Sandbox, SandboxConfig, choose_backend, probe

EVALUATOR = """
import numpy as np

def evaluate(path):
    return {"combined_score": float(np.arange(float(open(path).read())).sum())}
"""
NUM_COLD, NUM_WARM = 10, 100


async def measure(config: SandboxConfig, evaluator: EvaluatorConfig) -> tuple[float, float]:
    """Median seconds of a cold and of a warm evaluation."""
    cold, warm = [], []
    for _ in range(NUM_COLD):
        start = time.perf_counter()
        async with Sandbox(config, evaluator) as sandbox:
            await check(sandbox)
            cold.append(time.perf_counter() - start)
    async with Sandbox(config, evaluator) as sandbox:
        for _ in range(NUM_WARM):
            start = time.perf_counter()
            await check(sandbox)
            warm.append(time.perf_counter() - start)
    return statistics.median(cold), statistics.median(warm)


async def check(sandbox: Sandbox) -> None:
    outcome = await sandbox.evaluate("5")
    if outcome.failure is not None or outcome.metrics != {"combined_score": 10.0}:
        raise SystemExit(f"wrong outcome: {outcome}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("bubblewrap", "sandlock", "unsafe"))
    named = parser.parse_args().backend
    names = [named] if named else [each.backend for each in await probe() if each.works]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "evaluator.py"
        file.write_text(EVALUATOR)
        for name in names:
            config = await choose_backend(SandboxConfig(backend=name))
            cold, warm = await measure(config, EvaluatorConfig(file=file))
            print(
                f"{name:<11} cold {1e3 * cold:7.1f} ms   warm {1e3 * warm:6.1f} ms   "
                f"ratio {cold / warm:5.1f}"
            )


if __name__ == "__main__":
    asyncio.run(main())
