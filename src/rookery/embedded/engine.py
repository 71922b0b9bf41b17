"""The engine as a port: `sample`, `score`, `load`, `unload` over one model in this process.

    async with open_engine(EngineConfig(model="smollm2")) as engine:
        ref = await engine.load(read_adapter("adapters/poet"))
        [[completion]] = await engine.sample([SampleRequest(model=ref, prompt=tokens)])

| stage    | consumes          | produces       | waits for                             |
|----------|-------------------|----------------|---------------------------------------|
| callers  | requests          | jobs in calls  | their jobs' answers                   |
| driver   | jobs              | answers        | new jobs, while nothing is in flight  |
| a thread | one batcher step  | answered jobs  | nothing                               |

One thread does all computation, including loading the weights. torch keeps a pool of workers for
each thread that computes, and with more workers than cores every call waits for them to wake up.
If the engine closes or stops at an unexpected error, waiting calls fail at once, later calls too.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, ParamSpec, Self, TypeVar

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.embedded.batcher import Batcher
from rookery.embedded.calls import Calls, RequestLimits, sample_job, score_job
from rookery.embedded.prefix import NO_MEMORY, is_short_memory, memory_bytes
from rookery.errors import EngineDownError, EngineError, RookeryError, boundary
from rookery.slots import SlottedModel
from rookery.slots.model import first_adapted_layer
from rookery.types import (
    Adapter,
    Completion,
    ModelRef,
    ModelWeights,
    SampleRequest,
    Score,
    ScoreRequest,
)

__all__ = ["EmbeddedEngine", "EngineConfig", "EngineStats", "check_int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Token counts since the start, and the present cache and load."""

    requested_tokens: int
    """Prompt tokens in all requests."""
    prompt_tokens: int
    """Prompt tokens computed; a shared prefix counts once per model."""
    trunk_tokens: int
    """Prompt tokens computed below the first adapted layer, once for all models."""
    decoded_tokens: int
    cached_tokens: int
    """Cached prompt tokens: once per model, and once more below the first adapted layer."""
    num_in_flight: int
    """Requests that are queued or being computed."""


class Pause:
    """Blocks new calls of one event loop while the weights change. One pause at a time.

    async with pause.calls():      # change the weights
    await pause.over()             # every call does this before it starts
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._turn = asyncio.Lock()
        # `calls` clears it and always sets it again; `over` waits for it.
        self._is_over = asyncio.Event()
        self._is_over.set()

    async def over(self) -> None:
        while not self._is_over.is_set():  # the next pause may start before a waiter runs
            await self._is_over.wait()

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """Wait until no job is in flight; no call starts inside the block."""
        async with self._turn:
            self._is_over.clear()
            try:
                await self._calls.idle.wait()
                yield
            finally:
                self._is_over.set()


logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Params = ParamSpec("Params")
_PREFILL_TOKENS = (1024, 16_384)
"""Default `prefill_tokens` on a CPU and on a GPU, which short passes would leave idle."""
_INT4_DTYPES = ("auto", "float32")


class EngineConfig(Config):
    """The embedded engine: one model in this process."""

    type: Literal["embedded"] = "embedded"
    model: str = "smollm2"
    """A Hugging Face id, a local folder, or `smollm2`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto` takes a GPU if torch sees one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto`: float32 on a CPU, the model's own type on a GPU."""
    weights: Literal["auto", "int4"] = "auto"
    """`auto` keeps the weights in `dtype`. `int4` rounds the weights of linear layers to 4 bits, in
    groups of 32. It needs a CPU under Linux, leaves everything else in float32, and cannot train.
    """
    max_rows: int = Field(default=64, ge=1)
    """Largest number of sequences decoded together."""
    max_rank: int = Field(default=64, ge=1)
    """Highest rank of an adapter."""
    prefill_tokens: int | None = Field(default=None, ge=1)
    """Limit on prompt tokens per pass. Default: 1,024 on a CPU, 16,384 on a GPU."""
    cache_gib: float = Field(default=1.0, gt=0, le=2**20)
    """Memory, in GiB, for cached prompt prefixes."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        check_int4(self.weights, device=self.device, dtype=self.dtype)
        return self

    @property
    def rounding(self) -> str | None:
        """Name of the weights' rounding; None if the weights have the type of the computation."""
        return None if self.weights == "auto" else self.weights


def check_int4(weights: str, *, device: str, dtype: str) -> None:
    """Raise ValueError if `weights` contradicts the device or the dtype."""
    if weights == "int4" and (device == "cuda" or dtype not in _INT4_DTYPES):
        raise ValueError(
            f"weights is int4, which computes in float32 on the CPU, with device {device} and "
            f"dtype {dtype}: leave these out, or leave weights out"
        )


@dataclass(slots=True)
class _Served:
    """A loaded adapter: its slot, the lowest layer it adapts, and how often it was loaded."""

    slot: int
    first_layer: int
    num_loads: int = 1


class EmbeddedEngine:
    """An Engine over one model. `open_engine` creates it and keeps it running."""

    batcher_type: ClassVar[type[Batcher]] = Batcher

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
        token_bytes = model.shape.token_bytes(model.dtype)
        self._limits = RequestLimits(
            shape=model.shape,
            memory_bytes=memory_bytes(model.device),
            token_bytes=token_bytes,
        )
        with boundary(
            EngineError,
            f"cache_gib is {config.cache_gib:g}, more than there is",
            foreign=NO_MEMORY,
            remedy=dict.fromkeys(NO_MEMORY, "Write a smaller one"),
        ):
            self._batcher = self.batcher_type(
                model,
                detokenize=detokenize,
                max_rows=config.max_rows,
                prefill_tokens=config.prefill_tokens
                or _PREFILL_TOKENS[model.device.type == "cuda"],
                cache_tokens=int(config.cache_gib * 2**30 / token_bytes),
            )
        self._served: dict[ModelRef, _Served] = {}
        self._calls = Calls()
        self._between_steps = asyncio.Lock()
        self._pause = Pause(self._calls)
        self._loop = asyncio.get_running_loop()
        self._ended = ""
        """Why the engine has ended; "" while it runs."""

    @property
    def stats(self) -> EngineStats:
        stats = self._batcher.prefill.stats
        return EngineStats(
            requested_tokens=stats.requested_tokens,
            prompt_tokens=stats.branch_tokens,
            trunk_tokens=stats.trunk_tokens,
            decoded_tokens=self._batcher.num_decoded,
            cached_tokens=self._batcher.prefill.num_cached,
            num_in_flight=self._calls.num_in_flight,
        )

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Layers that an adapter may adapt: name -> (in, out)."""
        return {n: (x.in_features, x.out_features) for n, x in self._model.linears.items()}

    @property
    def max_rank(self) -> int:
        return self.config.max_rank

    @property
    def context_tokens(self) -> int:
        """Limit on the tokens of a prompt and its answer together."""
        return self._model.shape.context_tokens

    @property
    def is_remote(self) -> bool:
        """True on a GPU: the CPU is free while the engine computes."""
        kind: str = self._model.device.type
        return kind != "cpu"

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a request's results are bitwise equal in any batch."""
        return not self.is_remote and not self._model.has_experts

    @property
    def token_counts(self) -> dict[str, int]:
        stats = self.stats
        return {
            "prompt_asked": stats.requested_tokens,
            "prompt_computed": stats.prompt_tokens,
            "prompt_computed_below_adapters": stats.trunk_tokens,
            "decoded": stats.decoded_tokens,
        }

    @property
    def loaded(self) -> tuple[ModelRef, ...]:
        """Adapters that requests can name, oldest first."""
        return tuple(ref for ref, served in self._served.items() if served.num_loads > 0)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        await self._admitted()
        jobs = [sample_job(r, slot=self._slot(r.model), limits=self._limits) for r in requests]
        await self._calls.answered(jobs)
        return [_answer(job.result) for job in jobs]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        await self._admitted()
        jobs = [score_job(r, slot=self._slot(r.model), limits=self._limits) for r in requests]
        await self._calls.answered(jobs)
        return [_answer(job.result) for job in jobs]

    async def load(self, adapter: Adapter) -> ModelRef:
        """Check the adapter against the model, then give it a slot."""
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._between_steps:
            self._require_running()
            served = self._served.get(ref)
            if served is not None:
                served.num_loads += 1
                return ref
            used = {s.slot for s in self._served.values()}
            slot = next(i for i in range(len(used) + 1) if i not in used)
            num_layers = self._model.shape.num_layers
            first = first_adapted_layer(list(adapter.factors), num_layers=num_layers)
            cut = min([first, *(s.first_layer for s in self._served.values())])
            await self._compute(self._put, slot, adapter, cut)
            self._served[ref] = _Served(slot=slot, first_layer=first)
        return ref

    async def unload(self, ref: ModelRef) -> None:
        async with self._between_steps:
            self._require_running()
            served = self._known(ref)
            if served is None:
                raise EngineError("The base model cannot be unloaded.")
            served.num_loads -= 1
            await self._retire()

    async def replace_base(self, weights: ModelWeights) -> ModelRef:
        """Replace the base model's weights; requests name them by the new version.

        Like `changing_base`, it waits for jobs in flight and needs all adapters unloaded.
        """
        self._require_running()
        self._model.check_weights(weights.tensors)
        async with self.changing_base() as rename:
            # Rename first: cancelling the caller does not stop the copy, and later requests must
            # not name the new weights by the old version.
            rename(ModelRef(name=weights.name, version=weights.version))
            try:
                await self._compute(self._model.set_weights, weights.tensors)
            except EngineError:
                self._end(
                    "The engine stopped: its weights were replaced only in part. Open another."
                )
                raise
            return self.base

    @asynccontextmanager
    async def changing_base(self) -> AsyncIterator[Callable[[ModelRef], None]]:
        """Pause computation inside the block, so that the base model's weights may change in place,
        for example those that a trainer shares. Yields a function that sets the new `base` ref.

        Waits for jobs in flight. New calls wait for the end of the block; those that name the old
        version are then refused. EngineError while an adapter is loaded, since adapters belong to
        the old weights.
        """
        self._require_running()
        self._require_no_adapters()
        async with self._pause.calls(), self._between_steps:
            self._require_running()
            self._require_no_adapters()
            await self._retire()
            await self._compute(self._batcher.clear)
            yield self._rename_base

    def _rename_base(self, ref: ModelRef) -> None:
        self.base = ref

    def _require_no_adapters(self) -> None:
        if self.loaded:
            names = ", ".join(ref.served_name for ref in self.loaded)
            raise EngineError(
                f"The base model cannot change while adapters for it are loaded ({names}): unload "
                "them first."
            )

    async def reset_prefix_cache(self) -> None:
        """Forget every prefix that no job in flight uses."""
        async with self._between_steps:
            self._require_running()
            await self._compute(self._batcher.clear)

    async def _retire(self) -> None:
        """Free the slots of unloaded adapters without jobs in flight. Called only between steps.

        The cut stays, since moving it would forget every prefix.
        """
        for ref, served in list(self._served.items()):
            if served.num_loads <= 0 and not self._calls.uses(ref):
                del self._served[ref]
                await self._compute(self._free, served.slot)

    def _put(self, slot: int, adapter: Adapter, cut: int) -> None:
        """Fill a free slot, and end the trunk below the first adapted layer of all adapters."""
        self._model.bank.check(adapter, max_rank=self.config.max_rank)
        self._model.bank.put(slot, adapter)
        current = self._batcher.prefill.cut
        if cut < current or (cut > current and self._batcher.is_idle):
            self._batcher.set_cut(cut)

    def _free(self, slot: int) -> None:
        self._batcher.forget(slot)
        self._model.bank.clear(slot)

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

    async def _admitted(self) -> None:
        self._require_running()
        await self._pause.over()
        self._require_running()

    def _require_running(self) -> None:
        if self._ended:
            raise EngineDownError(self._ended)
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("Call the engine from the event loop that opened it, not another.")

    def close(self) -> None:
        """Fail all waiting calls and refuse later ones. `open_engine` calls this."""
        self._end(_CLOSED)

    def _end(self, message: str) -> None:
        if not self._ended:
            self._ended = message
            self._calls.end(EngineDownError(message))

    async def drive(self) -> None:
        """Run steps while there is work, until the engine ends. `open_engine` runs it as a task."""
        try:
            while not self._ended:
                await self._calls.changed.wait()
                async with self._between_steps:
                    if not self._ended:
                        await self._retire()
                        await self._step()
        except EngineError as error:
            self._end(str(error))
        finally:
            self._end(_CLOSED)

    async def _step(self) -> None:
        """Run one batcher step and answer the finished calls. If memory is short, retry once."""
        added, dropped = self._calls.take()
        if not (added or dropped) and self._batcher.is_idle:
            self._calls.changed.clear()
            return
        try:
            try:
                answered = await self._compute(self._batcher.step, added, dropped)
            finally:
                self._send_deltas()
        except EngineError as error:
            self._require_running()
            self._calls.leave(dropped)
            taken = self._calls.taken()
            failed = [job for job in taken if job.is_second_try]
            again = [job for job in taken if not job.is_second_try]
            await self._compute(self._batcher.retry, again)
            self._calls.fail(failed, error)
            return
        self._calls.leave([*answered, *dropped])

    def _send_deltas(self) -> None:
        for job, delta in self._batcher.take_deltas():
            if job.request.on_delta is None:
                continue
            try:
                with boundary(EngineError, "on_delta of a request failed"):
                    job.request.on_delta(delta)
            except RookeryError as error:
                self._calls.drop(job, error)

    async def _compute(
        self, function: Callable[Params, Answer], *args: Params.args, **kwargs: Params.kwargs
    ) -> Answer:
        """Run a function in the engine's thread, to its end even if the caller is cancelled.

        Short memory fails only this call. Any other unexpected error ends the engine, because its
        state can no longer be trusted.
        """
        running = self._loop.run_in_executor(self._thread, partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except RookeryError:
            raise
        except Exception as error:  # any unexpected error fails all waiting calls
            detail = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            if is_short_memory(error):
                raise EngineError(
                    f"The engine is out of memory: {detail}. Send fewer requests at once, or lower "
                    "max_rows, prefill_tokens or cache_gib."
                ) from error
            logger.exception("the engine stops")
            self._end(
                f"The engine stopped at an unexpected error, {type(error).__name__}: {detail}. "
                "Leave its block and open a new one."
            )
            raise EngineDownError(self._ended) from error


_CLOSED = "The engine is closed: await every call inside its `async with` block."


def _answer(result: Answer | EngineError | None) -> Answer:
    if isinstance(result, EngineError):
        raise result
    assert result is not None
    return result
