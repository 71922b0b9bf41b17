"""The vote: most frequent, ties to the better voter, no answer no vote."""

from rookery.search.vote import vote, vote_tasks


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


def test_a_panel_votes_task_by_task() -> None:
    voters = [{"t1": "a", "t2": "x"}, {"t1": "b", "t2": None}, {"t1": "b", "t3": "z"}, {"t1": "a"}]
    assert vote_tasks(voters, count=3) == {"t1": "b", "t2": "x", "t3": "z"}
    assert vote_tasks(voters, count=1) == {"t1": "a", "t2": "x"}


def last_number(answer: str) -> str | None:
    numbers = [word for word in answer.split() if word.isdigit()]
    return numbers[-1] if numbers else None


def test_answers_that_the_scorer_reads_alike_are_one() -> None:
    answers = ["I get 7", "The answer is 12", "#### 12"]
    assert vote(answers) == "I get 7"
    assert vote(answers, key=last_number) == "The answer is 12"
    assert vote(["none", "none", "it is 3"], key=last_number) == "it is 3"
    assert vote(["none", None], key=last_number) is None


def test_a_key_may_depend_on_the_task() -> None:
    voters = [{"t": "x A", "u": "x A"}, {"t": "y A", "u": "y B"}, {"t": "x B", "u": "z A"}]
    keys = {"t": 0, "u": 1}
    elected = vote_tasks(voters, count=3, key=lambda task, answer: answer.split()[keys[task]])
    assert elected == {"t": "x A", "u": "x A"}
