"""`rookery grpo`: train a policy by group-relative policy optimisation, on tasksets, games or
Atropos environments, and see beforehand what it takes."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rookery.cli.atropos import atropos, gateway
from rookery.cli.loop_command import make_loop_app, read_loop_config
from rookery.cli.outcome import print_table
from rookery.cli.terminal import console, fail

__all__ = ["grpo"]

PATHS = ("init_from", "reference", "tasksets.*.path", "environment.environments.*.folder")


grpo = make_loop_app(
    "grpo",
    help="Train a policy from a reward, the engine on the newest weights.",
    summary="Train an adapter, or all weights, from a reward; report honestly what it gained.",
    examples=(
        "rookery grpo run configs/grpo_addition.yaml",
        "rookery grpo run mine.yaml --seed 3 --steps 200 --staleness 1",
        "torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml",
    ),
    paths=PATHS,
)


grpo.command(atropos)
grpo.command(gateway)


@grpo.command
def plan(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Show what a training would hold in memory, and whether it fits. Nothing is loaded.

    Any value of the config is a flag with a dotted name, as for `rookery grpo run`.

        rookery grpo plan mine.yaml --trainer.pass_tokens 4096

    Parameters
    ----------
    config
        A YAML or TOML file.
    """
    from rookery.compose.grpo_plan import plan_grpo
    from rookery.loops.grpo import GrpoConfig

    loaded = read_loop_config(GrpoConfig, config, overrides, paths=PATHS, own=())
    made = plan_grpo(loaded)
    rows = [(row.name, f"{row.num_bytes / 2**20:,.1f}", row.note) for row in made.rows]
    rows += [
        ("all", f"{made.total_bytes / 2**20:,.1f}", ""),
        ("there is", f"{made.available_bytes / 2**20:,.1f}", f"memory of {made.device}"),
    ]
    print_table("What is held at the same time", columns=("part", "MiB", ""), rows=rows)
    if made.complaint:
        fail(made.complaint)
        return 2
    console.print("It fits.")
    return 0
