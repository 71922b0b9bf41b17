"""Make a tiny Llama that adds two numbers of two digits about half of the time, and tasks for it.

Hardware: 1 CPU core, half a minute. Writes examples/addition: model, tasks.jsonl, grpo.yaml.

    python examples/addition.py
"""

from pathlib import Path

from rookery.starters.addition import make_addition

if __name__ == "__main__":
    make_addition(Path(__file__).parent / "addition")
