"""Samples tokens, each request with its own parameters and random stream, and finds stop strings.

A token is the inverse cumulative distribution at one uniform number, a function of (seed, sample
index, position). It does not depend on the other rows of the batch.
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


def penalise(
    logits: torch.Tensor, penalties: Penalties, *, prompt: Sequence[int], drawn: Sequence[int]
) -> None:
    """Penalise earlier tokens in place in one row of logits [vocabulary], as vLLM does: before the
    temperature."""
    if penalties.repetition != 1.0:
        seen = torch.tensor(sorted({*prompt, *drawn}), device=logits.device)
        raw = logits[seen]
        logits[seen] = torch.where(raw > 0, raw / penalties.repetition, raw * penalties.repetition)
    if drawn:
        answer = torch.tensor(list(drawn), device=logits.device)
        tokens, counts = torch.unique(answer, return_counts=True)
        logits[tokens] -= penalties.frequency * counts + penalties.presence


# Stop strings and streamed text of a sequence that grows token by token:
#
#     search = StopSearch(("\n\n",), detokenize=detokenize)
#     search.find(tokens)        # None, or the text before the first stop string
#     deltas = TextDeltas(("\n\n",), detokenize=detokenize)
#     deltas.add(tokens)         # the text that became final since the last call
#
# Decoding all tokens at every step would cost quadratic time. A new token can complete a stop
# string only at the end of the text, so only the last tokens are decoded, and all of them only to
# confirm a match. Text decoded from the middle of a sequence may start with a broken character or
# lack a space; `MARGIN` covers that.


MARGIN = 16
"""Extra characters before the longest stop string. A character takes at most four tokens."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 32
"""Tokens to wait for a complete character; after more there will be none."""


class StopSearch:
    """Stop-string search in one sequence; call `find` after every new token."""

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._detokenize = detokenize
        self._least = MARGIN + max(map(len, self._stops), default=0)
        self._first = 0
        """Index of the first token that is decoded."""

    def find(self, tokens: Sequence[int]) -> str | None:
        """Return the text before the first stop string; None if there is none yet."""
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
    """Streamed text of one sequence; call `add` after every new token.

    An incomplete character and a possible start of a stop string are held back.
    """

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.num_tokens = 0
        """Number of tokens added; a sequence that starts over repeats them."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1) - 1
        self._detokenize = detokenize
        self._first = self._last = 0
        """Range of the tokens decoded last; later tokens are decoded together with them."""
        self._held = ""
        self._num_emitted = 0

    def add(self, tokens: Sequence[int], *, ended: str | None = None) -> str:
        """Return the text that became final since the last call; `ended` is the whole text if the
        sequence has ended."""
        self.num_tokens = len(tokens)
        if ended is not None:
            return ended[self._num_emitted :]
        before = self._detokenize(tokens[self._first : self._last])
        after = self._detokenize(tokens[self._first :])
        is_whole = len(after) > len(before) and not after.endswith(_BROKEN)
        if not is_whole and len(tokens) - self._last < _MAX_HELD_TOKENS:
            return ""
        self._first, self._last = self._last, len(tokens)
        text = self._held + after[len(before) :]
        num = len(text) - self._num_held(text)
        self._held = text[num:]
        self._num_emitted += num
        return text[:num]

    def _num_held(self, text: str) -> int:
        """Return how many of the last characters may be the start of a stop string."""
        sizes = range(min(len(text), self._longest), 0, -1)
        starts = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(starts, 0)


_BLOCK = 128
"""Block size of the two-level search in the vocabulary: first the block, then the token."""


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """A token, its log-probability under the sampled distribution, and the likeliest tokens."""

    token: int
    logprob: float
    top: TopLogprobs
    kept: bytes = b""
    """Sorted uint32 ids of the tokens that truncation kept, if requested; empty: all tokens."""


def uniform(seed: int, sample: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the three arguments."""
    digest = hashlib.blake2b(f"{seed}:{sample}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[TokenDraw]:
    """Sample one token per row of logits [rows, vocabulary]."""
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
    """Return log p of tokens [rows, k] under logits [rows, vocabulary], rounded as in a trainer."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens)


def top_logprobs(logits: torch.Tensor, normaliser: torch.Tensor, num: int) -> TopLogprobs:
    """Return the `num` likeliest tokens of one row, best first."""
    if num == 0:
        return ()
    values, tokens = torch.topk(logits, min(num, logits.shape[-1]))
    return tuple(zip(tokens.tolist(), (values - normaliser).tolist(), strict=True))


def _truncate(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the logits of tokens that min-p, top-k or top-p exclude to minus infinity, in place, and
    return the remaining tokens.

    The order is vLLM's: min-p, then top-k, then top-p over the rest.
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
    """Return the first token of each row whose cumulative probability exceeds the row's point."""
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
    # Rounding may point just past the block's last token with a nonzero probability.
    last = _BLOCK - 1 - (blocks[rows, block] > 0).int().flip(1).argmax(dim=1)
    return (block * _BLOCK + torch.minimum(token, last)).clamp(max=probs.shape[1] - 1)
