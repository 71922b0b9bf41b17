"""`logs/` of a run: what Rookery logs while it evolves, in a file as OpenEvolve keeps one.

with log_to_file(config, run.path):
    ...

A thread writes: the event loop does not wait for the file. What programs and servers wrote cannot
colour or move the terminal of whoever reads it.
"""

import logging
import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

from rookery.errors import RunError, boundary
from rookery.loops.evolve.config import EvolveConfig

__all__ = ["log_to_file"]

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and moves of the cursor; of other sequences the control characters go."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


class _PlainFormatter(logging.Formatter):
    """Without terminal escapes and other control characters."""

    def format(self, record: logging.LogRecord) -> str:
        text = _ESCAPES.sub("", super().format(record))
        return "".join(char for char in text if char.isprintable() or char in "\n\t")


@contextmanager
def log_to_file(config: EvolveConfig, folder: Path) -> Iterator[Path]:
    """Append to `logs/evolve.log`, or to the folder of `log_dir`, from `log_level` on."""
    place = Path(config.log_dir) if config.log_dir else folder / "logs"
    with boundary(RunError, f"Opening the log in {place}", foreign=(OSError,)):
        place.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(place / "evolve.log", encoding="utf-8")
    file.setFormatter(_PlainFormatter(FORMAT))
    # Filled by whoever logs, drained by the listener's thread.
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener, handler = QueueListener(lines, file), QueueHandler(lines)
    logger = logging.getLogger("rookery")
    level = logger.level
    handler.setLevel(config.log_level)
    logger.addHandler(handler)
    logger.setLevel(min(logging.getLevelName(config.log_level), logger.getEffectiveLevel()))
    listener.start()
    try:
        yield place / "evolve.log"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        listener.stop()
        file.close()
