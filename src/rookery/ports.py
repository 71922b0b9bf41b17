"""The ports: the interfaces between parts, as Protocols.

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
        """Return `params.n` completions for each request, in request order. Cancelling the call
        ends its draws."""
        ...

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the log-probabilities of each request, in request order."""
        ...


@runtime_checkable
class Adapters(Protocol):
    """Loads adapters, so that requests can name them."""

    async def load(self, adapter: Adapter) -> ModelRef:
        """Load the adapter. Loading equal content twice returns the same ref."""
        ...

    async def unload(self, ref: ModelRef) -> None:
        """Unload the adapter after its last request in flight. An unknown ref is an error."""
        ...


@runtime_checkable
class Engine(Sampler, Adapters, Protocol):
    """A sampler that takes adapters, with the properties that loops need."""

    @property
    def base(self) -> ModelRef:
        """The base model."""
        ...

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """Layers that an adapter may adapt: name -> (in, out)."""
        ...

    @property
    def max_rank(self) -> int:
        """Highest rank of an adapter."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of a prompt with its answer; None if the servers do not report it."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it computes on other hardware, so that candidates can be made meanwhile."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a request has the same bits in any batch."""
        ...

    @property
    def token_counts(self) -> Mapping[str, int]:
        """Tokens computed so far, by kind; empty if unknown."""
        ...


@runtime_checkable
class TextModel(Protocol):
    """Messages in, text out, no tokenizer: an external API, or an engine behind a chat
    template. Calls may overlap; a call that is cancelled leaves nothing running."""

    async def reply(self, request: TextRequest) -> TextReply:
        """Return one reply. A request that cannot be answered (refused, filtered, no server in
        time) raises an EngineError or a FleetError and affects no other request."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """Text in, a vector out: similar texts have vectors of similar direction."""

    async def embed(self, text: str) -> tuple[float, ...]:
        """Return finite numbers, equally many for every text. A text that cannot be embedded raises
        an EngineError or a FleetError."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Gradients and steps of named trainees, many requests at once, answered in their order.

    A request that cannot be done (unknown trainee, a bad datum, a loss that is NaN) fails alone:
    its output has the error, and the other outputs are as they would be without it. Calls are done
    in the order in which they are made.
    """

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Add the gradients of each request to those of its trainee.

        Data whose weights are all 0 are valid: they add zeros and give log-probabilities.
        """
        ...

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Return the same outputs without adding gradients."""
        ...

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """Apply the gradients since each trainee's last step, and clear them.

        A step without gradients is one with zero gradients: moments decay, momentum still moves the
        weights, and the step counts.
        """
        ...

    async def save(self, trainee: str, path: Path) -> None:
        """Write weights, optimizer state and unapplied gradients, atomically."""
        ...

    async def load(self, trainee: str, path: Path) -> None:
        """Restore what `save` wrote, exactly."""
        ...

    async def publish(self, trainee: str) -> ModelRef:
        """Hand the current weights to the samplers and return their ref."""
        ...


@runtime_checkable
class Trainees(Protocol):
    """Makes the trainees of a Trainer, for callers that hold no tensors."""

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        """Begin to train a new adapter, or the one in a PEFT folder, with a new optimizer. A
        trainee of the same name is replaced."""
        ...

    async def remove(self, trainee: str) -> None:
        """Remove the trainee and its weights. Idempotent."""
        ...

    async def export(self, trainee: str, folder: Path) -> None:
        """Write the current weights as a PEFT folder."""
        ...

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        """Raise TrainError if the trainer has no such loss or option."""
        ...


@runtime_checkable
class AdapterFolders(Protocol):
    """Loads adapters from PEFT folders, for callers that hold no tensors."""

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        """Load the adapter in the folder; see `Adapters.load`."""
        ...

    async def unload(self, ref: ModelRef) -> None:
        """See `Adapters.unload`."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Text and chats as tokens of one model, and back."""

    def encode(self, text: str) -> TokenIds: ...

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        """Encode a chat up to the opening of the assistant's turn. Raises TaskError if there are
        tools and the model's chat template has no place for them."""
        ...

    def decode(self, tokens: TokenIds) -> str: ...


@runtime_checkable
class Publisher(Protocol):
    """Hands a trainee's new weights, an adapter or all of them, to the samplers."""

    async def publish(self, weights: Weights) -> ModelRef:
        """Publish the weights and return their ref. The previous version of the same name is
        retired after its last request in flight. Weights that cannot be served are an error."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Completion x Task -> reward. Raises TaskError when it cannot judge; never invents one."""

    @property
    def answer(self) -> Literal["sample", "choose"]:
        """Whether the model samples a text or chooses among `task.choices`."""
        ...

    def read(self, completion: Completion) -> str | None:
        """Return the answer in a completion; None if there is none. A majority vote counts
        completions of equal answers together."""
        ...

    async def reward(self, task: Task, completion: Completion) -> float: ...


@runtime_checkable
class GroupDrawer(Protocol):
    """Draws the groups of a training: answers, or whole games."""

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """Return a group per draw, in order. A failed rollout is in its group with its error."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Measures models on tasks."""

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        """Return one evaluation per model, in order."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Runs jobs in local processes, on Ray or on Modal. All its workers hold the same task.

    A job is named by (attempt, epoch). After a lost worker the caller submits the attempt again
    with the next epoch, or gives it up. The Executor remembers only jobs in flight.
    """

    @property
    def capacity(self) -> int:
        """Jobs that can run at the same time now; changes as workers end and are replaced."""
        ...

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers; those that get no jobs have a `refusal`."""
        ...

    @property
    def num_late(self) -> int:
        """Number of dropped results and submissions of old epochs."""
        ...

    async def submit(self, job: Job) -> JobOutcome:
        """Run the job as soon as a worker is free. Cancelling the call cancels the job.

        Equal (attempt, epoch) in flight are one job. A newer epoch cancels the older one; an older
        epoch is not run. Raises ExecutorError if no worker can run jobs, or after `close`.
        """
        ...

    def cancel(self, attempt: int) -> None:
        """Kill the job of this attempt; it resolves to JobCancelled. Idempotent.

        An attempt that is not in flight is ignored.
        """
        ...

    async def close(self) -> None:
        """Cancel everything and end the workers. Idempotent."""
        ...


Step = TypeVar("Step", contravariant=True)


class Observer(Protocol[Step]):
    """Is told of a loop's progress. A subclass overrides the calls that it needs."""

    def on_phase(self, name: str) -> None:
        """A phase begins: "founders", "ga 3", "select 20", "report"."""
        del name

    def on_step(self, step: Step) -> None:
        """A generation, a training step or a decision of a chain is done."""
        del step

    def on_progress(self, done: float, expected: float) -> None:
        """Work done and expected in all, in units that take about equally long."""
        del done, expected

    def on_budget(self, share: float) -> None:
        """Share of the budget that is spent, from 0 to 1."""
        del share


class Unobserved(Observer[object]):
    """Ignores everything."""


UNOBSERVED = Unobserved()
