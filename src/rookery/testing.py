"""Fakes of every port, for testing loops without a model: deterministic, in memory, recording.

sampler = FakeSampler(reply=lambda request, index: (5, 6))
await my_loop(sampler, ...)
assert sampler.num_samples == 12
"""

import asyncio
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rookery.errors import EngineError, ExecutorError, SandboxError, TrainError
from rookery.ports import Observer
from rookery.types import (
    Adapter,
    Completion,
    CompletionDelta,
    Job,
    JobDone,
    JobFailed,
    JobOutcome,
    Json,
    KeptTokens,
    LoraShape,
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
    TokenUsage,
    TopLogprobs,
    TrainOutput,
    TrainRequest,
    Weights,
    WorkerInfo,
    WorkerLost,
)

__all__ = [
    "BASE",
    "FakeAdapters",
    "FakeEmbedder",
    "FakeExecutor",
    "FakeObserver",
    "FakePublisher",
    "FakeSampler",
    "FakeScorer",
    "FakeTask",
    "FakeTextModel",
    "FakeTrainee",
    "FakeTrainer",
    "open_fake_task",
]


BASE = ModelRef(name="base", version="fake")
VOCABULARY = range(5, 95)
"""Vocabulary of the fakes' replies and `top_logprobs`."""


def _hashed(*parts: object) -> float:
    """A number in (0, 1), a pure function of the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 1) / (2**64 + 1)


def _hashed_reply(request: SampleRequest, index: int) -> TokenIds:
    key = (request.model, request.prompt, request.params.seed, index)
    length = min(4, request.params.max_tokens)
    return tuple(VOCABULARY[int(_hashed(key, i) * len(VOCABULARY))] for i in range(length))


def _hashed_logprob(model: ModelRef, prefix: TokenIds, token: int) -> float:
    return math.log(_hashed(model, prefix, token))


class FakeObserver(Observer[Any]):
    """Records the phases and steps of a loop. `on_step` is called with each step and may raise."""

    def __init__(self, on_step: Callable[[Any], None] = lambda _: None) -> None:
        self._tell = on_step
        self.phases: list[str] = []
        self.steps: list[Any] = []

    def on_phase(self, name: str) -> None:
        self.phases.append(name)

    def on_step(self, step: Any) -> None:
        self.steps.append(step)
        self._tell(step)


class FakeSampler:
    """Answers by a function, or else by a hash of the request. Counts its requests."""

    def __init__(
        self,
        *,
        reply: Callable[[SampleRequest, int], TokenIds] = _hashed_reply,
        logprob: Callable[[ModelRef, TokenIds, int], float] = _hashed_logprob,
        decode: Callable[[TokenIds], str] = lambda tokens: " ".join(map(str, tokens)),
    ) -> None:
        self._reply = reply
        self._logprob = logprob
        self._decode = decode
        self.num_samples = 0
        self.num_scores = 0
        self.failing: set[ModelRef] = set()
        """Requests that name one of these refs raise EngineError."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        await self._pass([request.model for request in requests])
        self.num_samples += sum(request.params.n for request in requests)
        answers = [
            tuple(self._completion(request, index) for index in range(request.params.n))
            for request in requests
        ]
        for request, completions in zip(requests, answers, strict=True):
            for sample, completion in enumerate(completions):
                self._tell(request, sample, completion)
        return answers

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        await self._pass([request.model for request in requests])
        self.num_scores += len(requests)
        return [self._score(request) for request in requests]

    def _tell(self, request: SampleRequest, sample: int, completion: Completion) -> None:
        """Send a delta per token, if the request asks for deltas."""
        tokens = completion.tokens
        for at in range(len(tokens) if request.on_delta else 0):
            is_last = at + 1 == len(tokens)
            start, text = len(self._decode(tokens[:at])), self._decode(tokens[: at + 1])
            delta = CompletionDelta(
                sample=sample,
                tokens=tokens[at : at + 1],
                logprobs=completion.logprobs[at : at + 1],
                text=text[start:],
                finish_reason=completion.finish_reason if is_last else None,
                top_logprobs=completion.top_logprobs[at : at + 1],
            )
            if request.on_delta is not None:
                request.on_delta(delta)

    async def _pass(self, models: Sequence[ModelRef]) -> None:
        await asyncio.sleep(0)
        for model in models:
            if model in self.failing:
                raise EngineError(f"{model.served_name} was told to fail.")

    def _completion(self, request: SampleRequest, index: int) -> Completion:
        tokens = self._reply(request, index)
        logprobs = tuple(
            self._logprob(request.model, request.prompt + tokens[:i], token)
            for i, token in enumerate(tokens)
        )
        return Completion(
            model=request.model,
            tokens=tokens,
            logprobs=logprobs,
            text=self._decode(tokens),
            finish_reason="length" if len(tokens) >= request.params.max_tokens else "stop",
            top_logprobs=tuple(
                self._top(request.model, request.prompt + tokens[:i], request.params.top_logprobs)
                for i in range(len(tokens) if request.params.top_logprobs else 0)
            ),
            kept=KeptTokens.of(sorted({*VOCABULARY, token}) for token in tokens)
            if request.params.return_kept and request.params.is_cut
            else (),
        )

    def _score(self, request: ScoreRequest) -> Score:
        tokens = request.tokens
        return Score(
            model=request.model,
            logprobs=tuple(
                self._logprob(request.model, tokens[:i], tokens[i])
                for i in range(request.start, len(tokens))
            ),
            label_logprobs=tuple(
                self._logprob(request.model, tokens, label) for label in request.labels
            ),
            top_logprobs=tuple(
                self._top(request.model, tokens[:i], request.top_logprobs)
                for i in range(request.start, len(tokens) + 1 if request.top_logprobs else 0)
            ),
        )

    def _top(self, model: ModelRef, prefix: TokenIds, num: int) -> TopLogprobs:
        known = [(token, self._logprob(model, prefix, token)) for token in VOCABULARY]
        return tuple(sorted(known, key=lambda pair: -pair[1])[:num])


class FakeTextModel:
    """Replies by a function of the request; a None is a failure. Keeps its requests."""

    def __init__(
        self, reply: Callable[[TextRequest], str | None], *, name: str = "fake-text"
    ) -> None:
        self._reply = reply
        self._name = name
        self.requests: list[TextRequest] = []

    async def reply(self, request: TextRequest) -> TextReply:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self._reply(request)
        if text is None:
            raise EngineError(f"{self._name} was told to fail.")
        words = text.split()
        is_cut = len(words) > request.max_tokens
        num_prompt = sum(len(message.content.split()) for message in request.messages)
        num_new = min(len(words), request.max_tokens)
        return TextReply(
            text=" ".join(words[:num_new]) if is_cut else text,
            finish_reason="length" if is_cut else "stop",
            model=self._name,
            usage=TokenUsage(prompt_tokens=num_prompt, completion_tokens=num_new),
        )


class FakeEmbedder:
    """Embeds by a function of the text; a None is a failure. Keeps its texts."""

    def __init__(self, embed: Callable[[str], Sequence[float] | None]) -> None:
        self._embed = embed
        self.texts: list[str] = []

    async def embed(self, text: str) -> tuple[float, ...]:
        self.texts.append(text)
        await asyncio.sleep(0)
        vector = self._embed(text)
        if vector is None:
            raise EngineError("The embedder was told to fail.")
        return tuple(vector)


class FakeAdapters:
    """Records loaded adapters. An adapter loaded twice is unloaded twice, as in an engine."""

    def __init__(self) -> None:
        self.loaded: dict[ModelRef, Adapter] = {}
        self.num_loads = 0
        self._holders: Counter[ModelRef] = Counter()

    async def load(self, adapter: Adapter) -> ModelRef:
        ref = ModelRef(name=adapter.name, version=adapter.version)
        self.loaded[ref] = adapter
        self._holders[ref] += 1
        self.num_loads += 1
        return ref

    async def unload(self, ref: ModelRef) -> None:
        if ref not in self.loaded:
            raise EngineError(f"{ref.served_name} is not loaded.")
        self._holders[ref] -= 1
        if self._holders[ref] == 0:
            del self.loaded[ref]


class FakePublisher:
    """Publishes everything under one name, with the next version."""

    def __init__(self, name: str = "policy") -> None:
        self._name = name
        self.published: list[Weights] = []

    async def publish(self, weights: Weights) -> ModelRef:
        self.published.append(weights)
        return ModelRef(name=self._name, version=str(len(self.published)))


@dataclass
class FakeTrainee:
    """A model of one number."""

    value: float = 0.0
    gradient: float = 0.0
    num_steps: int = 0


class FakeTrainer:
    """`forward_backward` sums the weighted advantages; a step adds them to the trainee's number.
    It is a `Trainees` too; its folders hold that number.

    Log-probabilities are hashes of the tokens read. A request fails alone if its trainee is unknown
    or in `failing`.
    """

    def __init__(self, *trainees: str) -> None:
        self.trainees = {name: FakeTrainee() for name in trainees or ("policy",)}
        self.failing: set[str] = set()

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        outputs = await self.forward(requests)
        for request, output in zip(requests, outputs, strict=True):
            if not output.error:
                pulls = [
                    weight * pull
                    for datum in request.data
                    for weight, pull in zip(
                        datum.weights,
                        datum.advantages or (1.0,) * len(datum.weights),
                        strict=True,
                    )
                ]
                self.trainees[request.trainee].gradient += sum(pulls)
        return outputs

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return [self._forward(request) for request in requests]

    def _forward(self, request: TrainRequest) -> TrainOutput:
        if self._error(request.trainee):
            return TrainOutput(error=self._error(request.trainee))
        model = ModelRef(name=request.trainee, version="fake")
        logprobs = tuple(
            tuple(
                _hashed_logprob(model, datum.tokens[: position + 1], target)
                for position, target in zip(datum.positions, datum.targets, strict=True)
            )
            for datum in request.data
        )
        loss = -sum(
            weight * logprob
            for datum, row in zip(request.data, logprobs, strict=True)
            for weight, logprob in zip(datum.weights, row, strict=True)
        )
        metrics = {"train/num_data": float(len(request.data)), "train/loss_sum": loss}
        return TrainOutput(metrics=metrics, logprobs=logprobs)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        return [self._step(step) for step in steps]

    def _step(self, step: OptimStep) -> StepOutput:
        if self._error(step.trainee):
            return StepOutput(error=self._error(step.trainee))
        trainee = self.trainees[step.trainee]
        trainee.value += step.learning_rate * trainee.gradient
        trainee.gradient = 0.0
        trainee.num_steps += 1
        return StepOutput(metrics={"train/value": trainee.value})

    def _error(self, trainee: str) -> str:
        if trainee not in self.trainees:
            return f"There is no trainee {trainee!r}."
        return f"{trainee} was told to fail." if trainee in self.failing else ""

    async def save(self, trainee: str, path: Path) -> None:
        state = json.dumps(asdict(self.trainees[trainee]))
        await asyncio.to_thread(path.write_text, state)

    async def load(self, trainee: str, path: Path) -> None:
        state = json.loads(await asyncio.to_thread(path.read_text))
        self.trainees[trainee] = FakeTrainee(**state)

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        value = 0.0
        if isinstance(start, Path):
            value = json.loads(await asyncio.to_thread((start / "value.json").read_text))
        self.trainees[trainee] = FakeTrainee(value=value)

    async def remove(self, trainee: str) -> None:
        self.trainees.pop(trainee, None)

    async def export(self, trainee: str, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        value = json.dumps(self.trainees[trainee].value)
        await asyncio.to_thread((folder / "value.json").write_text, value)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        """Refuses nodes of a graph whose target is `forbidden`."""
        if "forbidden" in json.dumps(options):
            raise TrainError(f"{loss} uses 'forbidden', which is not run here.")

    async def publish(self, trainee: str) -> ModelRef:
        return ModelRef(name=trainee, version=str(self.trainees[trainee].num_steps))


class FakeScorer:
    """Rewards by a function of task and completion."""

    def __init__(
        self,
        reward: Callable[[Task, Completion], float],
        *,
        answer: Literal["sample", "choose"] = "sample",
    ) -> None:
        self._reward = reward
        self.answer: Literal["sample", "choose"] = answer

    def read(self, completion: Completion) -> str | None:
        return completion.text

    async def reward(self, task: Task, completion: Completion) -> float:
        return self._reward(task, completion)


class FakeExecutor:
    """Runs `task` on payloads in this process, in order. Jobs in `lost` lose their worker."""

    def __init__(self, task: Callable[[bytes], bytes] = bytes) -> None:
        self._task = task
        self.lost: set[tuple[int, int]] = set()
        """As (attempt, epoch)."""
        self.jobs: list[Job] = []
        self.capacity = 1
        self.num_late = 0
        self._is_closed = False

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return (WorkerInfo(name="fake"),)

    async def submit(self, job: Job) -> JobOutcome:
        if self._is_closed:
            raise ExecutorError("The executor is closed.")
        self.jobs.append(job)
        if (job.attempt, job.epoch) in self.lost:
            return WorkerLost(reason="It was told to be lost.", worker="fake")
        try:
            output = self._task(job.payload)
        except Exception as error:  # noqa: BLE001  any exception of the task is an outcome
            return JobFailed(error=f"{type(error).__name__}: {error}", seconds=0.0, worker="fake")
        return JobDone(output=output, seconds=0.0, worker="fake")

    def cancel(self, attempt: int) -> None:
        """Does nothing: no job is ever in flight."""

    async def close(self) -> None:
        self._is_closed = True


# A task that does what its payload says: for tests of executors, of loops over them, of clusters.
#
# {"echo": "x"}  {"fail": "why"}  {"exit": 3}  {"kill": 9}  {"read": "file"}  {"wait": "file"}


class FakeTask:
    """Keeps the folder that it was opened with; answers in JSON."""

    def __init__(self, *, about: str, folder: Path | None) -> None:
        self.about = about
        self._folder = folder

    async def run(self, payload: bytes) -> bytes:
        [(action, value)] = json.loads(payload).items()
        result = await getattr(self, f"_{action}")(value)
        return json.dumps(result).encode()

    async def close(self) -> None:
        pass

    async def _echo(self, value: object) -> object:
        return value

    async def _pid(self, _: object) -> int:
        return os.getpid()

    async def _fail(self, message: str) -> None:
        raise ValueError(message)

    async def _exit(self, code: int) -> None:
        os._exit(code)

    async def _kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    async def _read(self, name: str) -> str:
        if self._folder is None:
            raise SandboxError("The task was opened without a folder.")
        return (self._folder / name).read_text(encoding="utf-8")

    async def _print(self, text: str) -> str:
        """Print to standard output, which must not disturb the worker's messages."""
        sys.stdout.write(text)
        sys.stdout.flush()
        return text

    async def _wait(self, path: str) -> None:
        """Start a process, write its id and the worker's to the file, and never return."""
        child = await asyncio.create_subprocess_exec("sleep", "1000")
        await asyncio.to_thread(_write_whole, Path(path), f"{os.getpid()} {child.pid}")
        await child.wait()


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="ascii")
    draft.rename(path)


async def open_fake_task(settings: bytes, folder: Path | None) -> FakeTask:
    """Settings: {"refuse": "why"} (with "where": only if that variable is set), {"exit": code}."""
    document = json.loads(settings or b"{}")
    if "refuse" in document and document.get("where", "PATH") in os.environ:
        raise SandboxError(document["refuse"])
    if "exit" in document:
        os._exit(document["exit"])
    return FakeTask(about="fake", folder=folder)
