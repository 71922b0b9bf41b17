"""JSON requests, one class each, as routes take them and the journal keeps them. Unknown fields are
ignored, as newer clients send more.

The docs of the routes are made from these classes.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rookery.service.wire import IN_SLICES
from rookery.service.work import bad
from rookery.types import Penalties, SamplingParams, TokenIds

__all__ = [
    "MAX_COUNT",
    "AdamParams",
    "CancelFuture",
    "CopyWeights",
    "CreateCustomLoss",
    "CreateModel",
    "CreateSamplingSession",
    "CreateSession",
    "DrawOptions",
    "FinishSession",
    "Finite",
    "GetInfo",
    "JoinSamplingSession",
    "LoadWeights",
    "NewLora",
    "OptimStepRequest",
    "PenaltyOptions",
    "PromptPieces",
    "RetrieveFuture",
    "RetrieveFutures",
    "Sample",
    "SamplingOptions",
    "SaveExternal",
    "SaveForSampler",
    "SaveWeights",
    "SessionId",
    "SetTtl",
    "Stops",
    "TokenOptions",
    "WeightsInfo",
]


MIN_TTL_S, MAX_TTL_S = 1, 10 * 366 * 24 * 3600
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
"""Name of a checkpoint: the end of its path."""
Id = Annotated[str, Field(min_length=1, max_length=400)]
Metadata = dict[str, Any]
MOST_METADATA_BYTES, MOST_GRAPH_BYTES = 16 << 10, 256 << 10
"""Limits on JSON that stays in memory as long as its session, model or checkpoint."""
MOST_CHUNKS, MOST_STOPS, MOST_RECIPIENTS = 4096, 1024, 64


def _at_most(num_bytes: int) -> AfterValidator:
    def check(value: Metadata) -> Metadata:
        try:
            is_large = _is_large(value, num_bytes) or len(json.dumps(value)) > num_bytes
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if is_large:
            raise ValueError(f"it is too large: at most {num_bytes >> 10} KiB as JSON are kept")
        return value

    return AfterValidator(check)


def _is_large(value: Any, num_bytes: int) -> bool:
    """True if it is certainly larger as JSON, without writing it."""
    rest, size = [value], 0
    while rest and size <= num_bytes:
        one = rest.pop()
        if isinstance(one, dict | list | str):
            size += len(one)
        if isinstance(one, dict | list) and size <= num_bytes:
            rest += [*one, *one.values()] if isinstance(one, dict) else one
    return size > num_bytes


UserMetadata = Annotated[Metadata, _at_most(MOST_METADATA_BYTES)]
Label = Annotated[str, Field(max_length=1000)]
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]
Seq = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Item = TypeVar("Item", str, int)
Stops = Annotated[list[Item], Field(max_length=MOST_STOPS)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class CreateSession(_Request):
    """Starts a session, which heartbeats keep alive."""

    tags: Annotated[list[Label], Field(max_length=100)] = []
    user_metadata: UserMetadata | None = None
    sdk_version: Label = ""
    project_id: Label | None = None
    display_name: Label | None = None


class SessionId(_Request):
    """Names a session, such as in a heartbeat."""

    session_id: Id


class FinishSession(_Request):
    """Ends a session, with the client's reason."""

    reason: Metadata | None = None
    detail: str | None = None


class NewLora(_Request):
    """Shape of a new adapter."""

    rank: int = Field(default=32, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(_Request):
    """Choice of optimizer; only AdamW exists."""

    type: str = "adamw"


class CreateModel(_Request):
    """Creates an adapter to train."""

    session_id: Id
    model_seq_id: Seq
    base_model: str
    user_metadata: UserMetadata | None = None
    lora_config: NewLora = NewLora()
    optimizer_config: OptimizerConfig | None = None


class GetInfo(_Request):
    """Asks for a description of a model in training."""

    model_id: Id


class AdamParams(_Request):
    """Values of one AdamW step, with Tinker's defaults."""

    learning_rate: Finite = Field(default=1e-4, ge=0)
    beta1: Finite = Field(default=0.9, ge=0, lt=1)
    beta2: Finite = Field(default=0.95, ge=0, lt=1)
    eps: Finite = Field(default=1e-12, gt=0)
    weight_decay: Finite = Field(default=0.0, ge=0)
    grad_clip_norm: Finite = Field(default=0.0, ge=0)


class CustomLossInput(_Request):
    """One tensor that a custom loss reads."""

    name: str = Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")
    rank: int = Field(ge=0, le=2)


class CreateCustomLoss(_Request):
    """Creates a custom loss from a graph of tensor operations."""

    session_id: Id
    custom_loss_seq_id: Seq
    name: str = Field(default="", max_length=200)
    inputs: list[CustomLossInput] = Field(min_length=1, max_length=16)
    graph: Annotated[Metadata, _at_most(MOST_GRAPH_BYTES)]


class OptimStepRequest(_Request):
    """Applies the gradients since the last step."""

    model_id: Id
    seq_id: Seq | None = None
    adam_params: AdamParams | None = None
    optimizer_params: Metadata | None = None


class SaveWeights(_Request):
    """Saves weights and optimizer state under a name."""

    model_id: Id
    path: Name
    seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: UserMetadata | None = None


class SaveForSampler(_Request):
    """Saves weights for sampling, under a name or for one sampling session."""

    model_id: Id
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: UserMetadata | None = None


class SaveExternal(_Request):
    """Saves weights for download."""

    model_id: Id
    path: Name
    seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = Field(default=None, max_length=MOST_RECIPIENTS)
    merged: bool = False
    """Save the whole base model with the adapter merged, instead of the adapter."""


class LoadWeights(_Request):
    """Continues from a checkpoint."""

    model_id: Id
    path: Id
    seq_id: Seq | None = None
    optimizer: bool = False


class WeightsInfo(_Request):
    """Asks for a description of a checkpoint."""

    tinker_path: Id


class CopyWeights(_Request):
    """Copies an own or published checkpoint to another model."""

    source_path: Id
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    ttl_seconds: Ttl | None = None


class CreateSamplingSession(_Request):
    """Creates a source for samples: a base model or a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None

    @property
    def sampler_id(self) -> str:
        return f"{self.session_id}:sample:{self.sampling_session_seq_id}"


class JoinSamplingSession(_Request):
    """Registers a copy of a sampling client in another process."""

    sampling_session_id: Id


class Chunk(_Request):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: Annotated[list[int], IN_SLICES] = []


class PromptPieces(_Request):
    """Tokens of a prompt, in pieces."""

    chunks: list[Chunk] = Field(default=[], max_length=MOST_CHUNKS)

    def token_ids(self) -> TokenIds:
        """Return all tokens; refuse pieces that are not text."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise bad(
                    f"The prompt has a chunk {chunk.type!r:.40}; this service takes encoded_text."
                )
        tokens = tuple(token for chunk in self.chunks for token in chunk.tokens)
        if not tokens:
            raise bad("The prompt has no tokens; give at least one.")
        return tokens


class PenaltyOptions(BaseModel):
    """Penalties on earlier tokens; the SDK cannot send them."""

    repetition_penalty: Finite = Field(default=1.0, gt=0)
    presence_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(default=0.0, ge=-2, le=2)

    @property
    def penalties(self) -> Penalties | None:
        penalties = Penalties(
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
        )
        return None if penalties == Penalties() else penalties


MAX_COUNT = 2**31 - 1
"""Limit on token counts, which servers hold in 32 bits."""


class DrawOptions(PenaltyOptions):
    """Sampling options, in the terms of OpenAI and vLLM."""

    n: int = Field(default=1, ge=1, le=4096)
    temperature: Finite = Field(default=1.0, ge=0)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=MAX_COUNT)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    stop: Stops[str] | str | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    def params(self, *, max_tokens: int, seed: int, **more: Any) -> SamplingParams:
        """Return sampling parameters; `more` sets other fields."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0),
            "min_p": self.min_p,
            "penalties": self.penalties,
            "stop": stop,
            "seed": seed,
            "n": self.n,
        }
        return SamplingParams(**fields | more)


class TokenOptions(DrawOptions):
    """The same options, with token ids that end an answer."""

    stop_token_ids: Stops[int] | None = None
    ignore_eos: bool = False

    def params(self, *, max_tokens: int, seed: int, **more: Any) -> SamplingParams:
        ends = {"stop_tokens": tuple(self.stop_token_ids or ()), "ignore_eos": self.ignore_eos}
        return super().params(max_tokens=max_tokens, seed=seed, **ends, **more)


class SamplingOptions(_Request, PenaltyOptions):
    """Sampling options of the SDK."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Stops[str] | Stops[int] | None = None
    temperature: Finite = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    stop_tokens: Stops[int] = []
    """End tokens in addition to `stop` and the model's own."""
    ignore_eos: bool = False


class Sample(_Request):
    """Draws samples, or scores the prompt."""

    prompt: PromptPieces
    sampling_params: SamplingOptions = SamplingOptions()
    num_samples: int = Field(default=1, ge=1)
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: Seq | None = None
    prompt_logprobs: bool | None = False
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=1000)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=1000)
    target_prompt_logprobs: Metadata | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=1000)
    return_text: bool = False
    """Return texts besides the tokens, for clients without a tokenizer."""
    return_kept: bool = False
    """Return the tokens left by top_p, top_k and min_p, for training on the samples."""


class RetrieveFuture(_Request):
    """Asks for a result."""

    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(_Request):
    """Names the requests that are meant."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id


class RetrieveFutures(_Request):
    """Asks which samples of a session are finished."""

    target: FuturesTarget
    prev_cursor: int | str | None = None


class CancelFuture(_Request):
    """Cancels a sample."""

    request_id: Id


class SetTtl(_Request):
    """Sets when a checkpoint expires; null: never."""

    ttl_seconds: Ttl | None = None
