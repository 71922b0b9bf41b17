"""The shape of an adapter from its adapter_config.json, without reading its weights."""

import json
from collections.abc import Mapping
from typing import Any

from rookery.service.refusals import bad
from rookery.types import LoraShape

__all__ = ["read_shape"]

ATTENTION, MLP, UNEMBED = "attn", "mlp", "unembed"
_GROUPS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ATTENTION),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MLP),
    "lm_head": UNEMBED,
}


def read_shape(config: bytes) -> LoraShape:
    """Rank and layers, as a client would have asked for them."""
    try:
        document = json.loads(config)
        ranks = [document["r"], *(document.get("rank_pattern") or {}).values()]
        is_fine = all(isinstance(rank, int) and rank > 0 for rank in ranks)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise bad(f"adapter_config is no PEFT config of a LoRA: {error!r:.200}.") from error
    if not is_fine:
        raise bad(f"adapter_config has the ranks {ranks!r:.100}; they are whole numbers above 0.")
    groups = _groups(document)
    return LoraShape(
        rank=max(ranks),
        seed=0,
        train_attn=ATTENTION in groups,
        train_mlp=MLP in groups,
        train_unembed=UNEMBED in groups,
    )


def _groups(document: Mapping[str, Any]) -> set[str]:
    """Which kinds of layers it adapts; a pattern of names is taken for all linear layers."""
    targets = document.get("target_modules")
    if not isinstance(targets, list) or not targets:
        return {ATTENTION, MLP}
    ends = {str(target).rpartition(".")[2] for target in targets}
    return {_GROUPS[end] for end in ends if end in _GROUPS} or {ATTENTION, MLP}
