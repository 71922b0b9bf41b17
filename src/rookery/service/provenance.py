"""With which log-probabilities targets were drawn: data may carry spans that name the samples.

span of 3 targets -> sequence SAMPLER:7:0, from its token 2 on -> the result of request 7
"""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from rookery.service.futures import Futures
from rookery.service.wire.schema import SampleResponse
from rookery.service.wire.tensors import Array
from rookery.service.wire.training import DatumArrays, TargetSpan

__all__ = ["drawn_logprobs"]


def drawn_logprobs(futures: Futures, tenant: str, data: Sequence[DatumArrays]) -> tuple[Array, ...]:
    """Of each datum one per target, NaN where it was not drawn here, or its result is not kept any
    more; empty without spans. A result is read once, however many spans name it."""
    result = cache(partial(_result_logprobs, futures, tenant))
    answers = []
    for datum in data:
        rows: list[Array] = [np.zeros(0, dtype="<f4")]
        for span in datum.target_spans:
            owner, _, number = span.sequence_id.rpartition(":")
            rows.append(_of_span(span, result(owner).get(number)))
        answers.append(np.concatenate(rows))
    return tuple(answers)


def _result_logprobs(futures: Futures, tenant: str, request: str) -> dict[str, Array]:
    """The log-probabilities of each sequence of `SAMPLER:7`, by its number."""
    owner, _, seq = request.rpartition(":")
    future = futures.of_key(f"{owner}#{seq}", tenant=tenant)
    if future is None or future.result is None or future.result.form != "proto":
        return {}
    sequences = SampleResponse.FromString(future.result.payload).sequences
    return {
        str(place): np.frombuffer(sequence.logprobs, dtype="<f4")
        for place, sequence in enumerate(sequences)
    }


def _of_span(span: TargetSpan, logprobs: Array | None) -> Array:
    row: Array = np.full(span.length, np.nan, dtype="<f4")
    if logprobs is not None:
        known = logprobs[span.offset : span.offset + span.length]
        row[: len(known)] = known
    return row
