"""The circuit breaker, on a clock of the test's own."""

from rookery.fleet.breaker import LONGEST_PAUSE_S, Breaker


def test_slow_answers_open_it_after_three_and_a_broken_connection_at_once() -> None:
    slow = Breaker()
    assert [slow.record_loss(now_s=1, is_broken=False) for _ in range(4)] == [
        False, False, True, False,
    ]  # fmt: skip
    broken = Breaker()
    assert broken.record_loss(now_s=1, is_broken=True) and broken.is_open


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.record_loss(now_s=1, is_broken=False)
        breaker.record_loss(now_s=1, is_broken=False)
        breaker.record_success()
    assert not breaker.is_open


def test_probes_come_at_once_then_later_and_later_up_to_a_limit() -> None:
    breaker = Breaker()
    breaker.record_loss(now_s=10.0, is_broken=True)
    now, pauses = 10.0, []
    for _ in range(9):
        assert breaker.should_probe(now_s=now)
        breaker.record_failed_probe(now_s=now)
        assert not breaker.should_probe(now_s=now)
        pauses.append(breaker.probe_at_s - now)
        now = breaker.probe_at_s
    assert pauses[:3] == [0.25, 0.5, 1.0] and pauses[-1] == LONGEST_PAUSE_S
    breaker.record_success()
    assert not breaker.should_probe(now_s=now) and breaker.pause_s == 0.25
