"""Large JSON documents, parsed in slices with room for other threads between them.

    document = await asyncio.to_thread(load_json, body)

`json.loads` of 64 MiB holds the interpreter for seconds, in whatever thread it is called. Here
objects and lists of them are read in Python, and lists of numbers, which is what large bodies are
made of, by `json.loads` a slice at a time.
"""

import json
from collections.abc import Callable
from json.decoder import JSONArray, JSONDecodeError  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

__all__ = ["LARGE_BYTES", "load_json"]

LARGE_BYTES = 1 << 15
"""Smaller documents are parsed at once, in about a millisecond; slices have this many characters.
"""


def load_json(body: bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`."""
    if len(body) <= LARGE_BYTES:
        return json.loads(body, parse_constant=parse_constant)
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    return _Decoder(parse_constant=parse_constant).decode(text)


class _Decoder(json.JSONDecoder):
    def __init__(self, *, parse_constant: Callable[[str], Any] | None) -> None:
        super().__init__(parse_constant=parse_constant)
        self._decode_slice = json.JSONDecoder(parse_constant=parse_constant).decode
        self.parse_array = self._array
        self.scan_once = py_make_scanner(self)

    def _array(
        self, start: tuple[str, int], scan_once: Callable[..., Any]
    ) -> tuple[list[Any], int]:
        """The list behind a `[`, and where it ends."""
        text, place = start
        end = text.find("]", place)
        if end < 0 or any(text.find(mark, place, end) >= 0 for mark in '[{"'):
            values: tuple[list[Any], int] = JSONArray(start, scan_once)
            return values
        numbers: list[Any] = []
        while end - place > LARGE_BYTES:
            cut = text.rfind(",", place, place + LARGE_BYTES)
            if cut < 0:
                break
            numbers += self._slice(text, place, cut)
            place = cut + 1
        is_whole = place == start[1]
        return numbers + self._slice(text, place, end, may_be_empty=is_whole), end + 1

    def _slice(self, text: str, start: int, end: int, *, may_be_empty: bool = False) -> list[Any]:
        try:
            values: list[Any] = self._decode_slice(f"[{text[start:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, text, start + error.pos - 1) from None
        if not values and not may_be_empty:
            raise JSONDecodeError("Expecting value", text, end)
        return values
