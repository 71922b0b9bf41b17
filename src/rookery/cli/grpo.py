"""`rookery grpo run`: train a policy by group-relative policy optimisation, as a config says."""

from rookery.cli.loop_command import LoopParts, make_loop_app

__all__ = ["grpo"]


def _load() -> LoopParts:
    from rookery.compose.grpo import run_grpo
    from rookery.loops.grpo import GrpoConfig

    return LoopParts(GrpoConfig, run_grpo)


grpo = make_loop_app(
    "grpo",
    help="Train a policy from a reward, the engine on the newest weights.",
    summary="Train an adapter, or all weights, from a reward; report honestly what it gained.",
    examples=(
        "rookery grpo run configs/grpo_addition.yaml",
        "rookery grpo run mine.yaml --seed 3 --steps 200 --staleness 1",
    ),
    paths=("init_from", "tasksets.*.path"),
    load=_load,
)
