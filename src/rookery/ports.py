"""The ports: what a part may ask of another, whoever provides it.

`Sampler` and `Trainer` carry the data; the others serve them. Everything above this file runs
unchanged on any implementation: the embedded engine, the vLLM fleet, an external API, a fake.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

from rookery.types import (
    Adapter,
    Completion,
    Draw,
    Evaluation,
    Group,
    Job,
    JobOutcome,
    Json,
    LoraShape,
    Message,
    ModelRef,
    OptimStep,
    SampleRequest,
    Score,
    ScoreRequest,
    StepOutput,
    Task,
    TextReply,
    TextRequest,
    TokenIds,
    TrainOutput,
    TrainRequest,
    Weights,
    WorkerInfo,
)

__all__ = [
    "AdapterFolders",
    "Adapters",
    "Codec",
    "Embedder",
    "Engine",
    "Evaluator",
    "Executor",
    "GroupDrawer",
    "Publisher",
    "Sampler",
    "Scorer",
    "TextModel",
    "Trainees",
    "Trainer",
]


@runtime_checkable
class Sampler(Protocol):
    """Tokens in, tokens out. Calls may overlap: an implementation batches what is in flight."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """The completions of each request, in request order, `params.n` of each. Cancelling the
        call ends what it draws."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """The log-probabilities of each request, in request order."""
        ...


@runtime_checkable
class Adapters(Protocol):
    """Where adapters become models that requests can name."""

    async def load(self, adapter: Adapter) -> ModelRef:
        """Make the adapter servable. Loading the same content twice returns the same ref."""
        ...

    async def unload(self, ref: ModelRef) -> None:
        """Forget it after its last request in flight. Unknown refs are an error."""
        ...


@runtime_checkable
class Engine(Sampler, Adapters, Protocol):
    """A sampler that adapters can be loaded into, and what a loop must know of it."""

    @property
    def base(self) -> ModelRef:
        """The base model."""
        ...

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """The layers an adapter may adapt: name -> (in, out)."""
        ...

    @property
    def max_rank(self) -> int:
        """The highest rank an adapter may have."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt with its answer; None when the servers do not tell."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it computes on other hardware: then candidates are made while it answers."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a request has the same bits in any batch, and not only to rounding."""
        ...

    @property
    def token_counts(self) -> Mapping[str, int]:
        """Tokens computed so far, by kind; empty when it does not tell."""
        ...


@runtime_checkable
class TextModel(Protocol):
    """Messages in, text out, no tokenizer: an external API, or an engine behind a chat
    template. Calls may overlap; a call that is cancelled leaves nothing running."""

    async def reply(self, request: TextRequest) -> TextReply:
        """One reply. A request that cannot be answered (refused, filtered, no server in time)
        raises an EngineError or a FleetError, and touches no other request."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """Text in, a vector out: texts of like meaning have vectors of like direction."""

    async def embed(self, text: str) -> tuple[float, ...]:
        """Finite numbers, as many for every text. A text that cannot be embedded raises an
        EngineError or a FleetError."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Gradients and steps of named trainees, many requests at once, answered in their order.

    A request that cannot be done (unknown trainee, a bad datum, a loss that is NaN) fails alone:
    its output says why, and the others are what they would be without it. Calls are done in the
    order they were made.
    """

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Add the gradients of each request to those its trainee has.

        Data without any weight are valid: they add zeros and give log-probabilities.
        """
        ...

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """The same outputs, and no gradients."""
        ...

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """Apply the gradients since each trainee's last step, and clear them.

        A step without gradients is valid: it is one with gradients of zero, so that moments decay,
        momentum still moves the weights and the step counts.
        """
        ...

    async def save(self, trainee: str, path: Path) -> None:
        """Write its weights, optimizer state and gradients not yet applied, atomically."""
        ...

    async def load(self, trainee: str, path: Path) -> None:
        """Restore what `save` wrote, exactly."""
        ...

    async def publish(self, trainee: str) -> ModelRef:
        """Hand its current weights to the samplers and return the version that names them."""
        ...


@runtime_checkable
class Trainees(Protocol):
    """Where the trainees of a Trainer are made, for callers that hold no tensors."""

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        """Train a new adapter, or the one in a PEFT folder, with a new optimizer. A trainee of
        that name is replaced."""
        ...

    async def remove(self, trainee: str) -> None:
        """Forget it with all it has learned. Idempotent."""
        ...

    async def export(self, trainee: str, folder: Path) -> None:
        """Write its current weights as a PEFT folder."""
        ...

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        """Raise TrainError with a sentence when the trainer has no such loss, whatever the data."""
        ...


@runtime_checkable
class AdapterFolders(Protocol):
    """Adapters for callers that hold no tensors: PEFT folders instead."""

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        """Make the adapter in the folder servable, as `Adapters.load`."""
        ...

    async def unload(self, ref: ModelRef) -> None:
        """As `Adapters.unload`."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Text and chats as tokens of one model, and back."""

    def encode(self, text: str) -> TokenIds: ...

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        """With the opening of the assistant's turn. TaskError when there are tools and the model's
        chat template has no place for them."""
        ...

    def decode(self, tokens: TokenIds) -> str: ...


@runtime_checkable
class Publisher(Protocol):
    """Hands a trainee's new weights, an adapter or all of them, to the samplers."""

    async def publish(self, weights: Weights) -> ModelRef:
        """The version that names them; the one published under the same name before is retired
        after its last request in flight. Weights of a kind it cannot serve are an error."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Completion x Task -> reward. Raises TaskError when it cannot judge; never invents one."""

    @property
    def answer(self) -> Literal["sample", "choose"]:
        """How the task is put to the model: sample a text, or choose among `task.choices`."""
        ...

    def read(self, completion: Completion) -> str | None:
        """What it takes as the answer; None when it finds none. Two texts that it reads alike
        are one answer: a vote counts them together."""
        ...

    async def reward(self, task: Task, completion: Completion) -> float: ...


@runtime_checkable
class GroupDrawer(Protocol):
    """Where the groups of a training come from: answers, or whole games."""

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """A group for each draw, in their order. What fails is in its group, with the reason."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Measures models on tasks."""

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        """One evaluation per model, in their order."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Where jobs run: local processes, Ray, Modal. All its workers hold the same task.

    A job is named by (attempt, epoch). The caller decides what a lost worker means: it submits the
    attempt again with the next epoch, or gives it up. Only what is in flight is remembered.
    """

    @property
    def capacity(self) -> int:
        """How many jobs can run at the same time now; changes as workers end and are replaced."""
        ...

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that get jobs, and those that do not with the reason."""
        ...

    @property
    def num_late(self) -> int:
        """Results and submissions of old epochs that were dropped."""
        ...

    async def submit(self, job: Job) -> JobOutcome:
        """Run the job when a worker is free. Cancelling the caller cancels the job.

        The same (attempt, epoch) while in flight is one job. A newer epoch cancels the older one,
        an older one is not run. Raises ExecutorError when no worker can run anything, or closed.
        """
        ...

    def cancel(self, attempt: int) -> None:
        """End the job of this attempt, killing what runs; it resolves to JobCancelled. Idempotent.

        An attempt that is not in flight is ignored.
        """
        ...

    async def close(self) -> None:
        """Cancel everything and end the workers. Idempotent."""
        ...


Step = TypeVar("Step", contravariant=True)


class Observer(Protocol[Step]):
    """Who is told how a loop goes on. What a subclass does not take is not said to anyone."""

    def on_phase(self, name: str) -> None:
        """What begins now: "founders", "ga 3", "select 20", "report"."""
        del name

    def on_step(self, step: Step) -> None:
        """What was done: a generation, a training step, a decision of a chain."""
        del step

    def on_progress(self, done: float, expected: float) -> None:
        """How much is done, and how much there is in all as far as is known, in units of work that
        each take about as long."""
        del done, expected

    def on_budget(self, share: float) -> None:
        """The part of a budget that is spent."""
        del share


class Unobserved(Observer[object]):
    """Nobody."""


UNOBSERVED = Unobserved()
