"""`rookery genome run` and `rookery icm run`: what differs between them."""

from rookery.cli.loop_command import make_loop_app

__all__ = ["genome", "icm"]

genome = make_loop_app(
    "genome",
    help="Evolve a population of LoRA adapters, no gradients.",
    summary="Evolve adapters as the config says, and report honestly how good the best one is.",
    examples=(
        "rookery genome run configs/demo.yaml",
        "rookery genome run mine.yaml --seed 3 --stages.1.generations 20",
    ),
    paths=("init.path", "tasksets.*.path"),
)
icm = make_loop_app(
    "icm",
    help="Label data without labels, by internal coherence.",
    summary="Label the items of a file, and say honestly what the labels are worth.",
    examples=(
        "rookery icm run configs/icm_reviews.yaml",
        "rookery icm run mine.yaml --data.path claims.jsonl --num-chains 4",
    ),
    paths=("data.path", "data.gold.path", "iterate.sft.init_from"),
)
