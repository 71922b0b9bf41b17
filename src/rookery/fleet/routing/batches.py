"""Requests as calls: those that may share an HTTP call do, in pieces small enough to spread."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rookery.fleet.http.wire import Fields, StreamedChoices
from rookery.fleet.routing.load import Call, prefix_hashes
from rookery.types import ModelRef, TokenIds

__all__ = ["Batch", "Entry", "Spread", "make_batches"]

SHARES = 4
"""Calls per server that a batch is cut into at least: the last ones even out who is faster."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt to send."""

    ref: ModelRef
    fields: Fields
    prompt: TokenIds
    affinity: Hashable = None
    stream: StreamedChoices | None = None
    """Of a prompt whose answer is streamed, which has a call of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What the size of calls follows from."""

    num_servers: int
    num_affinities: int
    """Affinities that have calls at this time, those of this batch aside or not."""
    max_sequences: int
    """Per call."""

    def share(self, total: int) -> int:
        """Sequences per call of a batch of `total`: `SHARES` calls per server."""
        return self._cut(total, SHARES * max(self.num_servers, 1))

    def affine_share(self, total: int) -> int:
        """Sequences per call of the `total` of one affinity: one call where all servers have one of
        some affinity then, else as many as keep them all busy. 32 sequences on 8 servers: one call
        among 8 affinities, three calls among 3."""
        return self._cut(total, -(-self.num_servers // max(self.num_affinities, 1)))

    def _cut(self, total: int, num_calls: int) -> int:
        return min(self.max_sequences, max(1, total // max(num_calls, 1)))


@dataclass(frozen=True, slots=True)
class Batch:
    """A call, and which entries its prompts are, in order."""

    call: Call
    positions: tuple[int, ...]


def make_batches(
    entries: Sequence[Entry], *, base: ModelRef, spread: Spread, now_s: float
) -> list[Batch]:
    """Group equal model, fields and affinity, and cut the groups as `spread` says.

    8 prompts on 2 servers: 8 calls. 1,024 prompts on 1 server with max_sequences 32: 32 calls.
    """
    groups: dict[tuple[ModelRef, Fields, Hashable, StreamedChoices | None], list[int]] = {}
    for position, entry in enumerate(entries):
        alike = (entry.ref, entry.fields, entry.affinity, entry.stream)
        groups.setdefault(alike, []).append(position)
    share = spread.share(sum(entry.fields.n for entry in entries))
    batches: list[Batch] = []
    for (ref, fields, affinity, stream), positions in groups.items():
        own = share if affinity is None else spread.affine_share(len(positions) * fields.n)
        size = max(1, own // fields.n)
        for first in range(0, len(positions), size):
            piece = tuple(positions[first : first + size])
            prompts = tuple(entries[position].prompt for position in piece)
            call = Call(
                ref=ref,
                is_base=ref == base,
                fields=fields,
                prompts=prompts,
                arrival_s=now_s,
                prefix=prefix_hashes(ref, prompts[0]),
                affinity=affinity,
                stream=stream,
            )
            batches.append(Batch(call, piece))
    return batches
