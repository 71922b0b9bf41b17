"""The circuit breaker, on a clock of the test's own."""

from rookery.fleet.routing.breaker import LONGEST_PAUSE_S, Breaker


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
