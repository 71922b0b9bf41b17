"""The proof that a server computes with the weights it was given: log-probabilities after a fixed
text under the trainer's weights and under the server's must agree.

    canary = Canary.of(fleet.capabilities, is_float32=True)
    expected = await logprobs(canary)                             # by whoever has the weights
    found = await canary.read(replica, ref)                       # one prompt, one token
    canary.is_far(found, expected), canary.gap(found, expected)   # in nats

The text is longer than two blocks of the prefix cache and the same every time: a server that still
has keys and values of older weights shows it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.wire import Fields, read_reading
from rookery.fleet.routing.load import Call
from rookery.fleet.routing.replica import Replica
from rookery.types import Adapter, Datum, ModelRef, TokenIds

__all__ = ["SMALLEST_VOCABULARY", "Canary", "Logprobs"]

_NUM_IDS = 9
SMALLEST_VOCABULARY = 1 + _NUM_IDS
"""Tokens that every vocabulary has."""
_NUM_AFTER = 7
"""Tokens after the two blocks: they are computed anew when the blocks are cached."""
_FLOAT32_NATS = 1e-3
"""Between two programs that compute in float32; they differ by 1e-5."""
_HALF_NATS = 0.5
"""Between two programs that compute in half precision: one rounded logit of the likeliest token
moves all log-probabilities alike, of SmolLM2 in bfloat16 by up to 0.25."""
_PLAIN_NATS = 8.0
"""bfloat16 rounds logits of this size by 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A text, the tokens whose log-probabilities after it are compared, and how much they may
    differ.

    With tokens (1, 3, 8) and ids (1, 2) it is about log p(1 | 1 3 8) and log p(2 | 1 3 8).
    """

    tokens: TokenIds
    ids: TokenIds
    limit_nats: float
    num_spared: int = 0
    """So many ids may differ by more. After a text that no model was trained on, two programs in
    half precision differ by a nat at single tokens."""

    @classmethod
    def of(
        cls, capabilities: Capabilities, *, is_float32: bool, vocab_size: int = SMALLEST_VOCABULARY
    ) -> "Canary":
        """Text and ids are spread over the vocabulary: in half precision a text of a few tokens
        that repeat is rounded ten times more."""
        length = 2 * capabilities.block_tokens + _NUM_AFTER
        if capabilities.max_model_len is not None:
            length = min(length, capabilities.max_model_len - 1)
        num = vocab_size - 1
        return cls(
            tokens=tuple(1 + (i * i * 7919 + i * 104729) % num for i in range(length)),
            ids=tuple(1 + i * num // _NUM_IDS for i in range(_NUM_IDS)),
            limit_nats=_FLOAT32_NATS if is_float32 else _HALF_NATS,
            num_spared=0 if is_float32 else _NUM_IDS // 2,
        )

    @property
    def datum(self) -> Datum:
        """For a trainer, which answers with the log-probabilities."""
        return Datum(
            tokens=self.tokens,
            positions=(len(self.tokens) - 1,) * len(self.ids),
            targets=self.ids,
            weights=(0.0,) * len(self.ids),
        )

    async def read(
        self, replica: Replica, ref: ModelRef, adapter: Adapter | None = None
    ) -> Sequence[float]:
        """What one server says; without an adapter its base model."""
        call = Call(
            ref=ref,
            is_base=adapter is None,
            is_any_base=True,
            fields=Fields(ids=self.ids),
            prompts=(self.tokens,),
            arrival_s=0.0,
            prefix=(),
        )
        [[choice]] = await replica.serve(call, adapter)
        row = read_reading(choice).after
        return [row.get(token, float("inf")) for token in self.ids]

    def gap(self, read: Sequence[float], expected: Sequence[float]) -> float:
        """The largest difference, in nats."""
        return max(abs(a - b) for a, b in zip(read, expected, strict=True))

    def is_far(self, read: Sequence[float], expected: Sequence[float]) -> bool:
        """True if differences exceed rounding error or are NaN. Logits are rounded in proportion
        to their size: tokens less likely than e^-8 may differ by more, in proportion."""
        num_far = sum(
            not abs(a - b) <= self.limit_nats * max(1.0, abs(b) / _PLAIN_NATS)
            for a, b in zip(read, expected, strict=True)
        )
        return num_far > self.num_spared


Logprobs = Callable[[Canary], Awaitable[Sequence[float]]]
"""What the weights that are published say after the text of a canary, of its ids."""
