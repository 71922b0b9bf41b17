"""Converts tensors on the wire to arrays, and samples on the wire to engine requests and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rookery.remote.messages import (
    DTYPES,
    EMPTY_LOGPROB,
    STOP_REASONS,
    SampleResponse,
    top_rows,
)
from rookery.seeding import stream_seed
from rookery.service.records import SamplingSession
from rookery.service.requests import Sample
from rookery.service.work import Array, Command, DrawWork, PromptScores, bad
from rookery.types import (
    Completion,
    SamplingParams,
    TopLogprobs,
)

__all__ = [
    "encode_samples",
    "json_tensor",
    "proto_tensor",
    "read_draw",
    "samples_as_json",
]


# Tensors of the protocol as arrays: dense or CSR, from protobuf or JSON.
#
# CSR rows of the tokens [[2, 9], [3, 0]]: values 2 9 3, crow 0 2 3, col 0 1 0. Missing values are
# zero, as the SDK leaves zeros out.


MAX_CELLS = 1 << 26
"""Limit on the cells of one tensor: a few bytes of CSR may claim any shape."""

_NAMES = {number: name for name, number in DTYPES.items()}
_NUMPY = {"float32": "<f4", "int64": "<i8", "int32": "<i4", "bfloat16": "<u2"}


def proto_tensor(tensor: Any, *, name: str) -> Array:
    """Read a Tensor message as float32 or int64."""
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
    """Read `{"data": [...], "dtype": "int64", "shape": [3]}`, or CSR if it has sparse indices."""
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


def read_draw(
    work: Command, sampler: SamplingSession, *, max_tokens: Callable[..., int]
) -> DrawWork:
    """Read a sample request. Without a seed, its id gives one: a restart draws the same."""
    request = Sample.model_validate_json(work.body)
    prompt = request.prompt.token_ids()
    options = request.sampling_params
    limit = max_tokens(asked=options.max_tokens, num_prompt=len(prompt))
    has_scores = request.prompt_logprobs or request.topk_prompt_logprobs
    seed = stream_seed(0, work.id) if options.seed is None else options.seed & (2**63 - 1)
    return DrawWork(
        id=work.id,
        tenant=work.tenant,
        base_model=sampler.base_model,
        blob=sampler.blob,
        prompt=prompt,
        params=_sampling_params(request, seed=seed, max_tokens=limit),
        scored=(request.prompt_logprobs_last_n or len(prompt)) if has_scores else 0,
        top_k=request.topk_prompt_logprobs,
        targets=_target_tokens(request, num_prompt=len(prompt)),
        alternatives=request.prompt_alt_tokens_k,
        has_text=request.return_text,
    )


def _sampling_params(request: Sample, *, seed: int, max_tokens: int) -> SamplingParams:
    """Return the engine's parameters. An empty list of stops disables even the end of text."""
    options = request.sampling_params
    stop = options.stop
    texts, tokens = (), ()  # type: tuple[str, ...], tuple[int, ...]
    if isinstance(stop, str):
        texts = (stop,)
    elif stop:
        texts = tuple(one for one in stop if isinstance(one, str))
        tokens = tuple(one for one in stop if isinstance(one, int))
    if "" in texts:
        raise bad("stop has an empty text; leave it out.")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max(options.top_k, 0),
        min_p=options.min_p,
        penalties=options.penalties,
        stop=texts,
        stop_tokens=(*tokens, *options.stop_tokens),
        ignore_eos=options.ignore_eos or (isinstance(stop, list) and not stop),
        seed=seed,
        n=request.num_samples,
        top_logprobs=request.topk_sample_logprobs,
        return_kept=request.return_kept,
    )


def _target_tokens(request: Sample, *, num_prompt: int) -> Array | None:
    """Return [T - 1, K] token ids to score after each prompt position, -1 for none."""
    if request.target_prompt_logprobs is None:
        return None
    targets = json_tensor(request.target_prompt_logprobs, name="target_prompt_logprobs")
    if targets.ndim != 2 or targets.shape[0] != num_prompt - 1 or targets.dtype.kind != "i":
        raise bad(
            f"target_prompt_logprobs has the shape {list(targets.shape)}; for a prompt of "
            f"{num_prompt} tokens it holds whole numbers, [{num_prompt - 1}, K]."
        )
    return targets


def encode_samples(
    completions: Sequence[Completion],
    scores: PromptScores,
    *,
    top_k: int = 0,
    has_text: bool = False,
) -> bytes:
    """Encode a SampleResponse."""
    message = SampleResponse()
    for completion in completions:
        sequence = message.sequences.add(
            stop_reason=STOP_REASONS[completion.finish_reason],
            tokens=np.asarray(completion.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        )
        if top_k:
            _put_top(sequence.topk_sampled_logprobs, completion.top_logprobs, top_k)
        if has_text:
            sequence.text = completion.text
        sequence.kept.extend(np.asarray(row, dtype="<i4").tobytes() for row in completion.kept)
    if scores.logprobs is not None:
        values = [np.nan if value is None else value for value in scores.logprobs]
        message.prompt_logprobs = np.asarray(values, dtype="<f4").tobytes()
    if scores.top is not None:
        _put_top(message.topk_prompt_logprobs, scores.top, scores.top_k)
    if scores.targets is not None:
        _put_tensor(message.target_prompt_logprobs, scores.targets, "float32")
    if scores.alternatives is not None:
        tokens, logprobs = scores.alternatives
        _put_tensor(message.prompt_alt_tokens.tokens, tokens, "int32")
        _put_tensor(message.prompt_alt_tokens.logprobs, logprobs, "float32")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def samples_as_json(payload: bytes) -> dict[str, Any]:
    """Convert a SampleResponse for SDKs that read JSON."""
    message = SampleResponse.FromString(payload)
    names = {number: name for name, number in STOP_REASONS.items()}
    document: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": names[sequence.stop_reason],
                "tokens": np.frombuffer(sequence.tokens, dtype="<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, dtype="<f4").tolist(),
            }
            for sequence in message.sequences
        ],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    }
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, dtype="<f4").tolist()
        document["prompt_logprobs"] = [None if value != value else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        document["topk_prompt_logprobs"] = top_rows(message.topk_prompt_logprobs)
    return document


def _put_top(table: Any, rows: Sequence[TopLogprobs], k: int) -> None:
    """Write rows; cells without a token get id 0 and `EMPTY_LOGPROB`."""
    token_ids = np.zeros((len(rows), k), dtype="<i4")
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, dtype="<f4")
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            token_ids[place, column] = token
            logprobs[place, column] = logprob
    table.token_ids, table.logprobs = token_ids.tobytes(), logprobs.tobytes()
    table.k, table.length = k, len(rows)


def _put_tensor(tensor: Any, array: Array, dtype: str) -> None:
    form = {"float32": "<f4", "int32": "<i4"}[dtype]
    tensor.dense = np.ascontiguousarray(array, dtype=form).tobytes()
    tensor.dtype = DTYPES[dtype]
    tensor.shape.extend(array.shape)
