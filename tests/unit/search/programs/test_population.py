"""The population against a slow one that computes everything anew from the definitions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.candidate import Fitness, first_front
from rookery.search.programs.island import Front
from rookery.search.programs.population import ProgramPopulation, ProgramPopulationConfig
from rookery.search.programs.program import Member, ScoredProgram, summarize
from rookery.seeding import stream

CONFIG = ProgramPopulationConfig(
    population_size=12,
    archive_size=4,
    num_islands=3,
    feature_dimensions=("complexity", "speed"),
    feature_bins={"complexity": 3, "speed": 2},
    migration_interval=4,
    migration_rate=0.3,
)


@dataclass
class SlowPopulation:
    """Lists and sorting, no index."""

    told: list[Member] = field(default_factory=list)
    alive: dict[str, Member] = field(default_factory=dict)
    islands: list[dict[str, bool]] = field(default_factory=lambda: [{}, {}, {}])
    """{id: whether it came from another island}."""
    holders: list[dict[tuple[int, ...], str]] = field(default_factory=lambda: [{}, {}, {}])
    archive: set[str] = field(default_factory=set)
    children: list[int] = field(default_factory=lambda: [0, 0, 0])
    last_migration: int = 0

    def cell(self, member: Member) -> tuple[int, ...]:
        found = []
        for dimension, bins in enumerate((3, 2)):
            values = [one.features[dimension] for one in self.told]
            low, high = min(values), max(values)
            share = (member.features[dimension] - low) / (high - low) if high > low else 0.5
            found.append(min(bins - 1, int(share * bins)))
        return tuple(found)

    def best_first(self, ids: Iterable[str]) -> list[str]:
        return sorted(ids, key=lambda id: (-self.alive[id].score, self.alive[id].serial))

    def add(self, member: Member) -> None:
        self.told.append(member)
        for island, holders in enumerate(self.holders):
            again: dict[tuple[int, ...], str] = {}
            for id in self.best_first(holders.values()):
                again.setdefault(self.cell(self.alive[id]), id)
            self.holders[island] = again
        self.alive[member.id] = member
        self.place(member, member.record.island, is_migrant=False)
        self.offer(member)
        self.evict(member)
        if member.record.parent is not None:
            self.children[member.record.island] += 1
            if max(self.children) - self.last_migration >= 4:
                self.migrate()

    def place(self, member: Member, island: int, *, is_migrant: bool) -> None:
        cell = self.cell(member)
        holder = self.holders[island].get(cell)
        self.islands[island][member.id] = is_migrant
        if holder is None:
            self.holders[island][cell] = member.id
        elif member.score > self.alive[holder].score:
            self.holders[island][cell] = member.id
            del self.islands[island][holder]
            if not any(holder in there for there in self.islands):
                del self.alive[holder]
                self.archive.discard(holder)

    def offer(self, member: Member) -> None:
        if len(self.archive | {member.id}) <= 4:
            self.archive.add(member.id)
            return
        worst = self.best_first(self.archive)[-1]
        if member.score > self.alive[worst].score:
            self.archive = self.archive - {worst} | {member.id}

    def evict(self, newest: Member) -> None:
        while len(self.alive) > 12:
            stay = {newest.id, *(self.best_first(there)[0] for there in self.islands if there)}
            elites = {id for holders in self.holders for id in holders.values()}
            plain = [id for id in self.best_first(self.alive) if id not in stay | elites]
            rest = [id for id in self.best_first(self.alive) if id not in stay]
            victim = (plain or rest)[-1]
            del self.alive[victim]
            self.archive.discard(victim)
            for there, holders in zip(self.islands, self.holders, strict=True):
                there.pop(victim, None)
                for cell in [cell for cell, id in holders.items() if id == victim]:
                    del holders[cell]

    def migrate(self) -> None:
        self.last_migration = max(self.children)
        moves = []
        for island, there in enumerate(self.islands):
            natives = [id for id in self.best_first(there) if not there[id]]
            for id in natives[: max(1, int(0.3 * len(there)))]:
                moves += [(id, (island + 1) % 3), (id, (island - 1) % 3)]
        for id, target in moves:
            codes = {self.alive[other].record.code.digest for other in self.islands[target]}
            if id in self.alive and self.alive[id].record.code.digest not in codes:
                self.place(self.alive[id], target, is_migrant=True)


def make(serial: int, drawn: tuple[int, int, int, int, bool]) -> Member:
    score, length, speed, island, is_child = drawn
    record = ScoredProgram(
        id=f"p{serial}",
        attempt=serial,
        island=island,
        metrics={"combined_score": score, "speed": speed},
        code=summarize("x" * length),
        parent="p0" if is_child else None,
    )
    return Member(record=record, serial=serial, score=score, features=(float(length), float(speed)))


DRAWN = st.lists(
    st.tuples(
        st.integers(-2, 6),
        st.integers(1, 40),
        st.integers(-20, 20),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=60,
)


def compare(drawn: list[tuple[int, int, int, int, bool]]) -> SlowPopulation:
    fast, slow = ProgramPopulation(CONFIG, state=None), SlowPopulation()
    for serial, values in enumerate(drawn):
        member = make(serial, values)
        fast.add(member)
        slow.add(member)
        state = fast.state
        assert set(fast.members) == set(slow.alive)
        assert [set(island.members) for island in state.islands] == [*map(set, slow.islands)]
        assert [set(island.migrants) for island in state.islands] == [
            {id for id, is_migrant in there.items() if is_migrant} for there in slow.islands
        ]
        assert [island.cells for island in state.islands] == [
            {"-".join(map(str, cell)): id for cell, id in holders.items()}
            for holders in slow.holders
        ]
        assert set(state.archive) == slow.archive
        assert fast.best is not None
        assert fast.best.score == max(one.score for one in slow.told), "the best of all stays"
        for island, there in zip(fast.islands, slow.islands, strict=True):
            best = slow.best_first(there)[0] if there else None
            assert island.best == best
    return slow


@given(DRAWN)
def test_every_index_agrees_with_the_slow_population(
    drawn: list[tuple[int, int, int, int, bool]],
) -> None:
    compare(drawn)


@pytest.mark.parametrize("seed", range(8))
def test_they_agree_over_a_long_run_in_which_scores_and_bounds_grow(seed: int) -> None:
    rng = stream(seed, "drawn")
    drawn = [
        (
            int(rng.integers(-2, 3 + step // 20)),
            int(rng.integers(1, 40 + step // 4)),
            int(rng.integers(-20 - step // 10, 20)),
            int(rng.integers(3)),
            bool(rng.random() < 0.8),
        )
        for step in range(200)
    ]
    slow = compare(drawn)
    assert slow.last_migration > 0
    assert any(any(there.values()) for there in slow.islands)


def test_one_number_of_bins_gives_at_least_the_cells_of_the_archive() -> None:
    assert ProgramPopulationConfig(feature_bins=3, archive_size=100).bins == (10, 10)
    assert ProgramPopulationConfig(feature_bins=12, archive_size=100).bins == (12, 12)
    assert ProgramPopulationConfig(feature_bins={"diversity": 4}).bins == (10, 4)


POINTS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=40)


@given(POINTS)
def test_one_at_a_time_gives_the_first_front_of_all(points: list[tuple[int, int, int]]) -> None:
    front, dropped = Front(size=1000), set()
    for place, point in enumerate(points):
        change = front.add(str(place), point)
        assert change.is_member == (str(place) in front)
        assert not {*change.removed} & {*front.ids}
        dropped |= {*change.removed} | (set() if change.is_member else {str(place)})
    assert {*front.ids} | dropped == {str(place) for place in range(len(points))}
    first = first_front([Fitness(score=0, objectives=point) for point in points])
    assert {points[int(id)] for id in front.ids} == {points[place] for place in first}
    # Of equal ones the first stays.
    assert all(points.index(points[int(id)]) == int(id) for id in front.ids)


def test_a_full_front_drops_its_most_crowded_member() -> None:
    front = Front(size=4)
    for id, x in (("a", 0.0), ("b", 1.0), ("c", 0.5), ("d", 0.6)):
        front.add(id, (x, 1 - x))
    assert front.add("e", (0.9, 0.1)).removed == ("d",)  # between 0.5 and 0.9; c has 0 to 0.6
    assert front.ids == ("a", "b", "c", "e")


def test_a_member_that_was_dropped_for_a_newcomer_is_named() -> None:
    front = Front(size=2)
    front.add("a", (0.0, 1.0))
    front.add("b", (1.0, 0.0))
    change = front.add("c", (0.5, 0.5))
    assert (change.is_member, change.removed, front.ids) == (False, (), ("a", "b"))
    change = front.add("d", (2.0, 2.0))
    assert (change.is_member, change.removed, front.ids) == (True, ("a", "b"), ("d",))


def test_draws_prefer_the_less_crowded_and_stay_among_those_named() -> None:
    front = Front(size=10)
    for id, x in (("left", 0.0), ("near", 0.1), ("nearer", 0.15), ("right", 1.0)):
        front.add(id, (x, 1 - x))
    rng = stream(0, "front")
    drawn = [front.draw(rng, among=front.ids) for _ in range(400)]
    assert drawn.count("left") + drawn.count("right") > 250
    assert {front.draw(rng, among={"near"}) for _ in range(20)} == {"near"}
    assert len({front.draw(rng, among=()) for _ in range(50)}) > 1
