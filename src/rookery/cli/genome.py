"""`rookery genome run`: evolve LoRA adapters as a config says."""

from rookery.cli.loop_command import LoopParts, make_loop_app

__all__ = ["genome"]


def _load() -> LoopParts:
    from rookery.compose.genome import run_genome
    from rookery.loops.genome import GenomeConfig

    return LoopParts(GenomeConfig, run_genome)


genome = make_loop_app(
    "genome",
    help="Evolve a population of LoRA adapters, no gradients.",
    summary="Evolve adapters as the config says, and report honestly how good the best one is.",
    examples=(
        "rookery genome run configs/demo.yaml",
        "rookery genome run mine.yaml --seed 3 --stages.0.generations 20",
    ),
    paths=("init.path", "tasksets.*.path"),
    load=_load,
)
