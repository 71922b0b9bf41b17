"""The engine as a port: `sample`, `score`, `load`, `unload` over one model in this process.

    async with open_engine(EngineConfig(model="smollm2")) as engine:
        ref = await engine.load(read_adapter("adapters/poet"))
        [[completion]] = await engine.sample([SampleRequest(model=ref, prompt=tokens)])

| stage    | consumes          | produces       | waits for                             |
|----------|-------------------|----------------|---------------------------------------|
| callers  | requests          | jobs in inbox  | their jobs' answers                   |
| driver   | inbox             | answers        | the inbox, while nothing is in flight |
| a thread | one batcher step  | answered jobs  | nothing                               |

Only the thread that runs a step, or the driver between two steps, touches the batcher. That one
thread does all the arithmetic, from loading the weights on: torch keeps a team of workers for every
thread that computes, and with more workers than cores each call waits for them to wake up.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import torch
from pydantic import Field
from transformers import AutoTokenizer

from rookery.config import Config
from rookery.embedded.admission import sample_job, score_job
from rookery.embedded.batcher import Batcher, Job
from rookery.embedded.folders import resolve_model
from rookery.errors import EngineError, ModelError, boundary
from rookery.slots import SlottedModel, load_model
from rookery.slots.linear import can_pack
from rookery.slots.model import first_adapted_layer
from rookery.types import (
    Adapter,
    Completion,
    ModelRef,
    SampleRequest,
    Score,
    ScoreRequest,
)

__all__ = ["EmbeddedEngine", "EngineConfig", "EngineStats", "open_engine", "run_engine"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Given = ParamSpec("Given")


class EngineConfig(Config):
    """The embedded engine."""

    type: Literal["embedded"] = "embedded"
    model: str = "smollm2"
    """A Hugging Face id, a local folder, or `smollm2`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when torch sees one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on the CPU and the model's own type on a GPU."""
    max_rows: int = Field(default=64, ge=1)
    """How many sequences are decoded together."""
    max_rank: int = Field(default=64, ge=1)
    """The highest rank an adapter may have."""
    prefill_tokens: int = Field(default=1024, ge=1)
    """How many prompt tokens one pass computes at most."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the prefixes kept for reuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Tokens since the start."""

    requested_tokens: int
    """Prompt tokens as asked for."""
    prompt_tokens: int
    """Prompt tokens computed: every shared prefix counts once per model."""
    trunk_tokens: int
    """Prompt tokens computed below the first adapted layer: once for all models."""
    decoded_tokens: int


@dataclass(slots=True)
class _Served:
    """A loaded adapter: its slot, how often it was loaded, what is in flight on it."""

    slot: int
    adapter: Adapter
    num_loads: int = 1
    num_in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """One `sample` or `score` call: its jobs and who waits for them."""

    jobs: list[Job]
    done: asyncio.Future[None]
    num_open: int


class EmbeddedEngine:
    """A Sampler and an Adapters over one model; use it inside `async with`."""

    def __init__(
        self,
        model: SlottedModel,
        *,
        config: EngineConfig,
        detokenize: Callable[[Sequence[int]], str],
        name: str,
        thread: Executor,
    ) -> None:
        self.base = ModelRef(name="base", version=name)
        self.config = config
        self._model = model
        self._thread = thread
        self._batcher = Batcher(
            model,
            detokenize=detokenize,
            max_rows=config.max_rows,
            prefill_tokens=config.prefill_tokens,
            cache_tokens=int(config.cache_gib * 2**30 / model.shape.token_bytes(model.dtype)),
        )
        self._served: dict[ModelRef, _Served] = {}
        self._calls: dict[int, _Call] = {}
        # Filled by callers, drained by the driver between steps; bounded by the callers, each of
        # which waits for its own call before it makes another.
        self._inbox: list[_Call] = []
        self._dropped: list[_Call] = []
        self._wake = asyncio.Event()
        self._between_steps = asyncio.Lock()

    @property
    def stats(self) -> EngineStats:
        stats = self._batcher.prefill.stats
        return EngineStats(
            requested_tokens=stats.requested_tokens,
            prompt_tokens=stats.branch_tokens,
            trunk_tokens=stats.trunk_tokens,
            decoded_tokens=self._batcher.num_decoded,
        )

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The layers an adapter may adapt: name -> (in, out)."""
        return {n: (x.in_features, x.out_features) for n, x in self._model.linears.items()}

    @property
    def max_rank(self) -> int:
        """The highest rank an adapter may have."""
        return self.config.max_rank

    @property
    def context_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self._model.shape.context_tokens

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def loaded(self) -> tuple[ModelRef, ...]:
        """The adapters that requests can name, oldest first."""
        return tuple(ref for ref, served in self._served.items() if served.num_loads > 0)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        jobs = [sample_job(r, slot=self._slot(r.model), shape=self._model.shape) for r in requests]
        await self._submit(list(jobs))
        return [_answer(job.result) for job in jobs]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        jobs = [score_job(r, slot=self._slot(r.model), shape=self._model.shape) for r in requests]
        await self._submit(list(jobs))
        return [_answer(job.result) for job in jobs]

    async def load(self, adapter: Adapter) -> ModelRef:
        """Check the adapter against the model, then give it a slot."""
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._between_steps:
            served = self._served.get(ref)
            if served is not None:
                served.num_loads += 1
                return ref
            self._model.bank.check(adapter, max_rank=self.config.max_rank)
            used = {s.slot for s in self._served.values()}
            slot = next(i for i in range(len(used) + 1) if i not in used)
            await _run_in(self._thread, self._model.bank.put, slot, adapter)
            self._batcher.prefill.forget(slot)
            self._served[ref] = _Served(slot=slot, adapter=adapter)
            self._place_cut()
        return ref

    async def unload(self, ref: ModelRef) -> None:
        async with self._between_steps:
            served = self._known(ref)
            if served is None:
                raise EngineError("The base model cannot be unloaded.")
            served.num_loads -= 1
            self._retire()

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix nothing in flight needs: what is asked next is computed anew."""
        async with self._between_steps:
            self._batcher.prefill.clear()

    def _retire(self) -> None:
        """Free the slots of adapters that are unloaded and have nothing in flight.

        Called between steps only. The cut stays: lowering it would forget every prefix.
        """
        for ref, served in list(self._served.items()):
            if served.num_loads <= 0 and served.num_in_flight == 0:
                del self._served[ref]
                self._batcher.prefill.forget(served.slot)
                self._model.bank.clear(served.slot)

    def _place_cut(self) -> None:
        """Let the trunk end below the first adapted layer of any adapter."""
        names = [name for s in self._served.values() for name in s.adapter.factors]
        cut = first_adapted_layer(names, num_layers=self._model.shape.num_layers)
        current = self._batcher.prefill.cut
        if cut < current or (cut > current and self._batcher.is_idle):
            self._batcher.set_cut(cut)

    def _known(self, ref: ModelRef) -> _Served | None:
        if ref == self.base:
            return None
        served = self._served.get(ref)
        if served is None or served.num_loads <= 0:
            names = ", ".join(r.served_name for r in (self.base, *self.loaded))
            raise EngineError(f"{ref.served_name} is not loaded. Loaded: {names}.")
        return served

    def _slot(self, ref: ModelRef) -> int | None:
        served = self._known(ref)
        return None if served is None else served.slot

    async def _submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one call and wait until all are answered."""
        if not jobs:
            return
        call = _Call(jobs, asyncio.get_running_loop().create_future(), len(jobs))
        refs = [job.request.model for job in jobs if job.request.model != self.base]
        for ref in refs:
            self._served[ref].num_in_flight += 1
        self._inbox.append(call)
        self._wake.set()
        try:
            await call.done
        except asyncio.CancelledError:
            self._dropped.append(call)
            self._wake.set()
            raise
        finally:
            for ref in refs:
                self._served[ref].num_in_flight -= 1
            self._wake.set()  # the driver frees slots that were unloaded meanwhile

    async def drive(self) -> None:
        """Run steps while there is work; `open_engine` keeps this going."""
        while True:
            await self._wake.wait()
            async with self._between_steps:
                self._take_calls()
                if self._batcher.is_idle:
                    self._wake.clear()
                    continue
                try:
                    answered = await _run_in(self._thread, self._batcher.step)
                except (RuntimeError, MemoryError) as error:
                    self._fail_all(error)
                    continue
            for job in answered:
                self._answer(job)

    def _take_calls(self) -> None:
        self._retire()
        for call in self._inbox:
            self._calls.update({id(job): call for job in call.jobs})
        self._batcher.add([job for call in self._inbox for job in call.jobs])
        self._inbox.clear()
        for call in self._dropped:
            self._batcher.drop(call.jobs)
            for job in call.jobs:
                self._calls.pop(id(job), None)
        self._dropped.clear()

    def _answer(self, job: Job) -> None:
        call = self._calls.pop(id(job), None)
        if call is None:
            return
        call.num_open -= 1
        if call.num_open == 0 and not call.done.done():
            call.done.set_result(None)

    def _fail_all(self, error: Exception) -> None:
        """A step died (out of memory, a kernel error): every job in flight gets that answer."""
        logger.error("an engine step failed: %s", error)
        calls = {id(call): call for call in self._calls.values()}.values()
        for call in calls:
            self._batcher.drop(call.jobs)
            if not call.done.done():
                call.done.set_exception(
                    EngineError(
                        f"The engine failed: {error}. If memory is short lower max_rows, "
                        "prefill_tokens or cache_gib."
                    )
                )
        self._calls.clear()


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and keep the engine running inside the block."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device is cuda, but torch sees no GPU here: write cpu or auto.")
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        folder = await _run_in(thread, resolve_model, config.model)
        model = await _run_in(
            thread, load_model, folder.path, device=device, dtype=config.dtype, names=folder.names
        )
        if can_pack(device=model.device, dtype=model.dtype):
            await _run_in(thread, model.pack)
        with boundary(ModelError, f"The tokenizer of {config.model} cannot be loaded"):
            tokenizer = await _run_in(thread, AutoTokenizer.from_pretrained, folder.path)

        def detokenize(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
            return text

        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=folder.name, thread=thread
        )
        async with _driven(engine):
            yield engine


@asynccontextmanager
async def run_engine(
    model: SlottedModel,
    *,
    config: EngineConfig,
    detokenize: Callable[[Sequence[int]], str],
    name: str,
) -> AsyncIterator[EmbeddedEngine]:
    """Keep an engine over a model that is loaded already running inside the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=name, thread=thread
        )
        async with _driven(engine):
            yield engine


@asynccontextmanager
async def _driven(engine: EmbeddedEngine) -> AsyncIterator[None]:
    driver = asyncio.create_task(engine.drive(), name="rookery-engine")
    try:
        yield
    finally:
        driver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver


async def _run_in(
    thread: Executor,
    function: Callable[Given, Answer],
    *args: Given.args,
    **kwargs: Given.kwargs,
) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(
        thread, partial(function, *args, **kwargs)
    )


def _answer(result: Answer | EngineError | None) -> Answer:
    if isinstance(result, EngineError):
        raise result
    assert result is not None
    return result
