"""Groups as an Atropos environment sends them."""

from typing import Any

from rookery.compat.atropos.scored_group import ScoredGroup


def make_document(size: int = 2, *, env_id: int | None = None, **changes: Any) -> dict[str, Any]:
    """Prompt 5 6, answers 7 and a token that differs by sequence; scores 0, 1, 2, ..."""
    rows = range(size)
    return {
        "tokens": [[5, 6, 7, 10 + row] for row in rows],
        "masks": [[-100, -100, 7, 10 + row] for row in rows],
        "scores": [float(row) for row in rows],
        "inference_logprobs": [[1.0, 1.0, -0.5, -1.0 - row] for row in rows],
        "env_id": env_id,
        **changes,
    }


def make_group(size: int = 2, *, env_id: int | None = None, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(make_document(size, env_id=env_id, **changes))
