"""What one server can do: read from its own description and from tiny requests, not its version.

Built by `probe.py`; `wire.py` and `replica.py` decide by it which routes and fields to use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rookery.errors import FleetError
from rookery.fleet.adapters.fit import base_names

__all__ = ["LOGPROB_IDS_LIMIT", "Capabilities", "Route", "common_capabilities"]

Route = Literal["extension", "http", "resolver", "none"]
"""How adapters reach a server, fastest first: tensors through the worker extension, a PEFT folder
and `load_lora_adapter`, a shared folder that the server searches by name, not at all."""

LOGPROB_IDS_LIMIT = 128
"""Most ids that vLLM takes in `logprob_token_ids`; longer lists are asked in several prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One server, as probed. Sizes it does not tell are None."""

    model: str
    """The name it serves its base model by."""
    root: str
    """The folder or id it loaded the base model from; adapters are made for this."""
    version: str
    """For people to read; nothing is decided by it."""
    max_model_len: int | None
    max_num_seqs: int | None
    max_logprobs: int
    """How many of the likeliest tokens it reports at most; vLLM's default is 20."""
    has_token_ids: bool
    """Reports tokens as `token_id:17`, so that the ids it drew are known."""
    has_label_logprobs: bool
    """`logprob_token_ids` works: log-probabilities of any given tokens, exactly."""
    has_prompt_logprobs: bool
    """Reports the tokens of a prompt without crashing: vLLM with adapters on the CPU dies when it
    computes anything else in the same step."""
    has_processed_logprobs: bool
    """Log-probabilities are of the distribution drawn from (temperature, top-p applied)."""
    has_prefix_cache: bool
    block_tokens: int
    """Granularity of its prefix cache."""
    routes: frozenset[str]
    """Paths of its HTTP interface."""
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    lora_dtype: str | None
    has_json_schemas: bool = False
    """`structured_outputs` is there: answers that match a JSON schema."""
    has_wrong_head: bool = False
    """Adapters of the output layer change what requests for the base model get: vLLM on the CPU
    without the worker extension."""
    is_on_cpu: bool | None = None
    """As the server reports, as it was launched, or as the config says; None: unknown."""
    dtype: str | None = None
    """What it computes in, such as `float32`, as it reports or was launched; None: unknown."""

    @property
    def is_float32(self) -> bool:
        """Whether it is known to compute in float32, adapters too."""
        return self.dtype == "float32" and self.lora_dtype in (None, "float32")

    @property
    def has_lora_loading(self) -> bool:
        return "/v1/load_lora_adapter" in self.routes

    @property
    def has_worker_calls(self) -> bool:
        return "/collective_rpc" in self.routes


def common_capabilities(capabilities: Sequence[Capabilities]) -> Capabilities:
    """What all servers can do; FleetError when they serve different models."""
    first = capabilities[0]
    for other in capabilities[1:]:
        if base_names(other.root) != base_names(first.root):
            raise FleetError(
                f"The servers serve different models, {first.root} and {other.root}: one fleet "
                "has one base model."
            )
    return replace(
        first,
        max_model_len=_least(c.max_model_len for c in capabilities),
        max_logprobs=min(c.max_logprobs for c in capabilities),
        has_label_logprobs=all(c.has_label_logprobs for c in capabilities),
        has_prompt_logprobs=all(c.has_prompt_logprobs for c in capabilities),
        has_json_schemas=all(c.has_json_schemas for c in capabilities),
        has_processed_logprobs=all(c.has_processed_logprobs for c in capabilities),
        has_prefix_cache=all(c.has_prefix_cache for c in capabilities),
        block_tokens=max(c.block_tokens for c in capabilities),
        max_lora_rank=_least(c.max_lora_rank for c in capabilities),
        dtype=first.dtype if all(c.dtype == first.dtype for c in capabilities) else None,
    )


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
