import pytest

from rookery.search.programs.database import Ask, Tell, Window


def steps_of(window: Window[str]) -> list[str]:
    found = []
    while (step := window.next_step()) is not None:
        found.append(f"ask {step.attempt}" if isinstance(step, Ask) else f"tell {step.attempt}")
    return found


def test_attempt_k_is_asked_after_exactly_the_tells_up_to_k_minus_width() -> None:
    window: Window[str] = Window(width=3, num_attempts=5)
    assert steps_of(window) == ["ask 1", "ask 2", "ask 3"]
    window.decide(3, "c")
    window.decide(2, "b")
    assert steps_of(window) == []
    assert window.num_waiting == 2
    window.decide(1, "a")
    assert steps_of(window) == ["tell 1", "ask 4", "tell 2", "ask 5", "tell 3"]
    window.decide(5, "e")
    window.decide(4, "d")
    assert steps_of(window) == ["tell 4", "tell 5"]


def test_the_first_result_of_an_attempt_counts() -> None:
    window: Window[str] = Window(width=1, num_attempts=2)
    assert window.next_step() == Ask(attempt=1)
    window.decide(1, "first")
    window.decide(1, "second")
    assert window.next_step() == Tell(attempt=1, result="first")
    window.decide(1, "third")
    assert window.next_step() == Ask(attempt=2)
    assert window.next_step() is None


def test_a_window_has_width_and_decides_what_was_asked() -> None:
    with pytest.raises(ValueError, match="1 or above"):
        Window(width=0, num_attempts=1)
    with pytest.raises(ValueError, match="before it was asked"):
        Window[str](width=1, num_attempts=1).decide(1, "a")
