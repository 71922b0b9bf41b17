"""Signals by name, and those that have none."""

import signal

from rookery.errors import signal_name


def test_every_number_has_a_name() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(40) == "signal 40"
