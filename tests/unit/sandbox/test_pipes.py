"""The reader of what a candidate writes."""

import asyncio
import os

from rookery.sandbox.process_tree import PipeReader


async def test_a_flood_of_lines_is_kept_but_not_followed() -> None:
    """A call for every line would hold up the event loop for seconds."""
    lines: list[bytes] = []
    text = b"one\ntwo\n" + b"\n" * 60_000
    with PipeReader(max_bytes=2**20, on_excess=lines.clear, on_line=lines.append, max_lines=3) as r:
        os.write(r.writer, text)
        r.close_writer()
        async with asyncio.timeout(10.0):
            await r.ended.wait()
    assert lines == [b"one", b"two", b""] and r.kept == text
