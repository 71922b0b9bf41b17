"""The records that flow between the parts: frozen, complete when built, no behaviour.

Task -> SampleRequest -> Completion -> Rollout -> Group -> Datum -> Adapter -> ModelRef
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Literal, overload

__all__ = [
    "Adapter", "Completion", "CompletionDelta", "Datum", "Draw", "Evaluation", "FinishReason",
    "Group", "Job", "JobCancelled", "JobDone", "JobFailed", "JobOutcome", "Json", "KeptTokens",
    "LoraFactors", "LoraShape", "Message", "ModelRef", "ModelWeights", "OptimStep", "Penalties",
    "Rollout", "SampleRequest", "SamplingParams", "Score", "ScoreRequest", "StepOutput", "Task",
    "TextReply", "TextRequest", "TokenIds", "TokenSequence", "TokenUsage", "TopLogprobs",
    "TrainOutput", "TrainRequest", "VersionSpan", "Weights", "WorkerInfo", "WorkerLost",
]  # fmt: skip


if TYPE_CHECKING:
    import torch

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """The name and version of one set of weights, as a request gives them. New weights get a new
    version.

    `ModelRef(name="base", version="smollm2")`, `ModelRef(name="poet", version="3fa94c01")`.
    """

    name: str
    version: str

    @property
    def served_name(self) -> str:
        """Name of these weights on a server; never reused for other weights."""
        return f"{self.name}@{self.version}"


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
    """`base_model_name_or_path` of the PEFT config; "" if unknown."""
    factors: Mapping[str, LoraFactors]
    version: str
    """Content hash of the factors: equal weights, equal version."""

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max((f.a.shape[0] for f in self.factors.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights of one model, by their names in its folder."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    version: str
    """Content hash or training step; different weights have different versions."""


Weights = Adapter | ModelWeights
"""Weights that a trainer makes and a publisher hands to the samplers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str
    fields: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Further fields that the chat template reads: `tool_calls`, `tool_call_id`, `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. If the answer is one of a few given texts, `choices` lists them.

    `Task(id="gsm8k/17", prompt="2+2=", reference="4", source="gsm8k")`
    """

    id: str
    prompt: str | tuple[Message, ...]
    reference: Json
    choices: tuple[str, ...] = ()
    source: str = ""
    """Name of the taskset it came from: results are averaged per source first."""
    group: str = ""
    """Tasks of equal group are one question: they share a split and are one cluster in every
    interval. If empty, tasks of equal prompt form a group."""
    weight: float = field(default=1.0, repr=False)
    """Weight in training and search; reports count every task alike."""


@dataclass(frozen=True, slots=True)
class KeptTokens(Sequence[TokenIds]):
    """For each drawn token, the token ids it was drawn from. An empty row means all of them.

    Rows (5, 9), () and (7,): `data` holds 5, 9, 7 as uint32 and `ends` is (2, 2, 3). A nucleus may
    have thousands of tokens, and Python's integers would take nine times as much memory.
    """

    ends: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> KeptTokens:
        if isinstance(rows, KeptTokens):
            return rows
        rows = list(rows)
        return cls(
            ends=tuple(accumulate(map(len, rows))),
            data=array("I", chain.from_iterable(rows)).tobytes(),
        )

    @property
    def rows(self) -> list[memoryview]:
        """The rows as views of uint32, without a copy."""
        flat = memoryview(self.data).cast("I")
        return [flat[start:end] for start, end in pairwise((0, *self.ends))]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[TokenIds]:
        return (tuple(row) for row in self.rows)

    @overload
    def __getitem__(self, place: int) -> TokenIds: ...

    @overload
    def __getitem__(self, place: slice) -> KeptTokens: ...

    def __getitem__(self, place: int | slice) -> TokenIds | KeptTokens:
        chosen = self.rows[place]
        return KeptTokens.of(chosen) if isinstance(chosen, list) else tuple(chosen)


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position, best first: ((token id, log-probability), ...)."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties on tokens that occurred before, as vLLM defines them."""

    repetition: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in prompt or answer."""
    presence: float = 0.0
    """Subtracted once from the logits of tokens in the answer."""
    frequency: float = 0.0
    """Subtracted from a token's logits once per occurrence in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. The defaults draw from the model's own distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    penalties: Penalties | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: TokenIds = ()
    """Besides the model's own end-of-text tokens, which always stop unless `ignore_eos`."""
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    top_logprobs: int = 0
    """How many of the most likely tokens to report per position."""
    return_kept: bool = False
    """Report the tokens that top_p, top_k and min_p left at each position."""

    @property
    def is_cut(self) -> bool:
        """Whether some tokens can never be drawn; log-probabilities are then over the others."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Ask one model to continue one prompt, `params.n` times."""

    model: ModelRef
    prompt: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    affinity: Hashable = field(default=None, compare=False)
    """Requests of equal affinity share prefixes, so a fleet sends them to one server. Answers do
    not depend on it. None means no preference."""
    json_schema: str = ""
    """JSON schema, as text, that the answers must match. Engines without support refuse it."""
    on_delta: Callable[[CompletionDelta], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called in the caller's event loop with each piece of a completion as it is drawn. It must
    return at once and not raise. Engines that do not stream never call it."""


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
    """See `SampleRequest.affinity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `start` to `stop - 1` of a completion were drawn under this version of its model."""

    version: str
    start: int
    stop: int


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
    version_spans: tuple[VersionSpan, ...] = ()
    """The version that drew each range of tokens, if weights changed during the draw; `model` names
    the last one. If empty, `model.version` drew all."""
    kept: Sequence[TokenIds] = ()
    """KeptTokens if `return_kept` is set and the parameters cut tokens off; empty if every token
    was drawn from the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """One piece of a completion that is being drawn.

    The deltas of a completion add up to it. An incomplete character, or text that may begin a stop
    string, comes with a later delta.
    """

    sample: int
    """Index among the request's `params.n` completions."""
    tokens: TokenIds
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set in the last delta."""
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

    None leaves a value to the model: an API uses its own default, an engine temperature 1, top_p 1
    and seed 0. Some APIs refuse requests that set them.
    """

    messages: tuple[Message, ...]
    max_tokens: int = 1024
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    seed: int | None = None
    """Equal seeds repeat a reply on engines; most APIs do not promise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Cost of a reply, in tokens of the model that wrote it."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReply:
    """The text of one reply, the model that wrote it, and its cost."""

    text: str
    finish_reason: FinishReason
    model: str
    """Name of the model that wrote the reply; for an ensemble, of its member."""
    usage: TokenUsage | None
    """None if the API does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One task to be answered several times, with a seed of its own."""

    task: Task
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """All tokens that a model read, in order, and the places of those that it drew itself.

    A prompt 5 6, a drawn answer 7 8, a further question 9, a drawn answer 4:

        tokens    (5, 6, 7, 8, 9, 4)
        drawn     (2, 3, 5)
        logprobs  (-0.3, -1.2, -0.1)
    """

    tokens: TokenIds
    drawn: tuple[int, ...]
    """Increasing indices into `tokens`."""
    logprobs: tuple[float, ...]
    """Log-probabilities of the drawn tokens under the distribution they were drawn from."""
    kept: Sequence[TokenIds] = ()
    """For each drawn token, the tokens it was drawn from; see `Completion.kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one task with its reward. A failed one has an error and no reward.

    After several turns, the completion has all drawn tokens, and the whole exchange as its text.
    """

    task: Task
    completion: Completion | None
    reward: float | None
    error: str = ""
    sequences: tuple[TokenSequence, ...] = ()
    """Sequences to train on, filled if rollouts are drawn for training. There are several if the
    chat template rewrote earlier turns."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further measurements. Tasks with choices have `certainty`: the probability of the right
    choice among the choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task under one model."""

    task: Task
    model: ModelRef
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards of one model on a list of tasks, by task id and in task order.

    A task whose rollout failed is in `errors` and not in `rewards`.
    """

    model: ModelRef
    rewards: Mapping[str, float]
    errors: Mapping[str, str]
    num_tokens: int
    """Tokens of prompts and answers."""
    seconds: float
    num_answer_tokens: int = 0
    """Tokens of the answers alone."""
    certainties: Mapping[str, float] = field(default_factory=dict)
    """Probability of the right choice among the choices, by task id, for tasks with choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training row: `targets[j]` is predicted from the tokens up to `positions[j]`.

    Prompt (5, 6), drawn answer (7, 8), learned with advantage 2:

        tokens    (5, 6, 7)      what the model reads
        positions (1, 2)         after 5 6, and after 5 6 7
        targets   (7, 8)         the tokens to predict there
        weights   (1.0, 1.0)     sampled_logprobs (-0.3, -1.2)     advantages (2.0, 2.0)

    All columns have the length of `targets`. Positions never decrease. A position that occurs K
    times has K targets with a weight each (soft targets). A position that does not occur predicts
    nothing, and the output layer skips it. A target of weight 0 adds no gradient and still gets a
    log-probability.
    """

    tokens: TokenIds
    positions: tuple[int, ...]
    targets: TokenIds
    weights: tuple[float, ...]
    sampled_logprobs: tuple[float, ...] = ()
    """Log-probabilities of the targets when drawn, under `temperature` and over `kept`."""
    old_logprobs: tuple[float, ...] = ()
    """Log-probabilities that the trainer's `forward` gave before the first step on this datum."""
    reference_logprobs: tuple[float, ...] = ()
    """Log-probabilities of the targets under the reference model of a KL term."""
    advantages: tuple[float, ...] = ()
    temperature: float = 1.0
    """Temperature that the targets were drawn with; logits are divided by it."""
    kept: Sequence[TokenIds] = ()
    """For each target, the distinct tokens that top_p, top_k and min_p left: log-probabilities are
    normalised over them. An empty entry, or an empty column, means the whole vocabulary. KeptTokens
    takes the least memory."""
    inputs: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Further inputs of a custom loss, by name: numbers, lists, or lists of lists. Their lengths
    may differ from that of `targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The shape of a new adapter, as a client of the service chooses it."""

    rank: int
    seed: int
    """Seed of the factors `a`; the factors `b` begin at zero."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """Whether to adapt the output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Ask a trainer for a loss of one trainee on its data."""

    trainee: str
    data: tuple[Datum, ...]
    loss: str = "cross_entropy"
    loss_options: Mapping[str, Json] = field(default_factory=dict)
    """Options of the loss, for example {"clip_low": 0.2}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """Result of one TrainRequest. A failed one has an error, no results, and added no gradients."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    logprobs: tuple[tuple[float, ...], ...] = ()
    """Log-probability of every target of every datum, in order, before the step."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One AdamW step of one trainee."""

    trainee: str
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Weights shrink by learning_rate * weight_decay."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to this one; 0 disables it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one OptimStep. A failed one has an error and changed no weight."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work for an Executor, named by (attempt, epoch).

    If the worker of attempt 7 is lost, the caller submits (attempt=7, epoch=1); late results of
    epoch 0 are dropped.
    """

    attempt: int
    epoch: int
    payload: bytes
    """Input of the worker's task; opaque to the Executor."""
    limit_s: float
    """Seconds after which the worker is killed, not counting time in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """The task returned."""

    output: bytes
    seconds: float
    """Seconds in the task, measured by the worker."""
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """The task raised; its worker is alive."""

    error: str
    seconds: float
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The worker ended before it answered: by a signal, a dead node, or `Job.limit_s`.

    The job may have been done, and it may have been the cause.
    """

    reason: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """The job was cancelled or replaced by a newer epoch, or the Executor was closed."""

    reason: str


JobOutcome = JobDone | JobFailed | WorkerLost | JobCancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's description of itself at its start, and the reason if it gets no jobs."""

    name: str
    version: str | None = None
    """Rookery's version on the worker; None if the worker failed before it reported one."""
    cores: int | None = None
    about: str = ""
    """Description by its task, for example the sandbox in use."""
    refusal: str = ""
    """Why it gets no jobs; "" if it gets some."""
