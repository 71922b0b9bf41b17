"""One server as the router sees it: calls in flight, adapters, and cached prefixes.

A load only counts: `router.py` decides and `pool.py` acts. Callers pass the time in.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from rookery.fleet.http.wire import Fields, StreamedChoices
from rookery.types import ModelRef, TokenIds

__all__ = [
    "Call",
    "CallBatch",
    "PromptRequest",
    "ReplicaLoad",
    "Spread",
    "make_batches",
    "prefix_hashes",
]

PREFIX_TOKENS = 64
"""Block length for comparing prompts: four of vLLM's blocks on a GPU."""
PREFIX_BLOCKS = 64
"""Blocks compared per prompt: only the first 4,096 tokens count."""
REMEMBERED_BLOCKS = 8192
"""Blocks remembered per replica: about half a million tokens of key-value cache."""
MEMORY_S = 20.0
"""Busy seconds after which older measurements count half, as speed changes with load."""
SMOOTHING = 0.2
"""Weight of the newest call in the moving average of the pace."""
FADING = 0.02
"""Share by which every call raises the remembered quickest pace, so that old records fade."""


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP call: prompts for one model with the same fields."""

    ref: ModelRef
    is_base: bool
    fields: Fields
    prompts: tuple[TokenIds, ...]
    arrival_s: float
    prefix: tuple[int, ...]
    affinity: Hashable = None
    """Calls of equal affinity share prefixes; None if it has no affinity."""
    stream: StreamedChoices | None = None
    """Receives the answer while it is drawn; such a call has one prompt."""
    is_any_base: bool = False
    """Asks for the base model under any version, as the canary does while weights change."""
    replicas: list["ReplicaLoad"] = field(default_factory=list)
    """Replicas that run it now: several after an idle replica took it over."""
    tried: set[str] = field(default_factory=set)
    """Names of the replicas that lost it."""
    num_losses: int = 0
    """Losses after which a server may have received it."""
    num_unsent: int = 0
    """Losses before any server received it."""
    lost_since_s: float | None = None
    """Time of the first loss."""
    is_over: bool = False
    num_sequences: int = field(init=False)
    work: float = field(init=False)
    """Upper bound on the tokens to compute."""

    def __post_init__(self) -> None:
        self.num_sequences = len(self.prompts) * self.fields.n
        num_prompt = sum(len(prompt) for prompt in self.prompts)
        self.work = float(num_prompt + self.num_sequences * self.fields.max_tokens)


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """Counters of one server. `window` bounds its sequences in flight, `max_loras` its adapters."""

    name: str
    window: int
    max_loras: int
    is_open: bool = True
    in_flight: dict[Call, tuple[float, float]] = field(default_factory=dict)
    """Calls, oldest first: the time each was sent, and its work on this replica."""
    num_sequences: int = 0
    work: float = 0.0
    promised: float = 0.0
    """Work of waiting calls whose home is this replica."""
    foreign: int = 0
    """Sequences of other clients on this server, from its metrics."""
    active: Counter[ModelRef] = field(default_factory=Counter)
    """Calls in flight per adapter; an adapter with any is pinned."""
    resident: OrderedDict[ModelRef, None] = field(default_factory=OrderedDict)
    """Adapters loaded on the server, least recently used first; maintained by `Residency`."""
    _prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _busy_s: float = 0.0
    _busy_since_s: float = 0.0
    _done_work: float = 0.0
    _pace: float | None = None
    _quickest: float = 0.0

    def has_room(self, call: Call) -> bool:
        return not self.in_flight or self.num_sequences + call.num_sequences <= self.window

    def num_missing(self, call: Call) -> int:
        """Return how many sequences must end before the call fits."""
        return max(0, min(call.num_sequences, self.window) - (self.window - self.num_sequences))

    def can_hold(self, ref: ModelRef) -> bool:
        return len(self.active) < self.max_loras or ref in self.active

    def holds(self, ref: ModelRef) -> bool:
        return ref in self.active or ref in self.resident

    def begin(self, call: Call, now_s: float) -> None:
        if not self.in_flight:
            self._busy_since_s = now_s
        work = self.own_work(call)
        self.in_flight[call] = (now_s, work)
        self.num_sequences += call.num_sequences
        self.work += work
        call.replicas.append(self)
        if not call.is_base:
            self.active[call.ref] += 1
        for block in call.prefix:
            self._prefixes[block] = None
            self._prefixes.move_to_end(block)
        while len(self._prefixes) > REMEMBERED_BLOCKS:
            self._prefixes.popitem(last=False)

    def end(self, call: Call, now_s: float, *, is_done: bool) -> None:
        began_s, work = self.in_flight.pop(call)
        self.num_sequences -= call.num_sequences
        self.work = max(0.0, self.work - work) if self.in_flight else 0.0
        call.replicas.remove(self)
        if not call.is_base:
            self.active[call.ref] -= 1
            if not self.active[call.ref]:
                del self.active[call.ref]
        self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s
        if is_done:
            self._measure(call, work, now_s - began_s)

    def own_work(self, call: Call) -> float:
        """Return the call's work without the leading tokens that this replica has seen before."""
        num = 0
        for block in call.prefix:
            if block not in self._prefixes:
                break
            num += PREFIX_TOKENS
        return max(1.0, call.work - num * len(call.prompts))

    def speed(self, now_s: float) -> float | None:
        """Return the work per second while busy; before any call ends, an upper bound if known."""
        busy_s = self._busy_s + (now_s - self._busy_since_s if self.in_flight else 0.0)
        if busy_s <= 0:
            return None
        if self._done_work:
            return self._done_work / busy_s
        return self.work / busy_s if self.work else None

    def alone(self) -> float:
        """Return the work in flight here that no other replica also computes."""
        return sum(work for call, (_, work) in self.in_flight.items() if len(call.replicas) == 1)

    @property
    def has_measured(self) -> bool:
        return self._done_work > 0

    @property
    def pace(self) -> float | None:
        """Seconds per unit of work, waiting included; None before the first call has ended."""
        return self._pace

    def pace_now(self) -> float | None:
        """Return the expected pace of one more call: quickest when idle, average when full."""
        if self._pace is None:
            return None
        load = min(1.0, self.num_sequences / self.window)
        return self._quickest + (self._pace - self._quickest) * load

    def forget(self) -> None:
        """Forget the cached prefixes, as the server was restarted."""
        self._prefixes.clear()

    def _measure(self, call: Call, work: float, seconds: float) -> None:
        self._done_work += work
        newest = seconds / max(call.work, 1.0)
        old = self._pace
        self._pace = newest if old is None else old + SMOOTHING * (newest - old)
        self._quickest = newest if old is None else min(newest, (1 + FADING) * self._quickest)
        if self._busy_s > MEMORY_S:
            self._busy_s /= 2
            self._done_work /= 2


def prefix_hashes(ref: ModelRef, prompt: Sequence[int]) -> tuple[int, ...]:
    """Return a hash per whole block of the prompt, over the model and all tokens to its end."""
    blocks = min(len(prompt) // PREFIX_TOKENS, PREFIX_BLOCKS)
    return tuple(_chain(hash(ref), prompt, blocks))


def _chain(seed: int, prompt: Sequence[int], num_blocks: int) -> Iterable[int]:
    for block in range(num_blocks):
        seed = hash((seed, tuple(prompt[block * PREFIX_TOKENS : (block + 1) * PREFIX_TOKENS])))
        yield seed


# Requests as calls: compatible requests share an HTTP call, in pieces small enough to spread.


SHARES = 4
"""Minimum number of calls per server in a batch: faster servers take more of the last ones."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    ref: ModelRef
    fields: Fields
    prompt: TokenIds
    affinity: Hashable = None
    stream: StreamedChoices | None = None
    """Receives a streamed answer; such a prompt gets a call of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Inputs that decide the size of calls."""

    num_servers: int
    num_affinities: int
    """Affinities used recently, by this batch or others."""
    max_sequences: int
    """Limit per call."""
    num_others: int = 0
    """Sequences of other batches, waiting or in flight: they keep servers busy too."""

    def share(self, total: int) -> int:
        """Return the sequences per call for a batch of `total`: with the other batches, `SHARES`
        calls per server."""
        return self._cut(total + self.num_others, SHARES * max(self.num_servers, 1))

    def affine_share(self, total: int) -> int:
        """Return the sequences per call for `total` sequences of one affinity. If there are at
        least as many affinities as servers, one call takes all; else enough calls keep all servers
        busy. For 32 sequences on 8 servers: 32 per call with 8 affinities, 10 with 3."""
        return self._cut(total, -(-self.num_servers // max(self.num_affinities, 1)))

    def _cut(self, total: int, num_calls: int) -> int:
        return min(self.max_sequences, max(1, total // max(num_calls, 1)))


@dataclass(frozen=True, slots=True)
class CallBatch:
    """A call and the positions of its prompts among the entries."""

    call: Call
    positions: tuple[int, ...]


def make_batches(
    entries: Sequence[PromptRequest], *, base: ModelRef, spread: Spread, now_s: float
) -> list[CallBatch]:
    """Group entries of equal model, fields, affinity and stream; cut groups as `spread` says.

    8 prompts on 2 servers: 8 calls. 1,024 prompts on 1 server with max_sequences 32: 32 calls.
    """
    groups: dict[tuple[ModelRef, Fields, Hashable, StreamedChoices | None], list[int]] = {}
    for position, entry in enumerate(entries):
        alike = (entry.ref, entry.fields, entry.affinity, entry.stream)
        groups.setdefault(alike, []).append(position)
    share = spread.share(sum(entry.fields.n for entry in entries))
    batches: list[CallBatch] = []
    for (ref, fields, affinity, stream), positions in groups.items():
        group_share = share if affinity is None else spread.affine_share(len(positions) * fields.n)
        size = max(1, group_share // fields.n)
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
            batches.append(CallBatch(call, piece))
    return batches
