"""Decides which server takes which call. Pure: no I/O, no clock, no randomness.

    router = Router([ReplicaLoad("a", window=64, max_loras=8), ...])
    router.add(call)
    for call, replica in router.dispatch(now_s): ...send it...
    router.end(call, replica, now_s, is_done=True)
    for call, replica in router.steal(now_s): ...send it there too, the first answer counts...

Calls wait in groups by model; the oldest is next. A call goes to the open replica that would finish
it first: work in flight over measured speed, less the cached prefix tokens, plus the cost of a load
if the adapter is missing. An adapter stays on the replica that holds it (its home) unless that is
full for long. A replica never has more than `max_loras` adapters in flight. Calls of one affinity
stay on one replica (`AffinityHomes`) while it has no more than its share of all work.

No call starves. If a call finds no room, such as one of eight sequences among many of one, a
replica is kept free of younger calls until it fits. A call that waits for an adapter slot holds
back adapter calls that came long after it.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from rookery.fleet.routing.load import Call, ReplicaLoad
from rookery.types import ModelRef

__all__ = ["Router"]

# The replica that requests of one affinity go to while it is not busier than the others.
#
#     homes = AffinityHomes()
#     homes.find(affinity, now_s)                  # None if it has no home yet
#     homes.settle(affinity, replica, now_s)
#
# A home is a preference for the sake of the prefix cache, never a condition. It is ignored if other
# replicas would be idle, and forgotten when its replica is lost or nobody used it for a while.


MAX_HOMES = 4096
"""Affinities remembered; the least recently used are forgotten first."""
HOME_S = 60.0
"""Seconds after which an unused affinity is over, or its prefixes have been evicted."""


class AffinityHomes:
    """Replica per affinity, least recently used first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[Hashable, tuple[ReplicaLoad, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, affinity: Hashable, now_s: float) -> ReplicaLoad | None:
        """Return the affinity's home and count it as used; None if it has none or it is closed."""
        home = self._homes.get(affinity)
        if home is None:
            return None
        if not home[0].is_open:
            del self._homes[affinity]
            return None
        self.settle(affinity, home[0], now_s)
        return home[0]

    def settle(self, affinity: Hashable, replica: ReplicaLoad, now_s: float) -> None:
        self._homes[affinity] = (replica, now_s)
        self._homes.move_to_end(affinity)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def forget_unused(self, now_s: float) -> None:
        while self._homes:
            affinity, (_, used_s) = next(iter(self._homes.items()))
            if now_s - used_s <= HOME_S:
                return
            del self._homes[affinity]

    def with_fewest(self, replicas: Iterable[ReplicaLoad]) -> list[ReplicaLoad]:
        """Return the replicas that are home to the fewest affinities."""
        counts = Counter(replica.name for replica, _ in self._homes.values())
        candidates = list(replicas)
        least = min((counts[replica.name] for replica in candidates), default=0)
        return [replica for replica in candidates if counts[replica.name] == least]


LOAD_S = 0.2
"""Assumed cost of loading an adapter: measured 0.03 s (135M) to 0.14 s (7B), plus a margin."""
SPILL_S = 0.5
"""A call may leave its adapter's home after this wait: over twice a load, so that it pays."""
PATIENCE_S = 2.0
"""A later call may overtake one that waits for an adapter slot if it came at most this much later.
Batches then run adapter by adapter, and no call waits indefinitely."""
STEAL_GAIN = 1.5
"""An idle replica takes over a call whose time left is this many times its own time for it."""
STEAL_S = 0.05
"""Minimum gain for taking over a call."""
STEAL_GAIN_HOME = 3.0
"""`STEAL_GAIN` for a call at its affinity's home, whose cached prefixes other replicas lack."""


@dataclass(slots=True)
class _Group:
    """Waiting calls of one model, and their home replica."""

    calls: OrderedDict[Call, None] = field(default_factory=OrderedDict)
    home: ReplicaLoad | None = None

    @property
    def first(self) -> Call:
        return next(iter(self.calls))


@dataclass(slots=True)
class _Dispatch:
    """One dispatch: the open replicas, and the reservations of calls that cannot be placed."""

    now_s: float
    replicas: list[ReplicaLoad]
    kept: dict[ReplicaLoad, Call] = field(default_factory=dict)
    """Replicas with some room, reserved for a call that needs more."""
    horizon_s: float = inf
    """Adapter calls that came after this time wait, so that a slot empties for an older call."""

    def has_room(self) -> bool:
        return any(x.num_sequences < x.window and x not in self.kept for x in self.replicas)


class Router:
    """The waiting calls, and the replicas to send them to; at most `max_calls` are in flight."""

    def __init__(self, replicas: Sequence[ReplicaLoad], *, max_calls: float = inf) -> None:
        self.replicas = list(replicas)
        self._max_calls = max_calls
        self._groups: dict[ModelRef, _Group] = {}
        self._homes = AffinityHomes()
        self._waiting_work = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(len(group.calls) for group in self._groups.values())

    @property
    def num_affinities(self) -> int:
        """Number of affinities used recently."""
        return len(self._homes)

    @property
    def waiting(self) -> list[Call]:
        return [call for group in self._groups.values() for call in group.calls]

    def add(self, call: Call, *, is_first: bool = False) -> None:
        """Queue a call: last of its model, or first if it comes back from a lost server."""
        group = self._groups.setdefault(call.ref, _Group())
        group.calls[call] = None
        self._waiting_work += call.work
        if is_first:
            group.calls.move_to_end(call, last=False)
        if group.home is not None:
            group.home.promised += call.work

    def drop(self, call: Call) -> None:
        """Remove a waiting call; other calls are left alone."""
        group = self._groups.get(call.ref)
        if group is not None and call in group.calls:
            self._take(group, call)

    def dispatch(self, now_s: float) -> list[tuple[Call, ReplicaLoad]]:
        """Assign the calls that fit now; the replicas count them as in flight at once."""
        self._leave_closed_homes()
        self._homes.forget_unused(now_s)
        step = _Dispatch(now_s, list(self._open()))
        if not self._groups or not step.has_room():
            return []
        groups = self._eligible(step)
        placed = self._pass(groups, step, may_spill=False)
        return placed + self._pass(groups, step, may_spill=True)

    def end(self, call: Call, replica: ReplicaLoad, now_s: float, *, is_done: bool) -> None:
        replica.end(call, now_s, is_done=is_done)
        call.is_over = call.is_over or is_done

    def steal(self, now_s: float) -> list[tuple[Call, ReplicaLoad]]:
        """Assign calls in flight to idle replicas too, if they would finish them much sooner."""
        taken: list[tuple[Call, ReplicaLoad]] = []
        thieves = [] if self._groups else list(self._open())
        while thieves and self._num_places() > 0:
            # The least busy replica takes one call, then all are compared again.
            thief = min(thieves, key=lambda replica: replica.num_sequences)
            call = self._worth_stealing(thief, now_s)
            if call is None:
                thieves.remove(thief)
                continue
            thief.begin(call, now_s)
            taken.append((call, thief))
        return taken

    def _pass(
        self, groups: Sequence[_Group], step: _Dispatch, *, may_spill: bool
    ) -> list[tuple[Call, ReplicaLoad]]:
        """Place the calls that fit, oldest first."""
        placed: list[tuple[Call, ReplicaLoad]] = []
        queue = [(g.first.arrival_s, i, g) for i, g in enumerate(groups) if g.calls]
        heapq.heapify(queue)
        while queue and self._num_places() > 0 and step.has_room():
            _, i, group = heapq.heappop(queue)
            call = group.first
            if not call.is_base and call.arrival_s > step.horizon_s:
                continue
            replica = self._choose(call, step, may_spill=may_spill)
            if replica is None:
                continue
            if group.home is None and not call.is_base and call.affinity is None:
                group.home = replica
                replica.promised += sum(other.work for other in group.calls)
            self._take(group, call)
            replica.begin(call, step.now_s)
            placed.append((call, replica))
            if group.calls:
                heapq.heappush(queue, (group.first.arrival_s, i, group))
        return placed

    def _eligible(self, step: _Dispatch) -> list[_Group]:
        """Return the groups that need no slot or may get one."""
        if any(len(replica.active) < replica.max_loras for replica in step.replicas):
            return list(self._groups.values())
        active = {ref for replica in step.replicas for ref in replica.active}
        groups = []
        for ref, group in self._groups.items():
            first = group.first
            if first.is_base or ref in active:
                groups.append(group)
            else:
                step.horizon_s = min(step.horizon_s, first.arrival_s + PATIENCE_S)
        return groups

    def _choose(self, call: Call, step: _Dispatch, *, may_spill: bool) -> ReplicaLoad | None:
        """Return where the call goes now; None if it waits, with a reservation made for it."""
        replicas = self._usable(call, step.replicas)
        able = (
            replicas
            if call.is_base
            else [replica for replica in replicas if replica.can_hold(call.ref)]
        )
        kept = step.kept
        some = [x for x in able if x.num_sequences < x.window and kept.get(x, call) is call]
        if not able and not call.is_base:
            step.horizon_s = min(step.horizon_s, call.arrival_s + PATIENCE_S)
        is_by_adapter = not call.is_base and call.affinity is None
        if some and is_by_adapter and any(replica.holds(call.ref) for replica in replicas):
            home = [replica for replica in some if replica.holds(call.ref)]
            may_leave = may_spill and step.now_s - call.arrival_s > SPILL_S
            some = home if home or not may_leave else some
        free = [replica for replica in some if replica.has_room(call)]
        if free:
            return self._by_affinity(free, call, step) or self._soonest(free, call, step.now_s)
        if some and call not in kept.values():
            # The replica that misses the fewest places stays the nearest: every end helps it.
            kept[min(some, key=lambda replica: replica.num_missing(call))] = call
        return None

    def _by_affinity(
        self, free: Sequence[ReplicaLoad], call: Call, step: _Dispatch
    ) -> ReplicaLoad | None:
        """Return the home of the call's affinity if it has room and less than its share of the
        work. An affinity without a home gets one among the replicas that are home to the fewest."""
        if call.affinity is None:
            return None
        home = self._homes.find(call.affinity, step.now_s)
        if home is None:
            home = self._soonest(self._homes.with_fewest(free), call, step.now_s)
            assert home is not None
            self._homes.settle(call.affinity, home, step.now_s)
        is_behind = home.work / self._speed(home, step.now_s) >= self._fair_s(step)
        return home if home in free and not is_behind else None

    def _fair_s(self, step: _Dispatch) -> float:
        """Seconds that all work, waiting included, takes if no replica idles before the others."""
        work = self._waiting_work + sum(replica.work for replica in step.replicas)
        return work / sum(self._speed(replica, step.now_s) for replica in step.replicas)

    def _usable(self, call: Call, replicas: list[ReplicaLoad]) -> list[ReplicaLoad]:
        """Return the replicas that serve such calls; those that lost this call only if all did."""
        if not call.is_base:
            replicas = [replica for replica in replicas if replica.max_loras]
        if not call.tried:
            return replicas
        return [replica for replica in replicas if replica.name not in call.tried] or replicas

    def _num_places(self) -> float:
        """Number of calls that may be sent before one ends."""
        return self._max_calls - sum(len(replica.in_flight) for replica in self.replicas)

    def _soonest(
        self, replicas: Sequence[ReplicaLoad], call: Call, now_s: float
    ) -> ReplicaLoad | None:
        if len(replicas) < 2:
            return replicas[0] if replicas else None
        return min(replicas, key=lambda replica: self._cost(replica, call, now_s))

    def _cost(self, replica: ReplicaLoad, call: Call, now_s: float) -> float:
        """Return the seconds until the call would be done, plus the seconds of work it adds."""
        work = replica.own_work(call)
        others = replica.foreign * call.work / max(call.num_sequences, 1)
        load_s = 0.0 if call.is_base or replica.holds(call.ref) else LOAD_S
        speed = self._speed(replica, now_s)
        return (replica.work + replica.promised + others + 2 * work) / speed + load_s

    def _speed(self, replica: ReplicaLoad, now_s: float) -> float:
        """Return the measured speed; before one is measured, the average of the others if known."""
        speed = replica.speed(now_s)
        if speed is not None and replica.has_measured:
            return speed
        known = [s for x in self.replicas if x.has_measured and (s := x.speed(now_s)) is not None]
        average = sum(known) / len(known) if known else 1e6
        return average if speed is None else min(speed, average)

    def _worth_stealing(self, thief: ReplicaLoad, now_s: float) -> Call | None:
        """Return the call that gains most from also running on `thief`."""
        paces = [replica.pace for replica in self.replicas if replica.pace is not None]
        if not paces:
            return None
        average = sum(paces) / len(paces)
        best: tuple[float, Call | None] = (STEAL_S, None)
        for victim in self._open():
            if victim is thief or not victim.in_flight:
                continue
            # The call sent last is served last.
            call = next((c for c in reversed(victim.in_flight) if self._may_steal(c, thief)), None)
            if call is None or not self._is_behind(victim, thief, call, now_s):
                continue
            load_s = 0.0 if call.is_base or thief.holds(call.ref) else LOAD_S
            there_s = (thief.pace_now() or average) * call.work + load_s
            elapsed_s = now_s - victim.in_flight[call][0]
            due_s = (victim.pace or average) * call.work - elapsed_s
            # An overdue call may take as long again; half of the work in flight is still undone.
            left_s = due_s if due_s > 0 else elapsed_s
            left_s = max(left_s, 0.5 * victim.alone() / self._speed(victim, now_s))
            is_home = call.affinity is not None and self._homes.find(call.affinity, now_s) is victim
            gain_s = left_s - (STEAL_GAIN_HOME if is_home else STEAL_GAIN) * there_s
            if gain_s > best[0]:
                best = (gain_s, call)
        return best[1]

    def _is_behind(self, victim: ReplicaLoad, thief: ReplicaLoad, call: Call, now_s: float) -> bool:
        """True if the victim would still finish later than the thief if the thief took the call."""
        theirs = (thief.work + call.work) / self._speed(thief, now_s)
        return victim.alone() / self._speed(victim, now_s) > theirs

    def _may_steal(self, call: Call, thief: ReplicaLoad) -> bool:
        return (
            len(call.replicas) == 1
            and call.stream is None  # two servers would stream two answers
            and not call.is_over
            and thief.name not in call.tried
            and thief.has_room(call)
            and (call.is_base or thief.can_hold(call.ref))
        )

    def _open(self) -> Iterable[ReplicaLoad]:
        return (replica for replica in self.replicas if replica.is_open)

    def _take(self, group: _Group, call: Call) -> None:
        del group.calls[call]
        self._waiting_work -= call.work
        if group.home is not None:
            group.home.promised = max(0.0, group.home.promised - call.work)
        if not group.calls:
            self._groups.pop(call.ref, None)
        if not self._groups:
            self._waiting_work = 0.0

    def _leave_closed_homes(self) -> None:
        for group in self._groups.values():
            if group.home is not None and not group.home.is_open:
                group.home.promised = 0.0
                group.home = None
