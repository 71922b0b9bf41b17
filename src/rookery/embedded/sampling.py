"""Draws tokens: each request with its own parameters and its own stream of random numbers.

A draw is one uniform number, a function of (seed, sample index, position), put through the
inverse of the cumulative distribution. Nothing depends on which rows are drawn together.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rookery.types import Penalties, SamplingParams, TopLogprobs

__all__ = [
    "StopSearch",
    "TextDeltas",
    "TokenDraw",
    "draw",
    "logprobs_of",
    "penalise",
    "top_logprobs",
    "uniform",
]

# Penalties on tokens that were there before, applied to logits as vLLM applies them.


def penalise(
    logits: torch.Tensor, penalties: Penalties, *, prompt: Sequence[int], drawn: Sequence[int]
) -> None:
    """Change one row of logits [vocabulary] in place, before the temperature."""
    if penalties.repetition != 1.0:
        seen = torch.tensor(sorted({*prompt, *drawn}), device=logits.device)
        raw = logits[seen]
        logits[seen] = torch.where(raw > 0, raw / penalties.repetition, raw * penalties.repetition)
    if drawn:
        answer = torch.tensor(list(drawn), device=logits.device)
        tokens, counts = torch.unique(answer, return_counts=True)
        logits[tokens] -= penalties.frequency * counts + penalties.presence


# A text that grows token by token: stop strings are looked for at its end alone, and what it
# gained is told as it becomes certain.
#
#     search = StopSearch(("\n\n",), detokenize=detokenize)
#     search.find(tokens)        # None, or the text before the first stop string
#     deltas = TextDeltas(("\n\n",), detokenize=detokenize)
#     deltas.add(tokens)         # the text that is certain since the last call
#
# Decoding all tokens at every step costs the square of their number. What a token adds can complete
# a stop string only at the end of the text, so the last tokens are decoded, and all of them only to
# confirm a find. A text that is decoded from its middle on may begin with a broken character, or
# without a space: `MARGIN` covers that.


MARGIN = 16
"""Characters before the longest stop string: a character has four bytes, a token each at most."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 32
"""Tokens that are waited for to make a whole character: more are no character."""


class StopSearch:
    """The search of one sequence; `find` is called with every new token."""

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._detokenize = detokenize
        self._least = MARGIN + max(map(len, self._stops), default=0)
        self._first = 0
        """The token from which on the text is decoded."""

    def find(self, tokens: Sequence[int]) -> str | None:
        """The text before the first stop string; None: there is none yet."""
        if not self._stops:
            return None
        end = self._detokenize(tokens[self._first :])
        if any(stop in end for stop in self._stops):
            text = self._detokenize(tokens)
            places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
            return text[: min(places)] if places else None
        if len(end) > 2 * self._least:
            middle = (self._first + len(tokens)) // 2
            if len(self._detokenize(tokens[middle:])) >= self._least:
                self._first = middle
        return None


class TextDeltas:
    """What one sequence may tell of its text; `add` is called with every new token.

    Held back: an incomplete character, and the beginning of what may become a stop string.
    """

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.num_tokens = 0
        """Tokens that were added: a sequence that begins anew adds them again."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1) - 1
        self._detokenize = detokenize
        self._first = self._last = 0
        """The tokens in between were decoded last: what follows is decoded after them."""
        self._held = ""
        self._num_told = 0

    def add(self, tokens: Sequence[int], *, ended: str | None = None) -> str:
        """The text that is certain since the last call; all of it when it `ended` as this."""
        self.num_tokens = len(tokens)
        if ended is not None:
            return ended[self._num_told :]
        before = self._detokenize(tokens[self._first : self._last])
        after = self._detokenize(tokens[self._first :])
        is_whole = len(after) > len(before) and not after.endswith(_BROKEN)
        if not is_whole and len(tokens) - self._last < _MOST_HELD:
            return ""
        self._first, self._last = self._last, len(tokens)
        text = self._held + after[len(before) :]
        num = len(text) - self._num_held(text)
        self._held = text[num:]
        self._num_told += num
        return text[:num]

    def _num_held(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        sizes = range(min(len(text), self._longest), 0, -1)
        starts = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(starts, 0)


_BLOCK = 128
"""The vocabulary is searched in two levels: first the block, then the token in it."""


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """A token, its log-probability under the distribution drawn from, and the likeliest ones."""

    token: int
    logprob: float
    top: TopLogprobs
    kept: bytes = b""
    """What it was drawn from, as uint32 in order, where that is asked; empty: every token."""


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) that depends on its three counters alone."""
    digest = hashlib.blake2b(f"{seed}:{sample}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[TokenDraw]:
    """One draw per row of logits [rows, vocabulary]."""
    temperatures = [p.temperature if p.temperature > 0 else 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logits = logits.clone() if any(p.is_cut for p in params) else logits
    kept = {row: _truncate(logits[row], param) for row, param in enumerate(params) if param.is_cut}
    is_normalised = any(p.temperature > 0 or p.top_logprobs for p in params)
    normaliser = torch.logsumexp(logits, dim=-1) if is_normalised else logits[:, 0]
    tokens = _choose(logits, normaliser, params, uniforms)
    drawn = logprobs_of(logits, tokens[:, None])[:, 0].tolist()
    return [
        TokenDraw(
            token=token,
            logprob=logprob,
            top=top_logprobs(logits[row], normaliser[row], params[row].top_logprobs),
            kept=_bytes(kept[row]) if row in kept and params[row].return_kept else b"",
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
        return _invert((logits - normaliser[:, None]).exp_(), points)
    tokens = logits.argmax(dim=-1)
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        probs = (logits[rows] - normaliser[rows, None]).exp_()
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


def _truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the logits of tokens that top-k, top-p or min-p exclude to minus infinity, in place; the
    tokens that are left.

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
    return order[kept > float("-inf")]


def _bytes(tokens: torch.Tensor) -> bytes:
    data: bytes = tokens.sort().values.to(device="cpu", dtype=torch.int32).numpy().tobytes()
    return data


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
