"""The `rookery` command, also as `python -m rookery`."""

import signal

__all__ = ["main"]


def main() -> None:
    """Load and run the command line. Ctrl-C while it loads ends the process at once."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rookery.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
