"""Penalties on tokens that were there before, applied to logits as vLLM applies them."""

from collections.abc import Sequence

import torch

from rookery.types import Penalties

__all__ = ["penalise"]


def penalise(
    logits: torch.Tensor, penalties: Penalties, *, prompt: Sequence[int], drawn: Sequence[int]
) -> None:
    """Change one row of logits [vocabulary] in place, before the temperature."""
    if penalties.repetition != 1.0:
        seen = torch.tensor(sorted({*prompt, *drawn}), device=logits.device)
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / penalties.repetition, own * penalties.repetition)
    if drawn:
        answer = torch.tensor(list(drawn), device=logits.device)
        tokens, counts = torch.unique(answer, return_counts=True)
        logits[tokens] -= penalties.frequency * counts + penalties.presence
