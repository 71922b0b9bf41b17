"""Label reviews without labels with the library call.

Hardware: 2 CPU cores, under 10 minutes. Expect all 16 labels right.

    python examples/icm.py
"""

import rookery
from rookery.starters import DEMOS

if __name__ == "__main__":
    outcome = rookery.run_icm(DEMOS / "icm.yaml")
    for row in outcome.report.rows:
        print(f"{row.name:<18} {row.num_labelled:>3} labelled, true {row.accuracy:.2f}")
    print(f"{outcome.report.verdict}: {outcome.path / 'labels.jsonl'}")
