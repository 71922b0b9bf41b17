"""The records that flow between the parts: frozen, complete when built, no behaviour.

Task -> SampleRequest -> Completion -> Rollout -> Group -> Datum -> Adapter -> ModelRef
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "Adapter",
    "Completion",
    "Datum",
    "Evaluation",
    "FinishReason",
    "Group",
    "Job",
    "JobCancelled",
    "JobDone",
    "JobFailed",
    "JobOutcome",
    "Json",
    "LoraFactors",
    "Message",
    "ModelRef",
    "Rollout",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "Task",
    "TextReply",
    "TextRequest",
    "TokenIds",
    "TokenUsage",
    "TopLogprobs",
    "WorkerInfo",
    "WorkerLost",
]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
TokenIds = tuple[int, ...]
TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position, best first: ((token id, log-probability), ...)."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """What a request names: one version of one set of weights. New weights are a new version.

    `ModelRef(name="base", version="smollm2")`, `ModelRef(name="poet", version="3fa94c01")`.
    """

    name: str
    version: str

    @property
    def served_name(self) -> str:
        """The one string a server knows these weights by; never reused for other weights."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `choices` is filled when the answer is one of a few given texts.

    `Task(id="gsm8k/17", prompt="2+2=", reference="4", source="gsm8k")`
    """

    id: str
    prompt: str | tuple[Message, ...]
    reference: Json
    choices: tuple[str, ...] = ()
    source: str = ""
    """Name of the taskset it came from: results are averaged per source first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. The defaults are the model's own distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: TokenIds = ()
    """Besides the model's own end-of-text tokens, which always stop unless `ignore_eos`."""
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    top_logprobs: int = 0
    """How many of the most likely tokens to report per position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Ask one model to continue one prompt, `params.n` times."""

    model: ModelRef
    prompt: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    affinity: Hashable = field(default=None, compare=False)
    """Requests of one affinity are better off on one server: they share prefixes. No answer depends
    on it; None: no preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Ask one model for log-probabilities of given tokens.

    With tokens (5, 6, 7, 8) and start 2 the answer holds log p(7 | 5 6) and log p(8 | 5 6 7);
    with labels (10, 11) also log p(10 | 5 6 7 8) and log p(11 | 5 6 7 8). `start` equal to the
    number of tokens asks for the labels alone.
    """

    model: ModelRef
    tokens: TokenIds
    start: int = 1
    labels: TokenIds = ()
    top_logprobs: int = 0
    affinity: Hashable = field(default=None, compare=False)
    """As that of a `SampleRequest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens, with log-probabilities under the distribution they were drawn from.

    `text` is the decoded tokens cut before a stop string; `tokens` keeps every token drawn, the
    end-of-text token included.
    """

    model: ModelRef
    tokens: TokenIds
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of given tokens under one model, in the order of the request."""

    model: ModelRef
    logprobs: tuple[float, ...]
    label_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Ask a TextModel for one reply to a chat.

    None leaves a value to the model: an API's own default, and for engines temperature and top_p
    of 1 and seed 0. Some APIs refuse a request that sets them.
    """

    messages: tuple[Message, ...]
    max_tokens: int = 1024
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    seed: int | None = None
    """Repeats a reply where the model promises it: engines do, most APIs do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """What a reply cost, in tokens of the model that wrote it."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """The text of one reply, who wrote it and what it cost."""

    text: str
    finish_reason: FinishReason
    model: str
    """The name of the model that wrote it: of an ensemble, the member."""
    usage: TokenUsage | None
    """None when an API does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one task, and what it earned. A failed one says why and has no reward."""

    task: Task
    completion: Completion | None
    reward: float | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task under one model."""

    task: Task
    model: ModelRef
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training row: token i is predicted from the tokens before it, weighted by weights[i].

    Prompt (5, 6), answer (7, 8): tokens (5, 6, 7, 8), weights (0, 0, 1, 1). `logprobs` and
    `advantages`, when a loss needs them, are aligned with `tokens` in the same way.
    """

    tokens: TokenIds
    weights: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    model: ModelRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured of one model on one list of tasks: a reward per task id, in task order.

    A task whose rollout failed is in `errors` and not in `rewards`.
    """

    model: ModelRef
    rewards: Mapping[str, float]
    errors: Mapping[str, str]
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The two factors of one adapted linear layer: delta W = scale * b @ a."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""
    scale: float
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights of one base model.

    `factors` is keyed by the linear layer's name in the base model, for example
    "model.layers.0.self_attn.q_proj". Layers may have different ranks.
    """

    name: str
    base: str
    """`base_model_name_or_path` of the PEFT config; "" when it is not known."""
    factors: Mapping[str, LoraFactors]
    version: str
    """Content hash of the factors: equal weights, equal version."""

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max((f.a.shape[0] for f in self.factors.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work for an Executor, named by (attempt, epoch).

    Attempt 7 whose worker was lost is submitted again as (attempt=7, epoch=1): whatever still comes
    of epoch 0 is dropped.
    """

    attempt: int
    epoch: int
    payload: bytes
    """What the worker's task reads; the Executor does not look into it."""
    limit_s: float
    """How long a worker may take, not counting the time in the queue; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """The task returned."""

    output: bytes
    seconds: float
    """Time in the task, measured by the worker."""
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The task raised. Its worker lives."""

    error: str
    seconds: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The worker ended or was killed before it answered: a signal, a dead node, `Job.limit_s`.

    Nothing is known of the job: it may be the cause, and it may have been done.
    """

    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """It was cancelled, replaced by a newer epoch, or the Executor was closed."""

    reason: str


JobOutcome = JobDone | JobFailed | WorkerLost | JobCancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker said of itself when it was started, and why it gets no work if so."""

    name: str
    version: str | None = None
    """Of Rookery; None when the worker did not get as far as to say it."""
    cores: int | None = None
    about: str = ""
    """What its task says of itself, for example which sandbox it uses."""
    refusal: str = ""
    """Why it gets no work; "" when it does."""
