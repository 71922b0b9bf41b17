from hypothesis import given
from hypothesis import strategies as st

from rookery.search.fitness import Fitness, first_front
from rookery.search.programs.ranking import Front
from rookery.seeding import stream

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
