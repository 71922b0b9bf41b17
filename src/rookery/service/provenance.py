"""With which log-probabilities targets were drawn: data may carry spans that name the samples.

span of 3 targets -> sequence SAMPLER:7:0, from its token 2 on -> the result of request 7
"""

import numpy as np

from rookery.service.futures import Futures
from rookery.service.wire.schema import SampleResponse
from rookery.service.wire.tensors import Array
from rookery.service.wire.training import DatumArrays, TargetSpan

__all__ = ["drawn_logprobs"]


def drawn_logprobs(futures: Futures, tenant: str, datum: DatumArrays) -> Array:
    """One per target, NaN where it was not drawn here, or its result is not kept any more. Empty
    without spans."""
    rows = [_span_logprobs(futures, tenant, span) for span in datum.target_spans]
    return np.concatenate(rows) if rows else np.zeros(0, dtype="<f4")


def _span_logprobs(futures: Futures, tenant: str, span: TargetSpan) -> Array:
    row: Array = np.full(span.length, np.nan, dtype="<f4")
    owner, _, number = span.sequence_id.rpartition(":")
    owner, _, seq = owner.rpartition(":")
    future = futures.of_key(f"{owner}#{seq}", tenant=tenant)
    if future is None or future.result is None or future.result.form != "proto":
        return row
    sequences = SampleResponse.FromString(future.result.payload).sequences
    named = {str(place): sequence for place, sequence in enumerate(sequences)}
    if number in named:
        logprobs = np.frombuffer(named[number].logprobs, dtype="<f4")
        known = logprobs[span.offset : span.offset + span.length]
        row[: len(known)] = known
    return row
