"""Make the founders of the demo: one small adapter per labelling task, by supervised training.

Hardware: 2 CPU cores, about 5 minutes. Each adapter (rank 8, values and outputs of the attention of
the last 4 layers of SmolLM2) learns one task's own meaning of two labels from the task's search
split. Each has its own seed, so that adapters read different directions of their input and
interfere less. On one version of torch, the command always writes the same bytes.

    python benchmarks/demo_founders.py
"""

import subprocess
import sys

from rookery.starters import DEMOS

TASKS = ("mark-kind", "mark-language", "mark-living")
SETTINGS = ["--layers", "4", "--rank", "8", "--steps", "80", "--learning-rate", "0.002"]
TARGETS = ["--targets", "[v_proj, o_proj]"]
FOUNDERS = DEMOS / "founders"


def main() -> None:
    for seed, task in enumerate(TASKS):
        command = [sys.executable, "-m", "rookery", "sft", "smollm2", f"generated:{task}"]
        settings = [*SETTINGS, *TARGETS, "--seed", str(seed)]
        subprocess.run([*command, str(FOUNDERS / task), *settings], check=True)


if __name__ == "__main__":
    main()
