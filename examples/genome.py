"""Evolve adapters with the library call: the demo's job.

Hardware: 2 CPU cores, about 4 minutes. Expect the evolved adapter well above the best founder.

    python examples/genome.py
"""

import rookery
from rookery.starters import DEMOS

if __name__ == "__main__":
    outcome = rookery.run_genome(DEMOS / "genome.yaml", seed=0)
    for row in outcome.report.rows:
        print(f"{row.name:<20} {row.mean:.3f} ({row.low:.3f} to {row.high:.3f})")
    print(outcome.path / "winner")
