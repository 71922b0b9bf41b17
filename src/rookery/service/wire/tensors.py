"""Tensors of the protocol as arrays: dense or CSR, from protobuf or JSON.

CSR rows of the tokens [[2, 9], [3, 0]]: values 2 9 3, crow 0 2 3, col 0 1 0. What is not stored is
zero, as the SDK leaves zeros out.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rookery.service.wire.schema import DTYPES
from rookery.service.work import bad

__all__ = ["Array", "json_tensor", "proto_tensor"]

Array = np.ndarray[Any, np.dtype[Any]]
MAX_CELLS = 1 << 26
"""Cells of one tensor: a few bytes of CSR may claim any shape."""

_NAMES = {number: name for name, number in DTYPES.items()}
_NUMPY = {"float32": "<f4", "int64": "<i8", "int32": "<i4", "bfloat16": "<u2"}


def proto_tensor(tensor: Any, *, name: str) -> Array:
    """A Tensor message as float32 or int64."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise bad(f"{name} has no dtype; give one of {', '.join(DTYPES)}.")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        crow = _read(csr.crow_indices, "int64", name=name)
        col = _read(csr.col_indices, "int64", name=name)
        return _from_csr(_read(csr.values, dtype, name=name), crow, col, shape, name)
    return _shaped(_read(tensor.dense, dtype, name=name), shape, name)


def json_tensor(document: Any, *, name: str) -> Array:
    """`{"data": [...], "dtype": "int64", "shape": [3]}`, CSR where it has sparse indices."""
    if not isinstance(document, dict) or "data" not in document:
        raise bad(f"{name} is not a tensor: write data, dtype and shape.")
    dtype = document.get("dtype")
    if dtype not in ("float32", "int64", "int32"):
        raise bad(f"{name} has the dtype {dtype!r:.40}; it is float32, int64 or int32.")
    try:
        values = np.asarray(document["data"], dtype=_NUMPY[dtype]).reshape(-1)
        shape = tuple(int(size) for size in document.get("shape") or (len(values),))
        crow, col = document.get("sparse_crow_indices"), document.get("sparse_col_indices")
        if crow is not None and col is not None:
            rows, cols = np.asarray(crow, dtype="<i8"), np.asarray(col, dtype="<i8")
            return _from_csr(_wide(values, dtype), rows, cols, shape, name)
    except (TypeError, ValueError, OverflowError) as error:
        raise bad(f"{name} has values that are not numbers of its dtype {dtype}.") from error
    return _shaped(_wide(values, dtype), shape, name)


def _read(data: bytes, dtype: str, *, name: str) -> Array:
    try:
        return _wide(np.frombuffer(data, dtype=_NUMPY[dtype]), dtype)
    except ValueError as error:
        raise bad(f"{name} has {len(data)} bytes, which is no number of {dtype}.") from error


def _wide(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":  # the upper half of a float32
        return (values.astype("<u4") << 16).view("<f4")
    return values if dtype == "float32" else values.astype(np.int64)


def _shaped(values: Array, shape: Sequence[int], name: str) -> Array:
    _check_shape(shape or (len(values),), name)
    if math.prod(shape) != len(values) and shape:
        raise bad(f"{name} has {len(values)} values, and its shape {list(shape)} asks for others.")
    return values.reshape(shape or -1)


def _from_csr(values: Array, crow: Array, col: Array, shape: Sequence[int], name: str) -> Array:
    _check_shape(shape, name)
    if len(shape) != 2:
        raise bad(f"{name} is sparse and has the shape {list(shape)}; CSR has two dimensions.")
    counts = np.diff(crow)
    is_fine = (
        len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((counts >= 0).all())
        and (len(col) == 0 or 0 <= int(col.min()) <= int(col.max()) < shape[1])
    )
    if not is_fine:
        raise bad(f"{name} has CSR indices that do not fit its shape {list(shape)}.")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), col] = values
    return dense


def _check_shape(shape: Sequence[int], name: str) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_CELLS:
        raise bad(f"{name} has the shape {list(shape)}; at most {MAX_CELLS:,} values are taken.")
