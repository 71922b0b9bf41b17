"""Requests as calls: those that may share an HTTP call do, in pieces small enough to spread."""

from collections.abc import Sequence
from dataclasses import dataclass

from rookery.fleet.http.wire import Fields
from rookery.fleet.routing.load import Call, prefix_hashes
from rookery.types import ModelRef, TokenIds

__all__ = ["Batch", "Entry", "make_batches"]

SHARES = 4
"""Calls per server that a batch is cut into at least: the last ones even out who is faster."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt to send."""

    ref: ModelRef
    fields: Fields
    prompt: TokenIds


@dataclass(frozen=True, slots=True)
class Batch:
    """A call, and which entries its prompts are, in order."""

    call: Call
    positions: tuple[int, ...]


def make_batches(
    entries: Sequence[Entry],
    *,
    base: ModelRef,
    num_servers: int,
    max_sequences: int,
    now_s: float,
) -> list[Batch]:
    """Group equal model and fields, cut to at most `max_sequences` and to `SHARES` per server.

    8 prompts on 2 servers: 8 calls. 1,024 prompts on 1 server with max_sequences 32: 32 calls.
    """
    groups: dict[tuple[ModelRef, Fields], list[int]] = {}
    for position, entry in enumerate(entries):
        groups.setdefault((entry.ref, entry.fields), []).append(position)
    total = sum(entry.fields.n for entry in entries)
    share = min(max_sequences, max(1, total // (SHARES * max(num_servers, 1))))
    batches: list[Batch] = []
    for (ref, fields), positions in groups.items():
        size = max(1, share // fields.n)
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
            )
            batches.append(Batch(call, piece))
    return batches
