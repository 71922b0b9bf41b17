"""`rookery icm run`: label data that has no labels, as a config says."""

from rookery.cli.loop_command import LoopParts, make_loop_app

__all__ = ["icm"]


def _load() -> LoopParts:
    from rookery.compose.icm import run_icm
    from rookery.loops.icm import IcmConfig

    return LoopParts(IcmConfig, run_icm)


icm = make_loop_app(
    "icm",
    help="Label data without labels, by internal coherence.",
    summary="Label the items of a file, and say honestly what the labels are worth.",
    examples=(
        "rookery icm run configs/icm_reviews.yaml",
        "rookery icm run mine.yaml --data.path claims.jsonl --num-chains 4",
    ),
    paths=("data.path", "data.gold.path", "iterate.sft.init_from"),
    load=_load,
)
