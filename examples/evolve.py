"""Evolve a program with the library call.

Hardware: 2 CPU cores and a model behind OpenAI's API: set OPENAI_API_BASE and, if it wants one,
OPENAI_API_KEY. A minute for 8 programs.

    python examples/evolve.py MODEL
"""

import sys

import rookery
from rookery.starters import PROJECTS

if __name__ == "__main__":
    outcome = rookery.run_evolve(
        PROJECTS / "evolve" / "initial_program.py",
        PROJECTS / "evolve" / "evaluator.py",
        PROJECTS / "evolve" / "config.yaml",
        output="runs/evolve-example",
        llm={"primary_model": sys.argv[1]},
        rookery={"engine": None},
    )
    for row in outcome.report.winning_line:
        print(f"iteration {row.iteration}: {row.score}")
    print(outcome.path / "best")
