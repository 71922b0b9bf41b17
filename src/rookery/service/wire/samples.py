"""Samples on the wire: prompts and options -> requests to the engine, its answers -> a body."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rookery.service.wire.requests import Prompt, Sample
from rookery.service.wire.schema import DTYPES, STOP_REASONS, Array, SampleResponse, json_tensor
from rookery.service.work import bad
from rookery.types import (
    Completion,
    FinishReason,
    KeptTokens,
    ModelRef,
    SamplingParams,
    TokenIds,
    TopLogprobs,
)

__all__ = [
    "PromptScores",
    "encode_samples",
    "prompt_tokens",
    "read_completions",
    "samples_as_json",
    "sampling_params",
    "target_tokens",
]

EMPTY_LOGPROB = -99999.0
"""What the SDK reads as an empty cell of a top-k table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What was asked about the prompt; None where it was not."""

    logprobs: Sequence[float | None] | None = None
    top: Sequence[TopLogprobs] | None = None
    top_k: int = 0
    targets: Array | None = None
    """[T - 1, K], NaN where nothing was asked."""
    alternatives: tuple[Array, Array] | None = None
    """Drawn tokens and their log-probabilities, [T - 1, K] each."""


def prompt_tokens(prompt: Prompt) -> TokenIds:
    """The prompt, or a refusal of what is not text."""
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise bad(
                f"The prompt has a chunk {chunk.type!r:.40}; this service takes encoded_text."
            )
    tokens = tuple(token for chunk in prompt.chunks for token in chunk.tokens)
    if not tokens:
        raise bad("The prompt has no tokens; give at least one.")
    return tokens


def sampling_params(request: Sample, *, seed: int, max_tokens: int) -> SamplingParams:
    """The engine's parameters. An empty list of stops means none, not even the end of text."""
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


def target_tokens(request: Sample, *, num_prompt: int) -> Array | None:
    """[T - 1, K] token ids to score after each prompt position, -1 for none."""
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
    """A SampleResponse."""
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


def read_completions(payload: bytes, *, model: ModelRef) -> tuple[Completion, ...]:
    """What Rookery's own client makes of a SampleResponse with texts."""
    names: dict[int, FinishReason] = {0: "stop", 1: "length"}
    return tuple(
        Completion(
            model=model,
            tokens=tuple(np.frombuffer(sequence.tokens, dtype="<i4").tolist()),
            logprobs=tuple(np.frombuffer(sequence.logprobs, dtype="<f4").tolist()),
            text=sequence.text,
            finish_reason=names[sequence.stop_reason],
            top_logprobs=_read_top(sequence.topk_sampled_logprobs),
            kept=KeptTokens.of([np.frombuffer(row, dtype="<i4").tolist() for row in sequence.kept])
            if sequence.kept
            else (),
        )
        for sequence in SampleResponse.FromString(payload).sequences
    )


def _read_top(table: Any) -> tuple[TopLogprobs, ...]:
    rows = _top_rows(table) if table.length else []
    return tuple(tuple((int(token), lp) for token, lp in row or ()) for row in rows)


def samples_as_json(payload: bytes) -> dict[str, Any]:
    """The same for clients of the JSON time."""
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
        document["topk_prompt_logprobs"] = _top_rows(message.topk_prompt_logprobs)
    return document


def _put_top(table: Any, rows: Sequence[TopLogprobs], k: int) -> None:
    """Row by row; a cell without a token is id 0 with the log-probability of an empty cell."""
    token_ids = np.zeros((len(rows), k), dtype="<i4")
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, dtype="<f4")
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            token_ids[place, column] = token
            logprobs[place, column] = logprob
    table.token_ids, table.logprobs = token_ids.tobytes(), logprobs.tobytes()
    table.k, table.length = k, len(rows)


def _top_rows(table: Any) -> list[list[list[float]] | None]:
    shape = (table.length, table.k)
    token_ids = np.frombuffer(table.token_ids, dtype="<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(table.logprobs, dtype="<f4").reshape(shape).tolist()
    rows = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        row = [[token, lp] for token, lp in zip(ids, values, strict=True) if lp != EMPTY_LOGPROB]
        rows.append(row or None)
    return rows


def _put_tensor(tensor: Any, array: Array, dtype: str) -> None:
    form = {"float32": "<f4", "int32": "<i4"}[dtype]
    tensor.dense = np.ascontiguousarray(array, dtype=form).tobytes()
    tensor.dtype = DTYPES[dtype]
    tensor.shape.extend(array.shape)
