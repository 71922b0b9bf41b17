"""Train a policy from a reward with the library call: a tiny model learns to add.

Hardware: 1 CPU core, about two minutes. Expect about 0.56 before and about 0.87 after. The model is
made the first time, half trained, in examples/addition.

    python examples/grpo.py
"""

from pathlib import Path

import rookery
from rookery.starters.addition import make_addition

FOLDER = Path(__file__).parent / "addition"

if __name__ == "__main__":
    if not FOLDER.exists():
        make_addition(FOLDER)
    outcome = rookery.run_grpo(FOLDER / "grpo.yaml", seed=0)
    for row in outcome.report.rows:
        print(f"{row.name:<12} {row.mean:.3f} ({row.low:.3f} to {row.high:.3f})")
    print(outcome.path / "trained")
