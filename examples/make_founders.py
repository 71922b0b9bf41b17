"""Make the founders of the demo: one small adapter per labelling task, by supervised training.

Hardware: 2 CPU cores, about 10 minutes. Each adapter (rank 8, attention of the last 4 layers of
SmolLM2, 0.5 MB) learns one task's own meaning of two labels from the task's search
split. The same command gives the same files, byte for byte on the same versions of torch.

    python examples/make_founders.py
"""

import subprocess
import sys
from pathlib import Path

TASKS = ("mark-kind", "mark-language", "mark-living")
SETTINGS = ["--layers", "4", "--rank", "8", "--steps", "80", "--learning-rate", "0.002"]
FOUNDERS = Path(__file__).parent / "founders"


def main() -> None:
    for task in TASKS:
        command = [sys.executable, "-m", "rookery", "sft", "smollm2", f"generated:{task}"]
        subprocess.run([*command, str(FOUNDERS / task), *SETTINGS], check=True)


if __name__ == "__main__":
    main()
