"""The name of a signal for messages; any number has one."""

import signal

__all__ = ["signal_name"]


def signal_name(number: int) -> str:
    """`SIGKILL`; for a real-time signal, which has no name in Python, its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
