"""Evolve a program with the library call.

Hardware: 2 CPU cores and a model behind OpenAI's API: set OPENAI_API_BASE and, if it wants one,
OPENAI_API_KEY. A minute for 20 programs.

    python examples/evolve.py MODEL
"""

import sys

import rookery

if __name__ == "__main__":
    outcome = rookery.run_evolve(
        "examples/evolve/initial_program.py",
        "examples/evolve/evaluator.py",
        "configs/evolve.yaml",
        llm={"primary_model": sys.argv[1]},
    )
    for row in outcome.report.winning_line:
        print(f"iteration {row.iteration}: {row.score}")
    print(outcome.path / "best")
