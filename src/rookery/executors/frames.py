"""Messages over a pipe: a line of JSON, then as many bytes as its `size` says.

{"kind": "job", "size": 5}\\nhello
"""

import asyncio
import json
from dataclasses import dataclass
from typing import BinaryIO

from rookery.types import Json

__all__ = ["Frame", "read_frame", "receive_frame", "write_frame"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Json]
    content: bytes = b""

    def encode(self) -> bytes:
        header = {**self.header, "size": len(self.content)}
        return json.dumps(header).encode() + b"\n" + self.content


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Write and flush."""
    stream.write(frame.encode())
    stream.flush()


def read_frame(stream: BinaryIO) -> Frame:
    """Blocks. Raises EOFError when the other end is closed."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header = json.loads(line)
    content = stream.read(header["size"])
    if len(content) < header["size"]:
        raise EOFError
    return Frame(header, content)


async def receive_frame(stream: asyncio.StreamReader) -> Frame:
    """Raises EOFError when the other end is closed, ConnectionError when it sends no frame."""
    try:
        header = json.loads(await stream.readuntil(b"\n"))
        return Frame(header, await stream.readexactly(header["size"]))
    except asyncio.IncompleteReadError:
        raise EOFError from None
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ConnectionError(f"Not a frame: {error}") from error
