"""Plain data between the evaluator's process and the program's.

What the program sends is JSON in which these are marked: it is parsed, never unpickled, so that no
object of the program's making reaches the evaluator. All else it sends is a reference.

    (1, 2.5)                {"t": [1, 2.5]}
    {"a": 1}                {"d": ["a", 1]}
    numpy.zeros(2)          {"n": ["<f8", [2], "AAAA..."]}
    a function              {"r": [17, "solve", true]}          the 17th thing that was referred to
"""

import base64
import json
import re
import socket
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

__all__ = ["MAX_MESSAGE_BYTES", "Refer", "decode", "encode", "receive", "send"]

MAX_MESSAGE_BYTES = 1 << 28
"""One value of a program. A longer one is refused, before it is read."""
Refer = Callable[[Any], list[Any]]
_SCALARS = frozenset({type(None), bool, int, float, str})
_DTYPE = re.compile(r"[<>|=]?([biufcmM?SU]\d+)(\[\w+\])?")
_COLLECTIONS = ("collections", "builtins")


def encode(value: Any, refer: Refer) -> bytes:
    """`refer` gives the number, the name and whether it can be called of what is not plain."""
    return json.dumps(_mark(value, refer)).encode()


def decode(data: bytes, resolve: Callable[[int, str, bool], Any]) -> Any:
    """`resolve` makes the object that stands for a reference."""

    def restore(marked: dict[str, Any]) -> Any:
        [(mark, found)] = marked.items()
        return resolve(*found) if mark == "r" else _RESTORE[mark](found)

    return json.loads(data, object_hook=restore)


def send(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(8, "big") + data)


def receive(source: socket.socket) -> bytes:
    """The next message; EOFError when the other side is gone."""
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


def _mark(value: Any, refer: Refer) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return value if _SCALARS.issuperset(map(type, value)) else _mark_all(value, refer)
    if kind is tuple:
        return {"t": _mark_all(value, refer)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and _DTYPE.fullmatch(value.dtype.str):
        return {"n": [value.dtype.str, value.shape, _text(value.tobytes())]}
    if numpy is not None and isinstance(value, numpy.generic) and _DTYPE.fullmatch(value.dtype.str):
        return {"g": [value.dtype.str, [], _text(value.tobytes())]}
    if isinstance(value, dict):
        pairs = [part for pair in value.items() for part in pair]
        return {"d" if kind.__module__ in _COLLECTIONS else "D": _mark_all(pairs, refer)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"T": [kind.__name__, list(kind._fields), _mark_all(value, refer)]}
    if kind in (set, frozenset):
        return {"s" if kind is set else "f": _mark_all(value, refer)}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "B": _text(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    for base in (list, tuple):
        if isinstance(value, base):
            return _mark(base(value), refer)
    return {"r": refer(value)}


def _mark_all(values: Any, refer: Refer) -> list[Any]:
    return [_mark(value, refer) for value in values]


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _array(found: list[Any]) -> Any:
    import numpy

    dtype, shape, data = found
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"An array of {dtype!r}.")
    flat = numpy.frombuffer(base64.b64decode(data), dtype=dtype)
    return flat.reshape(shape).copy()


class _Record(dict[Any, Any]):
    """A dict whose items are attributes too, as scipy's results have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _pairs(found: list[Any]) -> dict[Any, Any]:
    return dict(zip(found[::2], found[1::2], strict=True))


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "t": tuple,
    "n": _array,
    "g": lambda found: _array(found)[()],
    "d": _pairs,
    "D": lambda found: _Record(_pairs(found)),
    "T": lambda found: namedtuple(found[0], found[1])(*found[2]),  # noqa: PYI024 (made at run time)
    "s": set,
    "f": frozenset,
    "b": base64.b64decode,
    "B": lambda found: bytearray(base64.b64decode(found)),
    "c": lambda found: complex(*found),
}
