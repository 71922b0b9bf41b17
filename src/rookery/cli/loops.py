"""`rookery genome run`, `rookery grpo run`, `rookery icm run`: what differs between them."""

from rookery.cli.loop_command import make_loop_app

__all__ = ["genome", "grpo", "icm"]

genome = make_loop_app(
    "genome",
    help="Evolve a population of LoRA adapters, no gradients.",
    summary="Evolve adapters as the config says, and report honestly how good the best one is.",
    examples=(
        "rookery genome run configs/demo.yaml",
        "rookery genome run mine.yaml --seed 3 --stages.0.generations 20",
    ),
    paths=("init.path", "tasksets.*.path"),
)
grpo = make_loop_app(
    "grpo",
    help="Train a policy from a reward, the engine on the newest weights.",
    summary="Train a LoRA adapter from a reward, and report honestly how much better it is.",
    examples=(
        "rookery grpo run configs/grpo_addition.yaml",
        "rookery grpo run mine.yaml --seed 3 --steps 200 --staleness 1",
    ),
    paths=("init_from", "tasksets.*.path"),
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
