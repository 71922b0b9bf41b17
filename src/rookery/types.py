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
    """What a request names: one version of one set of weights. New weights are a new version.

    `ModelRef(name="base", version="smollm2")`, `ModelRef(name="poet", version="3fa94c01")`.
    """

    name: str
    version: str

    @property
    def served_name(self) -> str:
        """The one string a server knows these weights by; never reused for other weights."""
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
    """`base_model_name_or_path` of the PEFT config; "" when it is not known."""
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
    """Content hash or step: other weights, another version."""


Weights = Adapter | ModelWeights
"""What a trainer makes and a publisher hands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str
    fields: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """What else the chat template reads: `tool_calls`, `tool_call_id`, `name`."""


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
    group: str = ""
    """Tasks of equal group are one question: in one split, and not independent in an interval.
    Empty: tasks of equal prompt are."""
    weight: float = field(default=1.0, repr=False)
    """How much it counts in what is trained and searched; a report counts every task alike."""


@dataclass(frozen=True, slots=True)
class KeptTokens(Sequence[TokenIds]):
    """Which tokens each token of an answer was drawn from; an empty row is the whole vocabulary.

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
        """The rows as views of uint32: nothing is copied."""
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
    """What makes tokens that were there before less likely, or more; as vLLM defines them."""

    repetition: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by this, negative multiplied."""
    presence: float = 0.0
    """Taken from the logits of tokens that the answer has."""
    frequency: float = 0.0
    """The same for each time that the answer has them."""


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
        """Whether some tokens are never drawn, which log-probabilities are then not over."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Ask one model to continue one prompt, `params.n` times."""

    model: ModelRef
    prompt: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    affinity: Hashable = field(default=None, compare=False)
    """Requests of one affinity are better off on one server: they share prefixes. No answer depends
    on it; None: no preference."""
    json_schema: str = ""
    """A JSON schema, as text, that the answers must match. Engines that cannot do this refuse."""
    on_delta: Callable[[CompletionDelta], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called in the caller's event loop with what the completions gain, while they are drawn. It
    must return at once and not raise. Engines that do not stream never call it."""


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
    """Which version drew which tokens, when weights changed on the way; `model` is the last of
    them. Empty: `model.version` drew all."""
    kept: Sequence[TokenIds] = ()
    """What each token was drawn from, where `return_kept` asked for it and the parameters cut
    something off: KeptTokens. Empty: the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one completion of a request gained.

    All deltas of a completion together are that completion. Text that is not certain yet comes
    with a later delta: an incomplete character, or what may begin a stop string.
    """

    sample: int
    """Which of the request's `params.n` completions."""
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
class Draw:
    """One task to be answered several times, with the random numbers of its own seed."""

    task: Task
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens that a model read from the first to the last, and which of them it drew itself.

    A prompt 5 6, a drawn answer 7 8, a further question 9, a drawn answer 4:

        tokens    (5, 6, 7, 8, 9, 4)
        drawn     (2, 3, 5)
        logprobs  (-0.3, -1.2, -0.1)
    """

    tokens: TokenIds
    drawn: tuple[int, ...]
    """Places in `tokens`, rising."""
    logprobs: tuple[float, ...]
    """Of the drawn tokens, under the distribution they were drawn from."""
    kept: Sequence[TokenIds] = ()
    """What each of them was drawn from, as `Completion.kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one task, and what it earned. A failed one says why and has no reward.

    The completion of several turns has all tokens that were drawn, and the whole exchange as text.
    """

    task: Task
    completion: Completion | None
    reward: float | None
    error: str = ""
    sequences: tuple[TokenSequence, ...] = ()
    """What to train on: filled where rollouts are drawn for training. Several when a chat template
    rewrote what had been said."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else was measured of it: `certainty`, the probability of the right choice among the
    choices, of a task that has choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task under one model."""

    task: Task
    model: ModelRef
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured of one model on one list of tasks: a reward per task id, in task order.

    A task whose rollout failed is in `errors` and not in `rewards`.
    """

    model: ModelRef
    rewards: Mapping[str, float]
    errors: Mapping[str, str]
    num_tokens: int
    """Of prompts and answers."""
    seconds: float
    num_answer_tokens: int = 0
    """Of the answers alone."""
    certainties: Mapping[str, float] = field(default_factory=dict)
    """By task id, the probability of the right choice among the choices, of tasks that have
    choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training row: `targets[j]` is predicted from the tokens up to `positions[j]`.

    Prompt (5, 6), drawn answer (7, 8), learned with advantage 2:

        tokens    (5, 6, 7)      what the model reads
        positions (1, 2)         after 5 6, and after 5 6 7
        targets   (7, 8)         what it is to say there
        weights   (1.0, 1.0)     sampled_logprobs (-0.3, -1.2)     advantages (2.0, 2.0)

    All columns are as long as `targets`. Positions never fall; one that comes K times has K
    targets, each with its own weight (soft targets), and one that does not come predicts nothing
    and costs no head. A target of weight 0 changes no gradient and still gets its log-probability.
    """

    tokens: TokenIds
    positions: tuple[int, ...]
    targets: TokenIds
    weights: tuple[float, ...]
    sampled_logprobs: tuple[float, ...] = ()
    """Of the targets when they were drawn, under `temperature` and over `kept`."""
    old_logprobs: tuple[float, ...] = ()
    """Of the targets by the trainer, before the first step on this datum: what `forward` gives."""
    reference_logprobs: tuple[float, ...] = ()
    """Of the targets under the model that a KL term holds the trained one to."""
    advantages: tuple[float, ...] = ()
    temperature: float = 1.0
    """The one the targets were drawn with: logits are divided by it."""
    kept: Sequence[TokenIds] = ()
    """The tokens that top_p, top_k and min_p left to draw each target from, each once:
    log-probabilities are normalised over them. An empty entry, or none at all: the whole
    vocabulary. KeptTokens takes the least memory."""
    inputs: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """What else a loss of the caller's own reads, by name: numbers, lists of them, or lists of
    lists; they need not be as long as `targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The shape of a new adapter, as a client of the service chooses it."""

    rank: int
    seed: int
    """Of the first factors; the second ones are zero."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """The output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Ask a trainer for a loss of one trainee on its data."""

    trainee: str
    data: tuple[Datum, ...]
    loss: str = "cross_entropy"
    loss_options: Mapping[str, Json] = field(default_factory=dict)
    """What the loss lets one choose, such as {"clip_low": 0.2}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """What came of one TrainRequest. A failed one says why, has no results and added nothing."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    logprobs: tuple[tuple[float, ...], ...] = ()
    """Of every target of every datum, in their order, before the step."""
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
    """The weights shrink by learning_rate * this."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm; 0 leaves them as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came of one OptimStep. A failed one says why and changed no weight."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


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
