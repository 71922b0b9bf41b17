"""Draws tokens: each request with its own parameters and its own stream of random numbers.

A draw is one uniform number, a function of (seed, sample index, position), put through the
inverse of the cumulative distribution. Nothing depends on which rows are drawn together.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rookery.types import SamplingParams, TopLogprobs

__all__ = ["Draw", "draw", "logprobs_of", "top_logprobs", "uniform"]

_BLOCK = 128
"""The vocabulary is searched in two levels: first the block, then the token in it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token, its log-probability under the distribution drawn from, and the likeliest ones."""

    token: int
    logprob: float
    top: TopLogprobs


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) that depends on its three counters alone."""
    digest = hashlib.blake2b(f"{seed}:{sample}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[Draw]:
    """One draw per row of logits [rows, vocabulary]."""
    temperatures = [p.temperature if p.temperature > 0 else 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logits = logits.clone() if any(_is_truncated(p) for p in params) else logits
    for row, param in enumerate(params):
        if _is_truncated(param):
            _truncate(logits[row], param)
    normaliser = torch.logsumexp(logits, dim=-1)
    tokens = _choose(logits, normaliser, params, uniforms)
    drawn = logprobs_of(logits, tokens[:, None])[:, 0].tolist()
    return [
        Draw(
            token=token,
            logprob=logprob,
            top=top_logprobs(logits[row], normaliser[row], params[row].top_logprobs),
        )
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), drawn, strict=True))
    ]


def _choose(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
) -> torch.Tensor:
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    if len(sampled) == len(params):
        return _invert(torch.exp(logits - normaliser[:, None]), points)
    tokens = logits.argmax(dim=-1)
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        probs = torch.exp(logits[rows] - normaliser[rows, None])
        tokens[rows] = _invert(probs, points[rows])
    return tokens


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p of tokens [rows, k] under logits [rows, vocabulary], rounded as a trainer rounds it."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens)


def top_logprobs(logits: torch.Tensor, normaliser: torch.Tensor, num: int) -> TopLogprobs:
    """The `num` likeliest tokens of one row, best first."""
    if num == 0:
        return ()
    values, tokens = torch.topk(logits, min(num, logits.shape[-1]))
    return tuple(zip(tokens.tolist(), (values - normaliser).tolist(), strict=True))


def _is_truncated(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def _truncate(logits: torch.Tensor, params: SamplingParams) -> None:
    """Set the logits of tokens that top-k, top-p or min-p exclude to minus infinity, in place.

    Order as in vLLM: min-p, then top-k, then top-p over what is left.
    """
    if params.min_p > 0:
        floor = logits.max() + torch.log(torch.tensor(params.min_p, device=logits.device))
        logits.masked_fill_(logits < floor, float("-inf"))
    num_kept = params.top_k if 0 < params.top_k < len(logits) else len(logits)
    values, tokens = (
        torch.topk(logits, num_kept)
        if num_kept < len(logits)
        else torch.sort(logits, descending=True, stable=True)
    )
    if params.top_p < 1:
        probs = torch.softmax(values, dim=-1, dtype=torch.float64)
        before = torch.cumsum(probs, dim=-1) - probs
        num_kept = max(1, int((before < params.top_p).sum()))
    kept, order = values[:num_kept].clone(), tokens[:num_kept]
    logits.fill_(float("-inf"))
    logits[order] = kept


def _invert(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The first token of each row whose cumulative probability exceeds the row's point."""
    padding = -probs.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(probs, (0, padding)) if padding else probs
    blocks = padded.view(len(probs), -1, _BLOCK)
    block_ends = torch.cumsum(blocks.sum(dim=2, dtype=torch.float64), dim=1)
    goal = points * block_ends[:, -1]
    block = torch.searchsorted(block_ends, goal[:, None], right=True)[:, 0]
    block = block.clamp(max=block_ends.shape[1] - 1)
    rows = torch.arange(len(probs), device=probs.device)
    before = torch.where(block > 0, block_ends[rows, (block - 1).clamp(min=0)], 0.0)
    inside = torch.cumsum(blocks[rows, block].double(), dim=1)
    token = torch.searchsorted(inside, (goal - before)[:, None], right=True)[:, 0]
    # Rounding may point just past the block's last token that has any probability.
    last = _BLOCK - 1 - (blocks[rows, block] > 0).int().flip(1).argmax(dim=1)
    return (block * _BLOCK + torch.minimum(token, last)).clamp(max=probs.shape[1] - 1)
