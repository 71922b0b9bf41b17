"""The protocol of the `tinker` SDK as the service's `Format`, with Rookery's own records beside it.

A span of 3 targets -> sequence SAMPLER:7:0, from its token 2 on -> the result of request 7: data
may carry spans that name their samples. The samples' log-probabilities measure the gap between
sampler and trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from rookery.compat.tinker.schema import encode_samples, read_draw
from rookery.compat.tinker.training import (
    LOSSES,
    DatumArrays,
    TargetSpan,
    TrainCall,
    encode_outputs,
    output_arrays,
    output_metrics,
    read_train_json,
    read_train_proto,
    train_request,
)
from rookery.remote.messages import SampleResponse
from rookery.service.wire import RecordCall, load_json, output_document
from rookery.service.work import (
    Array,
    Command,
    DrawWork,
    Known,
    PromptScores,
    Result,
    Training,
    finished,
)
from rookery.types import Completion, TrainOutput, TrainRequest

__all__ = ["drawn_logprobs", "read_draw", "read_training", "write_samples"]


def read_training(work: Command, known: Known) -> Training:
    """Read a forward_backward or forward of the SDK or of Rookery's own client."""
    call: TrainCall | RecordCall
    if work.form == "proto":
        call = read_train_proto(work.body)[0]
    else:
        call = read_train_json(load_json(work.body))
    request = train_request(call, context_tokens=known.context_tokens, custom=known.loss)
    if isinstance(call, RecordCall):
        return _RecordTraining(request)
    # Losses of drawn tokens carry the sampler's log-probabilities.
    is_policy = call.loss in LOSSES and LOSSES[call.loss].is_policy
    return _SdkTraining(request, () if is_policy else drawn_logprobs(known.result, call.data))


def write_samples(
    draw: DrawWork, completions: Sequence[Completion], scores: PromptScores
) -> Result:
    """Encode a SampleResponse."""
    top_k = draw.params.top_logprobs
    payload = encode_samples(completions, scores, top_k=top_k, has_text=draw.has_text)
    return Result(payload, form="proto")


@dataclass(frozen=True, slots=True)
class _RecordTraining:
    """A request in the trainer's own record, answered with one."""

    request: TrainRequest

    def result(self, output: TrainOutput) -> Result:
        return finished(output_document(output))


@dataclass(frozen=True, slots=True)
class _SdkTraining:
    request: TrainRequest
    drawn: tuple[Array, ...]
    """Log-probabilities of the sampler per datum, if the loss does not carry them."""

    def result(self, output: TrainOutput) -> Result:
        arrays = output_arrays(self.request, output)
        metrics = output_metrics(self.request, output, self.drawn)
        return Result(encode_outputs(arrays, metrics), form="proto")


def drawn_logprobs(
    result: Callable[[str], Result | None], data: Sequence[DatumArrays]
) -> tuple[Array, ...]:
    """Return the sampler's log-probability per target of each datum; empty without spans. NaN for
    targets not drawn here, or whose result is gone. Each result is read once."""
    read = cache(partial(_result_logprobs, result))
    answers = []
    for datum in data:
        rows: list[Array] = [np.zeros(0, dtype="<f4")]
        for span in datum.target_spans:
            owner, _, number = span.sequence_id.rpartition(":")
            rows.append(_of_span(span, read(owner).get(number)))
        answers.append(np.concatenate(rows))
    return tuple(answers)


def _result_logprobs(result: Callable[[str], Result | None], request: str) -> dict[str, Array]:
    """Return the log-probabilities of each sequence of request `SAMPLER:7`, by its number."""
    owner, _, seq = request.rpartition(":")
    sampled = result(f"{owner}#{seq}")
    if sampled is None or sampled.form != "proto":
        return {}
    sequences = SampleResponse.FromString(sampled.payload).sequences
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
