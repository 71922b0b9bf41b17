"""Routing decisions on a clock of the test's own: invariants over random traffic, and the rules."""

import asyncio
import heapq
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.fleet.http.wire import Fields
from rookery.fleet.routing.health import LONGEST_PAUSE_S, Breaker
from rookery.fleet.routing.load import (
    PREFIX_TOKENS,
    Call,
    PromptRequest,
    ReplicaLoad,
    Spread,
    make_batches,
    prefix_hashes,
)
from rookery.fleet.routing.paused import CallExclusion
from rookery.fleet.routing.router import HOME_S, PATIENCE_S, SPILL_S, Router
from rookery.types import ModelRef, TokenIds

BASE = ModelRef(name="base", version="m")


def adapter(i: int) -> ModelRef:
    return ModelRef(name=f"a{i}", version="1")


def make_call(
    ref: ModelRef, at: float = 0.0, prompt: TokenIds = (1, 2), new: int = 8, n: int = 1
) -> Call:
    return Call(
        ref=ref,
        is_base=ref == BASE,
        fields=Fields(max_tokens=new, n=n),
        prompts=(prompt,),
        arrival_s=at,
        prefix=prefix_hashes(ref, prompt),
    )


class Simulation:
    """Servers that take `seconds` per call, as many at a time as they are given."""

    def __init__(self, replicas: list[ReplicaLoad], seconds: dict[str, float]) -> None:
        self.router = Router(replicas)
        self.now = 0.0
        self.done: list[Call] = []
        self._seconds = seconds
        self._events: list[tuple[float, int, Call, ReplicaLoad]] = []
        self._ids = itertools.count()

    def step(self) -> None:
        for call, replica in (*self.router.dispatch(self.now), *self.router.steal(self.now)):
            assert len(replica.active) <= replica.max_loras
            assert replica.num_sequences <= replica.window or len(replica.in_flight) == 1
            if not call.is_base:
                replica.resident[call.ref] = None
            due = self.now + self._seconds[replica.name]
            heapq.heappush(self._events, (due, next(self._ids), call, replica))

    def run(self) -> None:
        self.step()
        while self._events:
            self.now, _, call, replica = heapq.heappop(self._events)
            if replica in call.replicas:
                if not call.is_over:
                    self.done.append(call)
                self.router.end(call, replica, self.now, is_done=True)
                for other in list(call.replicas):
                    self.router.end(call, other, self.now, is_done=False)
            self.step()


@given(
    refs=st.lists(st.integers(-1, 9), min_size=1, max_size=80),
    windows=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    slots=st.integers(1, 4),
    slow=st.floats(1, 10),
    num_affinities=st.integers(0, 5),
)
def test_every_call_is_done_once_within_the_limits(
    refs: list[int], windows: list[int], slots: int, slow: float, num_affinities: int
) -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=w, max_loras=slots) for i, w in enumerate(windows)]
    simulation = Simulation(replicas, {replica.name: 1.0 for replica in replicas} | {"s0": slow})
    calls = [make_call(BASE if i < 0 else adapter(i)) for i in refs]
    for i, call in enumerate(calls):
        call.affinity = i % num_affinities if num_affinities else None
        simulation.router.add(call)
    simulation.run()
    assert len(simulation.done) == len(calls) and set(simulation.done) == set(calls)
    for replica in replicas:
        assert not replica.in_flight and not replica.active and replica.num_sequences == 0
        assert replica.work == 0 and replica.promised < 1e-6
    assert simulation.router.num_waiting == 0


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    replica = ReplicaLoad(name="s", window=4, max_loras=1)
    router = Router([replica])
    starved = make_call(adapter(1), at=0.1)
    now, waiting, served_at = 0.0, True, None
    router.add(make_call(adapter(0), at=0.0))
    router.add(starved)
    for tick in range(200):
        now = tick * 0.1
        router.add(make_call(adapter(0), at=now))
        for call, _ in router.dispatch(now):
            if call is starved:
                served_at, waiting = now, False
        for call in list(replica.in_flight):
            if now - replica.in_flight[call][0] >= 0.3:
                router.end(call, replica, now, is_done=True)
        if not waiting:
            break
    assert served_at is not None and served_at <= 0.1 + PATIENCE_S + 1.0


class BusyClients:
    """Clients that send a call of one sequence each, and the next when it is done: the replicas are
    always full, and their calls never end at the same time."""

    def __init__(self, router: Router, refs: list[ModelRef]) -> None:
        self.router = router
        self.now, self.num_served = 0.0, 0
        self._ends: list[tuple[float, int, Call, ReplicaLoad]] = []
        self._ids = itertools.count()
        for ref in refs:
            router.add(make_call(ref))

    def serve_until(self, wanted: Call, limit_s: float) -> float:
        """How long the wanted call, which comes now, waits among the others."""
        wanted.arrival_s = self.now
        self.router.add(wanted)
        began_s = self.now
        while self.now - began_s < limit_s:
            if self._dispatch(wanted):
                return self.now - began_s
            self.now, _, call, replica = heapq.heappop(self._ends)
            self.router.end(call, replica, self.now, is_done=True)
            self.num_served += 1
            if call.num_sequences == 1:
                self.router.add(make_call(call.ref, at=self.now))
        raise AssertionError(f"it waited {limit_s:g} s while {self.num_served} calls were served")

    def _dispatch(self, wanted: Call) -> bool:
        placed = self.router.dispatch(self.now)
        for call, replica in placed:
            due_s = self.now + 0.2 + 0.01 * (next(self._ids) % 20)
            heapq.heappush(self._ends, (due_s, next(self._ids), call, replica))
        return any(call is wanted for call, _ in placed)


@given(
    n=st.sampled_from([2, 8, 16, 40]),
    windows=st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3),
    is_base=st.booleans(),
    crowd=st.lists(st.sampled_from([BASE, adapter(0), adapter(1)]), min_size=100, max_size=120),
)
def test_wide_calls_do_not_wait_for_younger_narrow_ones(
    n: int, windows: list[int], is_base: bool, crowd: list[ModelRef]
) -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=w, max_loras=4) for i, w in enumerate(windows)]
    full = BusyClients(Router(replicas), crowd)
    warm = make_call(BASE)
    full.serve_until(warm, 60.0)
    wide = make_call(BASE if is_base else adapter(9), n=n)
    # The older ones go first: a hundred of them, at least eight at a time, 0.4 s each at most.
    limit_s = 0.4 * (len(crowd) / sum(windows) + 2)
    assert full.serve_until(wide, 60.0) <= limit_s


def test_a_wide_call_keeps_one_lane_and_the_others_go_on() -> None:
    a, b = (
        ReplicaLoad(name="a", window=8, max_loras=1),
        ReplicaLoad(name="b", window=8, max_loras=1),
    )
    router = Router([a, b])
    for _ in range(12):
        router.add(make_call(BASE))
    assert len(router.dispatch(0.0)) == 12
    wide = make_call(BASE, at=1.0, n=8)
    router.add(wide)
    for _ in range(8):
        router.add(make_call(adapter(0), at=2.0))
    placed = router.dispatch(2.0)
    assert len(placed) == 2 and len({replica.name for _, replica in placed}) == 1
    other = next(replica for replica in (a, b) if replica is not placed[0][1])
    for call in list(other.in_flight):
        router.end(call, other, 3.0, is_done=True)
    assert router.dispatch(3.0)[0] == (wide, other)


def test_no_more_calls_are_in_flight_than_there_are_connections() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=100, max_loras=1) for i in range(2)]
    router = Router(replicas, max_calls=7)
    for _ in range(20):
        router.add(make_call(BASE))
    first = router.dispatch(0.0)
    assert len(first) == 7 and router.dispatch(1.0) == [] and router.num_waiting == 13
    router.end(*first[0], 2.0, is_done=True)
    assert len(router.dispatch(2.0)) == 1


def test_an_adapter_is_spread_only_when_its_home_is_full_for_long() -> None:
    a, b = (
        ReplicaLoad(name="a", window=2, max_loras=2),
        ReplicaLoad(name="b", window=2, max_loras=2),
    )
    router = Router([a, b])
    a.resident[adapter(0)] = None
    for _ in range(4):
        router.add(make_call(adapter(0)))
    assert [replica.name for _, replica in router.dispatch(0.0)] == ["a", "a"]
    assert router.dispatch(SPILL_S / 2) == []
    assert [replica.name for _, replica in router.dispatch(SPILL_S * 1.1)] == ["b", "b"]


def test_new_adapters_are_dealt_to_the_least_loaded() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=100, max_loras=8) for i in range(4)]
    router = Router(replicas)
    for i in range(8):
        for _ in range(5):
            router.add(make_call(adapter(i)))
    homes: dict[ModelRef, set[str]] = {}
    for call, replica in router.dispatch(0.0):
        homes.setdefault(call.ref, set()).add(replica.name)
    assert all(len(names) == 1 for names in homes.values())
    assert set(Counter(next(iter(n)) for n in homes.values()).values()) == {2}


def test_a_long_shared_prefix_outweighs_a_little_load_but_not_much() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=10_000, max_loras=1) for i in range(2)]
    router = Router(replicas)
    prefix = tuple(range(10 * PREFIX_TOKENS))
    router.add(make_call(BASE, prompt=(*prefix, 0), new=1))
    [(_, first)] = router.dispatch(0.0)
    placed = []
    for i in range(1000):
        router.add(make_call(BASE, prompt=(*prefix, i), new=1))
        placed += [replica for _, replica in router.dispatch(0.0)]
    assert all(replica is first for replica in placed[:5])
    assert any(replica is not first for replica in placed), "a heap of work is shared all the same"


def test_prefixes_are_known_per_model_and_by_whole_blocks() -> None:
    prompt = tuple(range(3 * PREFIX_TOKENS))
    assert len(prefix_hashes(BASE, prompt)) == 3
    assert prefix_hashes(BASE, prompt[:-1]) == prefix_hashes(BASE, prompt)[:2]
    assert not set(prefix_hashes(BASE, prompt)) & set(prefix_hashes(adapter(0), prompt))
    assert prefix_hashes(BASE, (9, *prompt[1:]))[2] != prefix_hashes(BASE, prompt)[2]


def test_lost_calls_go_elsewhere_while_there_is_an_elsewhere() -> None:
    a, b = (
        ReplicaLoad(name="a", window=4, max_loras=1),
        ReplicaLoad(name="b", window=4, max_loras=1),
    )
    router = Router([a, b])
    call = make_call(BASE)
    call.tried.add("a")
    router.add(call, is_first=True)
    assert router.dispatch(0.0) == [(call, b)]
    router.end(call, b, 1.0, is_done=False)
    b.is_open = False
    router.add(call, is_first=True)
    assert router.dispatch(2.0) == [(call, a)]


def test_a_call_is_stolen_at_most_once_and_only_for_a_gain() -> None:
    slow, quick = (
        ReplicaLoad(name="slow", window=4, max_loras=1),
        ReplicaLoad(name="quick", window=4, max_loras=1),
    )
    router = Router([slow, quick])
    for replica, seconds in ((slow, 10.0), (quick, 1.0)):
        done = make_call(BASE)
        replica.begin(done, 0.0)
        router.end(done, replica, seconds, is_done=True)
    call = make_call(BASE)
    slow.begin(call, 20.0)
    assert router.steal(20.0) == [(call, quick)]
    assert router.steal(20.1) == []
    router.end(call, quick, 21.0, is_done=True)
    router.end(call, slow, 21.0, is_done=False)
    fast = make_call(BASE)
    quick.begin(fast, 30.0)
    assert router.steal(30.0) == [], "a slower replica gains nothing"


def affine_call(affinity: object, at: float = 0.0, work: int = 100) -> Call:
    prompt = tuple(range(work))
    return Call(
        ref=BASE,
        is_base=True,
        fields=Fields(max_tokens=1),
        prompts=(prompt,),
        arrival_s=at,
        prefix=(),
        affinity=affinity,
    )


def places(placed: list[tuple[Call, ReplicaLoad]]) -> dict[object, Counter[str]]:
    found: dict[object, Counter[str]] = {}
    for call, replica in placed:
        found.setdefault(call.affinity, Counter())[replica.name] += 1
    return found


def test_every_affinity_has_a_replica_of_its_own_while_all_have_as_much_to_do() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=100, max_loras=1) for i in range(4)]
    router = Router(replicas)
    homes: dict[object, set[str]] = {}
    for step in range(10):
        now = float(step)
        # In another order every time: no chain is always the first.
        for chain in range(4):
            for _ in range(8):
                router.add(affine_call((step + chain) % 4, at=now))
        placed = router.dispatch(now)
        assert len(placed) == 32
        for affinity, names in places(placed).items():
            homes.setdefault(affinity, set()).update(names)
        for call, replica in placed:
            router.end(call, replica, now + 0.5, is_done=True)
    assert all(len(names) == 1 for names in homes.values())
    assert len(set.union(*homes.values())) == 4 == router.num_affinities


def test_fewer_affinities_than_replicas_leave_none_idle() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=100, max_loras=1) for i in range(8)]
    router = Router(replicas)
    for chain in range(3):
        for _ in range(8):
            router.add(affine_call(chain))
    placed = router.dispatch(0.0)
    assert [len(replica.in_flight) for replica in replicas] == [3] * 8
    assert all(max(names.values()) >= 2 for names in places(placed).values())


def test_an_affinity_moves_when_its_home_is_lost() -> None:
    replicas = [ReplicaLoad(name=f"s{i}", window=100, max_loras=1) for i in range(3)]
    router = Router(replicas)
    router.add(affine_call("x"))
    [(call, home)] = router.dispatch(0.0)
    router.end(call, home, 1.0, is_done=False)
    home.is_open = False
    call.tried.add(home.name)
    router.add(call, is_first=True)
    [(_, second)] = router.dispatch(1.0)
    assert second is not home
    router.end(call, second, 2.0, is_done=True)
    home.is_open = True
    router.add(affine_call("x", at=3.0))
    assert router.dispatch(3.0)[0][1] is second, "it does not move back to a cold cache"


def test_homes_are_forgotten_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.fleet.routing.router.MAX_HOMES", 5)
    replica = ReplicaLoad(name="s", window=1000, max_loras=1)
    router = Router([replica])
    for i in range(20):
        router.add(affine_call(i))
    router.dispatch(0.0)
    assert router.num_affinities == 5
    router.add(affine_call(19, at=HOME_S + 1))
    router.dispatch(HOME_S + 1)
    assert router.num_affinities == 1


def test_the_requests_of_an_affinity_share_calls() -> None:
    def num_prompts(num_servers: int, num_affinities: int, keys: list[object]) -> list[int]:
        entries = [PromptRequest(BASE, Fields(), (1, i), key) for i, key in enumerate(keys)]
        spread = Spread(num_servers=num_servers, num_affinities=num_affinities, max_sequences=32)
        batches = make_batches(entries, base=BASE, spread=spread, now_s=0.0)
        assert sorted(p for batch in batches for p in batch.positions) == list(range(len(keys)))
        for batch in batches:
            assert {keys[p] for p in batch.positions} == {batch.call.affinity}
        return [len(batch.positions) for batch in batches]

    assert num_prompts(8, 8, ["x"] * 32) == [32]
    assert num_prompts(8, 8, ["x", "y"] * 32) == [32, 32]
    assert num_prompts(8, 8, ["x"] * 40) == [32, 8]
    assert len(num_prompts(8, 3, ["x"] * 32)) >= 3, "three such chains keep eight servers busy"
    assert num_prompts(8, 8, [None] * 32) == [1] * 32


def test_a_slow_home_keeps_less() -> None:
    slow, quick = (ReplicaLoad(name=name, window=100, max_loras=1) for name in ("slow", "quick"))
    router = Router([slow, quick])
    router.add(affine_call("x"))
    [(call, home)] = router.dispatch(0.0)
    other = quick if home is slow else slow
    router.end(call, home, 9.0, is_done=True)
    measured = affine_call(None)
    other.begin(measured, 0.0)
    router.end(measured, other, 1.0, is_done=True)
    for _ in range(20):
        router.add(affine_call("x", at=10.0))
    names = places(router.dispatch(10.0))["x"]
    assert names[home.name] == 2 and names[other.name] == 18


def test_calls_wait_by_age_whatever_their_model() -> None:
    replica = ReplicaLoad(name="s", window=1, max_loras=4)
    router = Router([replica])
    refs = [adapter(0), BASE, adapter(1), adapter(0), BASE, adapter(2), adapter(1)]
    calls = [make_call(ref, at=0.1 * i) for i, ref in enumerate(refs)]
    for call in calls:
        router.add(call)
    served = []
    for tick in range(len(calls)):
        [(call, _)] = router.dispatch(1.0 + tick)
        served.append(call)
        router.end(call, replica, 1.5 + tick, is_done=True)
    assert served == calls


# The circuit breaker, on a clock of the test's own.


def test_a_loss_opens_it_once_and_a_success_closes_it() -> None:
    breaker = Breaker()
    assert [breaker.record_loss(now_s=1) for _ in range(3)] == [True, False, False]
    assert breaker.is_open
    breaker.record_success()
    assert not breaker.is_open and breaker.record_loss(now_s=2)


def test_probes_come_at_once_then_later_and_later_up_to_a_limit() -> None:
    breaker = Breaker()
    breaker.record_loss(now_s=10.0)
    now, pauses = 10.0, []
    for _ in range(9):
        assert breaker.should_probe(now_s=now)
        breaker.record_failed_probe(now_s=now)
        assert not breaker.should_probe(now_s=now)
        pauses.append(breaker.probe_at_s - now)
        now = breaker.probe_at_s
    assert pauses[:3] == [0.25, 0.5, 1.0] and pauses[-1] == LONGEST_PAUSE_S
    breaker.record_success()
    assert not breaker.should_probe(now_s=now)
    breaker.record_loss(now_s=now)
    assert breaker.probe_at_s == now + LONGEST_PAUSE_S, "a probe is no answer to a call"
    breaker.record_success()
    breaker.record_answer()
    breaker.record_loss(now_s=now)
    assert breaker.probe_at_s == now


# Two kinds of calls that never meet.


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3), st.booleans())))
def test_kinds_never_meet_and_all_get_their_turn(calls: list[tuple[str, int, bool]]) -> None:
    async def run() -> int:
        exclusion, inside, done = CallExclusion(), {"a": 0, "b": 0, "": 0}, 0

        async def call(kind: str, length: int) -> None:
            nonlocal done
            async with exclusion.take(kind):
                inside[kind] += 1
                try:
                    assert not (inside["a"] and inside["b"])
                    for _ in range(length):
                        await asyncio.sleep(0)
                finally:
                    inside[kind] -= 1
            done += 1

        tasks = [asyncio.create_task(call(kind, length)) for kind, length, _ in calls]
        await asyncio.sleep(0)
        for task, (_, _, is_cancelled) in zip(tasks, calls, strict=True):
            if is_cancelled:
                task.cancel()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [e for e in found if isinstance(e, Exception)]
        assert exclusion.is_idle
        return done

    num_left = sum(not is_cancelled for _, _, is_cancelled in calls)
    assert asyncio.run(run()) >= num_left


async def test_all_that_wait_for_a_kind_have_their_turn_together() -> None:
    exclusion = CallExclusion()
    order: list[str] = []

    async def call(kind: str) -> None:
        async with exclusion.take(kind):
            order.append(kind)
            await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for kind in "abababab":
            group.create_task(call(kind))
    assert order == list("abbbbaaa")
