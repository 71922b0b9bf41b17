"""What is asked of trainers, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery.types.models import Json, TokenIds

__all__ = [
    "Datum",
    "LoraShape",
    "OptimStep",
    "StepOutput",
    "TrainOutput",
    "TrainRequest",
]


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
