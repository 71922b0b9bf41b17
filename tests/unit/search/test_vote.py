"""The vote: most frequent, ties to the better voter, no answer no vote."""

from rookery.search.merit import vote


def test_the_most_frequent_answer_wins() -> None:
    assert vote(["7", "12", "12"]) == "12"
    assert vote(["a", "b", "b", "a", "c"]) == "a"


def test_ties_go_to_the_better_voter() -> None:
    assert vote(["7", "12"]) == "7"
    assert vote(["12", "7"]) == "12"
    assert vote([None, "7", "12", "12", "7"]) == "7"


def test_who_has_no_answer_does_not_vote() -> None:
    assert vote([None, None, "3"]) == "3"
    assert vote([None, None]) is None
    assert vote([]) is None
