"""What is asked of samplers and text models, and what they answer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Literal, overload

from rookery.types.models import ModelRef, TokenIds
from rookery.types.tasks import Message

__all__ = [
    "Completion",
    "CompletionDelta",
    "FinishReason",
    "KeptTokens",
    "Penalties",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "TextReply",
    "TextRequest",
    "TokenUsage",
    "TopLogprobs",
    "VersionSpan",
]

# Which tokens each token of an answer was drawn from, stored in four bytes each.


@dataclass(frozen=True, slots=True)
class KeptTokens(Sequence[TokenIds]):
    """One row of token ids for each token that was drawn; an empty row is the whole vocabulary.

    Rows (5, 9), () and (7,): `data` holds 5, 9, 7 as uint32 and `ends` is (2, 2, 3). A nucleus may
    have thousands of tokens, and Python's integers would take nine times as much memory.
    """

    ends: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> KeptTokens:
        if isinstance(rows, KeptTokens):
            return rows
        rows = list(rows)
        return cls(
            ends=tuple(accumulate(map(len, rows))),
            data=array("I", chain.from_iterable(rows)).tobytes(),
        )

    @property
    def rows(self) -> list[memoryview]:
        """The rows as views of uint32: nothing is copied."""
        flat = memoryview(self.data).cast("I")
        return [flat[start:end] for start, end in pairwise((0, *self.ends))]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[TokenIds]:
        return (tuple(row) for row in self.rows)

    @overload
    def __getitem__(self, place: int) -> TokenIds: ...

    @overload
    def __getitem__(self, place: slice) -> KeptTokens: ...

    def __getitem__(self, place: int | slice) -> TokenIds | KeptTokens:
        found = self.rows[place]
        return KeptTokens.of(found) if isinstance(found, list) else tuple(found)


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position, best first: ((token id, log-probability), ...)."""


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What makes tokens that were there before less likely, or more; as vLLM defines them."""

    repetition: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by this, negative multiplied."""
    presence: float = 0.0
    """Taken from the logits of tokens that the answer has."""
    frequency: float = 0.0
    """The same for each time that the answer has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. The defaults are the model's own distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    penalties: Penalties | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: TokenIds = ()
    """Besides the model's own end-of-text tokens, which always stop unless `ignore_eos`."""
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    top_logprobs: int = 0
    """How many of the most likely tokens to report per position."""
    return_kept: bool = False
    """Report the tokens that top_p, top_k and min_p left at each position."""

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are never drawn, which log-probabilities are then not over."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Ask one model to continue one prompt, `params.n` times."""

    model: ModelRef
    prompt: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    affinity: Hashable = field(default=None, compare=False)
    """Requests of one affinity are better off on one server: they share prefixes. No answer depends
    on it; None: no preference."""
    json_schema: str = ""
    """A JSON schema, as text, that the answers must match. Engines that cannot do this refuse."""
    on_delta: Callable[[CompletionDelta], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called in the caller's event loop with what the completions gain, while they are drawn. It
    must return at once and not raise. Engines that do not stream never call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Ask one model for log-probabilities of given tokens.

    With tokens (5, 6, 7, 8) and start 2 the answer holds log p(7 | 5 6) and log p(8 | 5 6 7);
    with labels (10, 11) also log p(10 | 5 6 7 8) and log p(11 | 5 6 7 8). `start` equal to the
    number of tokens asks for the labels alone.
    """

    model: ModelRef
    tokens: TokenIds
    start: int = 1
    labels: TokenIds = ()
    top_logprobs: int = 0
    affinity: Hashable = field(default=None, compare=False)
    """As that of a `SampleRequest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `start` to `stop - 1` of a completion were drawn under this version of its model."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, with log-probabilities under the distribution they were drawn from.

    `text` is the decoded tokens cut before a stop string; `tokens` keeps every token drawn, the
    end-of-text token included.
    """

    model: ModelRef
    tokens: TokenIds
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    top_logprobs: tuple[TopLogprobs, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    """Which version drew which tokens, when weights changed on the way; `model` is the last of
    them. Empty: `model.version` drew all."""
    kept: Sequence[TokenIds] = ()
    """What each token was drawn from, where `return_kept` asked for it and the parameters cut
    something off: KeptTokens. Empty: the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one completion of a request gained.

    All deltas of a completion together are that completion. Text that is not certain yet comes
    with a later delta: an incomplete character, or what may begin a stop string.
    """

    sample: int
    """Which of the request's `params.n` completions."""
    tokens: TokenIds
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set in the last delta."""
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of given tokens under one model, in the order of the request."""

    model: ModelRef
    logprobs: tuple[float, ...]
    label_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Ask a TextModel for one reply to a chat.

    None leaves a value to the model: an API's own default, and for engines temperature and top_p
    of 1 and seed 0. Some APIs refuse a request that sets them.
    """

    messages: tuple[Message, ...]
    max_tokens: int = 1024
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    seed: int | None = None
    """Repeats a reply where the model promises it: engines do, most APIs do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """What a reply cost, in tokens of the model that wrote it."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """The text of one reply, who wrote it and what it cost."""

    text: str
    finish_reason: FinishReason
    model: str
    """The name of the model that wrote it: of an ensemble, the member."""
    usage: TokenUsage | None
    """None when an API does not report it."""
