"""Wire format of plain data between the evaluator's process and the program's.

The program sends JSON with the marks below. The evaluator parses it and never unpickles it, so no
object that the program made reaches the evaluator. Values that are not plain become references.

    (1, 2.5)                {"t": [1, 2.5]}
    {"a": 1}                {"d": ["a", 1]}
    numpy.zeros(2)          {"n": ["<f8", [2], 0, 16]}          bytes 0 to 16 after the JSON
    a function              {"r": [17, "solve", "call"]}        the 17th referenced object
"""

import base64
import json
import re
import socket
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

__all__ = ["MAX_MESSAGE_BYTES", "decode", "encode", "receive", "send"]

MAX_MESSAGE_BYTES = 1 << 28
"""Limit on one message; a longer one is refused before it is read."""
Refer = Callable[[Any], list[Any]]
_SCALARS = frozenset({type(None), bool, int, float, str})
_DTYPE = re.compile(r"[<>|=]?([biufcmM?SU]\d+)(\[\w+\])?")
_COLLECTIONS = ("collections", "builtins")


def encode(value: Any, refer: Refer) -> bytes:
    """Encode a value. `refer` returns the number, name and kind of an object that is not plain."""
    arrays = bytearray()
    text = json.dumps(_mark(value, _Marker(refer, arrays))).encode()
    return len(text).to_bytes(8, "big") + text + arrays


def decode(data: bytes, resolve: Callable[[int, str, str], Any]) -> Any:
    """Decode a message. `resolve` makes the stand-in for a reference."""
    end = 8 + int.from_bytes(data[:8], "big")
    arrays = memoryview(data)[end:]

    def restore(marked: dict[str, Any]) -> Any:
        [(mark, data)] = marked.items()
        if mark == "r":
            return resolve(*data)
        return _array(data, arrays) if mark == "n" else _RESTORE[mark](data)

    return json.loads(data[8:end], object_hook=restore)


def send(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(8, "big") + data)


def receive(source: socket.socket) -> bytes:
    """Return the next message; EOFError if the other side is gone."""
    size = int.from_bytes(_read(source, 8), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"A value of more than {MAX_MESSAGE_BYTES} bytes.")
    return bytes(_read(source, size))


def _read(source: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        chunk = source.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return data


class _Marker:
    """Destination of array bytes, and the callback that numbers references."""

    def __init__(self, refer: Refer, arrays: bytearray) -> None:
        self.refer = refer
        self._arrays = arrays

    def add(self, array: Any) -> list[Any]:
        start = len(self._arrays)
        self._arrays += array.tobytes()
        return [array.dtype.str, array.shape, start, len(self._arrays)]


def _mark(value: Any, to: _Marker) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return value if _SCALARS.issuperset(map(type, value)) else _mark_all(value, to)
    if kind is tuple:
        return {"t": _mark_all(value, to)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and _DTYPE.fullmatch(value.dtype.str):
        return {"n": to.add(value)}
    if numpy is not None and isinstance(value, numpy.generic) and _DTYPE.fullmatch(value.dtype.str):
        return {"g": {"n": to.add(value)}}
    return _mark_other(value, kind, to)


def _mark_other(value: Any, kind: type, to: _Marker) -> Any:
    if isinstance(value, dict):
        pairs = [part for pair in value.items() for part in pair]
        return {"d" if kind.__module__ in _COLLECTIONS else "D": _mark_all(pairs, to)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"T": [kind.__name__, list(kind._fields), _mark_all(value, to)]}
    if kind in (set, frozenset):
        return {"s" if kind is set else "f": _mark_all(value, to)}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "B": _text(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    bases: tuple[type, ...] = (int, float, str, list, tuple)
    for base in bases:
        if isinstance(value, base):
            return _mark(base(value), to)
    return {"r": to.refer(value)}


def _mark_all(values: Any, to: _Marker) -> list[Any]:
    return [_mark(value, to) for value in values]


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _array(header: list[Any], arrays: memoryview) -> Any:
    import numpy

    dtype, shape, start, end = header
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"An array of {dtype!r}.")
    return numpy.frombuffer(arrays[start:end], dtype=dtype).reshape(shape).copy()


class _Record(dict[Any, Any]):
    """A dict whose items are also attributes, like scipy's results."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "g": lambda data: data[()],
    "d": _pairs,
    "D": lambda data: _Record(_pairs(data)),
    "T": lambda data: namedtuple(data[0], data[1])(*data[2]),
    "s": set,
    "f": frozenset,
    "b": base64.b64decode,
    "B": lambda data: bytearray(base64.b64decode(data)),
    "c": lambda data: complex(*data),
}
