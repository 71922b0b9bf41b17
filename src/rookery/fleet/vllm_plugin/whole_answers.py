"""vLLM's scheduler, changed to pass on answers of the token route once, when they are complete.

vLLM loads it by `--scheduler-cls`. Stock vLLM sends every token of every sequence to its API
process separately, with three arrays around its log-probability: with hundreds of sequences that
takes longer than a GPU needs for the tokens. Nobody reads an answer of the token route before its
end, so its tokens wait here. vLLM 0.32 notes which weights drew a token when the token arrives:
there, only the log-probabilities wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["WHOLE", "WholeAnswers", "send_copies"]

WHOLE = "rookery-whole-"
"""Part of the id of requests whose answer is read at its end; vLLM writes more around it."""


class WholeAnswers:
    """Target of `--scheduler-cls`: makes the scheduler that vLLM would use, with held answers."""

    def __new__(cls, vllm_config: Any, **parts: Any) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import EngineCoreOutputs

        send_copies()
        stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
        kind = type("WholeAnswers", (_Holding, stock), {})
        scheduler = kind(vllm_config=vllm_config, **parts)
        scheduler.rookery_answers = HeldAnswers(
            has_versions="weight_version" in EngineCoreOutputs.__struct_fields__
        )
        return scheduler


def send_copies() -> None:
    """Make the sockets that this process opens from now on copy what they send. vLLM writes the
    next message over the last one when zmq is done with its last part, and zmq sends parts of 64 kB
    and more from where they are: whole answers would be overwritten while they are sent."""
    import zmq

    zmq.COPY_THRESHOLD = 2**31 - 1


class _Holding:
    """Overrides methods of vLLM's scheduler, as the first of two base classes."""

    rookery_answers: HeldAnswers
    requests: dict[str, Any]

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self.rookery_answers.add(request)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for outputs in result.values():
            outputs.outputs = self.rookery_answers.ready(outputs.outputs)
        return result

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        result = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.rookery_answers.keep(self.requests)
        return result


class HeldAnswers:
    """Outputs of answers that are not complete."""

    def __init__(self, *, has_versions: bool) -> None:
        self._has_versions = has_versions
        self._held: dict[str, list[Any]] = {}
        """Outputs of each request so far, in order."""

    def add(self, request: Any) -> None:
        """Hold a request's answer if nobody reads it before its end. The id alone does not decide,
        as clients can choose a part of it. With stop strings, the API process reads every token."""
        params = request.sampling_params
        if WHOLE not in request.request_id or params is None or params.stop:
            return
        if params.output_kind.name == "FINAL_ONLY":
            self._held.setdefault(request.request_id, [])

    def ready(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs of a step that are to be sent now."""
        return [output for output in outputs if self._is_ready(output)]

    def keep(self, requests: Iterable[str]) -> None:
        """Forget all other requests: they were aborted."""
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
    """True if it carries data for each token that is not joined here."""
    if getattr(output, "routed_experts", None) is not None:
        return True
    return getattr(output, "new_sampling_mask", None) is not None


class _Drawn:
    """Log-probabilities of tokens that were sent before."""

    new_token_ids: tuple[int, ...] = ()
    events = prefill_stats = new_prompt_logprobs_tensors = None

    def __init__(self, logprobs: Any) -> None:
        self.new_logprobs = logprobs


def _join(earlier: list[Any], last: Any) -> None:
    """Merge all outputs of a request into `last`."""
    if not earlier:
        return
    outputs = [*earlier, last]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    drawn = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if drawn:
        tokens, logprobs, ranks = zip(*(one[:3] for one in drawn), strict=True)
        # A step has as many columns as its most demanding request: keep those that all steps have.
        width = min(part.shape[1] for part in tokens)
        tables = [
            np.concatenate([part if part.shape[1] == width else part[:, :width] for part in all])
            for all in (tokens, logprobs)
        ]
        last.new_logprobs = type(drawn[0])(*tables, np.concatenate(ranks))
    if events := [event for output in outputs for event in output.events or ()]:
        last.events = events
    # Data of the prompt comes with the first token.
    for field in ("prefill_stats", "new_prompt_logprobs_tensors"):
        values = (getattr(output, field) for output in outputs)
        setattr(last, field, next((value for value in values if value is not None), None))
