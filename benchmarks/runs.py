"""How long an append waits for the disk: one at a time, and 500 at the same time.

    python benchmarks/runs.py [--folder DIR]      takes seconds

The last column is the longest pause of the event loop. The journal is measured beside the event
log. The bare line is one write and one fsync of the same bytes.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rookery.runs import Run

NUM_ALONE = 100
NUM_TOGETHER = 500
PAYLOAD = {"number": 7, "state": "evaluated", "epoch": 1, "data": {"score": 0.5, "text": "x" * 200}}


async def main(folder: Path) -> None:
    print(f"{'':<12} {'alone ms':>9} {'of 500 ms each':>15} {'longest pause of the loop ms':>29}")
    print(f"{'bare fsync':<12} {1000 * _bare_s(folder):>9.2f}")
    with Run.create(folder, kind="benchmark", config={}) as run:
        journal = run.open_journal()
        data = b"x" * 300
        for name, append in (
            ("event log", lambda: run.append("attempt", PAYLOAD)),
            ("journal", lambda: journal.append(data)),
        ):
            alone_s, together_s, pause_s = await _measure(append)
            alone, together, pause = 1000 * alone_s, 1000 * together_s, 1000 * pause_s
            print(f"{name:<12} {alone:>9.2f} {together:>15.3f} {pause:>29.1f}")


async def _measure(append: Callable[[], Awaitable[object]]) -> tuple[float, float, float]:
    await append()
    start = time.perf_counter()
    for _ in range(NUM_ALONE):
        await append()
    alone_s = (time.perf_counter() - start) / NUM_ALONE
    pauses = asyncio.create_task(_longest_pause_s())
    start = time.perf_counter()
    await asyncio.gather(*(append() for _ in range(NUM_TOGETHER)))
    together_s = (time.perf_counter() - start) / NUM_TOGETHER
    pauses.cancel()
    return alone_s, together_s, await pauses


async def _longest_pause_s() -> float:
    longest, last = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


def _bare_s(folder: Path) -> float:
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start = time.perf_counter()
    for _ in range(NUM_ALONE):
        os.write(descriptor, b"x" * 300)
        os.fsync(descriptor)
    seconds = (time.perf_counter() - start) / NUM_ALONE
    os.close(descriptor)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as made:
        asyncio.run(main(Path(made)))
