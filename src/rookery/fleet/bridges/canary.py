"""The proof that a server computes with the weights it was given: log-probabilities of a fixed text
under the trainer's weights and under the server's must agree.

    canary = Canary.of(fleet.capabilities, is_float32=True)
    expected = await logprobs(canary)                             # by whoever has the weights
    gap = canary.gap(await canary.read(replica, ref), expected)   # in nats

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

__all__ = ["Canary", "Logprobs"]

_NUM_IDS = 9
"""Tokens 1 to 9: every vocabulary has them."""
_NUM_ENDS = 3
"""Places that are compared: so many at the beginning, and so many at the end."""
_FLOAT32_NATS = 1e-3
"""Between two programs that compute in float32; they differ by 1e-5."""
_HALF_NATS = 0.1
"""Half-precision servers differ from a float32 model by less, old weights by more."""
_PLAIN_NATS = 8.0
"""Half precision rounds logits of this size by 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A text, the places in it that are compared, and how much they may differ.

    With tokens (1, 3, 8, 2) and ends (1, 3) it is about log p(3 | 1) and log p(2 | 1 3 8).
    """

    tokens: TokenIds
    ends: tuple[int, ...]
    limit_nats: float

    @classmethod
    def of(cls, capabilities: Capabilities, *, is_float32: bool) -> "Canary":
        length = 2 * capabilities.block_tokens + 2 * _NUM_ENDS + 1
        if capabilities.max_model_len is not None:
            length = min(length, capabilities.max_model_len - 1)
        places = range(1, length)
        return cls(
            tokens=tuple((i * i * 5 + i) % _NUM_IDS + 1 for i in range(length)),
            ends=tuple(sorted({*places[:_NUM_ENDS], *places[-_NUM_ENDS:]})),
            limit_nats=_FLOAT32_NATS if is_float32 else _HALF_NATS,
        )

    @property
    def datum(self) -> Datum:
        """For a trainer, which answers with the log-probabilities."""
        targets = tuple(self.tokens[end] for end in self.ends)
        return Datum(
            tokens=self.tokens[: self.ends[-1]],
            positions=tuple(end - 1 for end in self.ends),
            targets=targets,
            weights=(0.0,) * len(targets),
        )

    async def read(
        self, replica: Replica, ref: ModelRef, adapter: Adapter | None = None
    ) -> Sequence[float]:
        """What one server says at the places; without an adapter its base model."""
        targets = [self.tokens[end] for end in self.ends]
        call = Call(
            ref=ref,
            is_base=adapter is None,
            fields=Fields(ids=tuple(sorted(set(targets)))),
            prompts=tuple(self.tokens[:end] for end in self.ends),
            arrival_s=0.0,
            prefix=(),
        )
        choices = await replica.serve(call, adapter)
        rows = [read_reading(choice).after for [choice] in choices]
        return [row.get(token, float("inf")) for row, token in zip(rows, targets, strict=True)]

    def gap(self, found: Sequence[float], expected: Sequence[float]) -> float:
        """The largest difference, in nats; of unlikely tokens the part that their size does not
        explain, as logits are rounded in proportion."""
        return max(
            abs(a - b) / max(1.0, abs(b) / _PLAIN_NATS)
            for a, b in zip(found, expected, strict=True)
        )

    def is_far(self, gap: float) -> bool:
        """True if the gap exceeds rounding error or is NaN."""
        return not gap <= self.limit_nats


Logprobs = Callable[[Canary], Awaitable[Sequence[float]]]
"""What the weights that are published say at the places of a canary."""
