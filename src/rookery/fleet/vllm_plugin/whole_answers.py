"""vLLM's scheduler, with answers of the token route handed on once, when they are whole.

It is given to vLLM by `--scheduler-cls`. Stock vLLM sends every token of every sequence to its API
process by itself, each with three arrays around its log-probability: with hundreds of sequences
that takes longer than a GPU needs for the tokens. Nobody reads an answer of the token route before
its end, so its tokens wait here. Where vLLM notes which weights drew a token (0.32), it notes it
when the tokens arrive, and only the log-probabilities wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["WHOLE", "WholeAnswers"]

WHOLE = "rookery-whole-"
"""In the id of a request whose answer is read at its end; vLLM writes more around it."""


class WholeAnswers:
    """What `--scheduler-cls` names: makes the scheduler that vLLM would take, with answers held."""

    def __new__(cls, vllm_config: Any, **parts: Any) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import EngineCoreOutputs

        stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
        kind = type("WholeAnswers", (_Holding, stock), {})
        scheduler = kind(vllm_config=vllm_config, **parts)
        scheduler.rookery_answers = HeldAnswers(
            has_versions="weight_version" in EngineCoreOutputs.__struct_fields__
        )
        return scheduler


class _Holding:
    """Goes before vLLM's scheduler among the bases."""

    rookery_answers: HeldAnswers
    requests: dict[str, Any]

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self.rookery_answers.add(request)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        found = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for outputs in found.values():
            outputs.outputs = self.rookery_answers.ready(outputs.outputs)
        return found

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        found = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.rookery_answers.keep(self.requests)
        return found


class HeldAnswers:
    """What was drawn of answers that are not whole."""

    def __init__(self, *, has_versions: bool) -> None:
        self._has_versions = has_versions
        self._held: dict[str, list[Any]] = {}
        """The outputs of a request so far, in their order."""

    def add(self, request: Any) -> None:
        """Hold its answer, if nobody reads it before its end, whoever named it: a client can choose
        a part of the id. The API process looks for stop strings in every token."""
        params = request.sampling_params
        if WHOLE not in request.request_id or params is None or params.stop:
            return
        if params.output_kind.name == "FINAL_ONLY":
            self._held.setdefault(request.request_id, [])

    def ready(self, outputs: list[Any]) -> list[Any]:
        """What is to be sent of a step's outputs."""
        return [output for output in outputs if self._is_ready(output)]

    def keep(self, requests: Iterable[str]) -> None:
        """Forget all others: they were stopped from outside."""
        for name in self._held.keys() - set(requests):
            del self._held[name]

    def _is_ready(self, output: Any) -> bool:
        earlier = self._held.get(output.request_id)
        if earlier is None:
            return True
        if output.finish_reason is not None or _has_more(output):
            _join(earlier, output)
            earlier.clear()
            if output.finish_reason is not None:
                del self._held[output.request_id]
            return True
        if not self._has_versions:
            earlier.append(output)
            return False
        if output.new_logprobs is not None:
            earlier.append(_Drawn(output.new_logprobs))
            output.new_logprobs = None
        return True


def _has_more(output: Any) -> bool:
    """Whether it has something for each token that is not joined here."""
    names = ("routed_experts", "new_sampling_mask")
    return any(getattr(output, name, None) is not None for name in names)


class _Drawn:
    """The log-probabilities of tokens that were sent before."""

    new_token_ids: tuple[int, ...] = ()
    events = prefill_stats = new_prompt_logprobs_tensors = None

    def __init__(self, logprobs: Any) -> None:
        self.new_logprobs = logprobs


def _join(earlier: list[Any], last: Any) -> None:
    """Make `last` the one output of its request."""
    if not earlier:
        return
    outputs = [*earlier, last]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    drawn = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if drawn:
        tokens, logprobs, ranks = zip(*(one[:3] for one in drawn), strict=True)
        # A step has the columns of the request in it that wants most: others come and go.
        width = min(part.shape[1] for part in tokens)
        tables = [np.concatenate([part[:, :width] for part in all]) for all in (tokens, logprobs)]
        last.new_logprobs = type(drawn[0])(*tables, np.concatenate(ranks))
    if events := [event for output in outputs for event in output.events or ()]:
        last.events = events
    # A prompt's come with its first token.
    for field in ("prefill_stats", "new_prompt_logprobs_tensors"):
        found = [getattr(output, field) for output in outputs]
        setattr(last, field, next((value for value in found if value is not None), None))
