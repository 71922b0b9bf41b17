"""The fleet as a port: `sample`, `score`, `load`, `unload` over any number of vLLM servers.

    config = FleetConfig(urls=("http://gpu1:8000", "http://gpu2:8000"))
    async with open_fleet(config) as fleet:
        ref = await fleet.load(read_adapter("adapters/poet"))
        [[completion]] = await fleet.sample([SampleRequest(model=ref, prompt=tokens)])

Servers are given by URL, started on this machine (`launch`), or both.
"""

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import aiohttp

from rookery.errors import ConfigError, FleetError, RookeryError, boundary
from rookery.fleet.http.capabilities import (
    Fit,
    base_names,
    check_fit,
    common_capabilities,
    read_head,
    read_shapes,
)
from rookery.fleet.http.client import Client, max_calls, open_session
from rookery.fleet.http.scoring import assemble_score, plan_score
from rookery.fleet.http.wire import (
    Choice,
    StreamedChoices,
    read_completions,
    read_reading,
    sample_fields,
)
from rookery.fleet.perturbed import PerturbedFactors, StepPopulation
from rookery.fleet.residency import ServedAdapters, clear_left, require_adapter
from rookery.fleet.routing.load import PromptRequest, Spread, make_batches
from rookery.fleet.routing.paused import CallExclusion
from rookery.fleet.routing.pool import Pool
from rookery.fleet.routing.replica import Replica
from rookery.fleet.servers.launch import LocalServer, Progress, open_servers
from rookery.fleet.servers.ray_placement import place_on_ray
from rookery.fleet.servers.settings import FleetConfig
from rookery.fleet.staging import Staging, open_staging
from rookery.runtime.concurrency import run_to_end
from rookery.types import (
    Adapter,
    Completion,
    CompletionDelta,
    ModelRef,
    SampleRequest,
    Score,
    ScoreRequest,
    Weights,
)

__all__ = ["OBJECTS", "Fleet", "collected_rarely", "open_fleet"]

# Python's garbage collection while thousands of answers wait for the last one.
#
# By default it runs after every 700 new objects, about a few answers, and ends up scanning all that
# wait: a fifth of the cost of a request here.


OBJECTS = 50_000
"""New objects between two collections."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect less often inside the block, unless collection is rarer already or off."""
    before = gc.get_threshold()
    if before[0] == 0 or before[0] >= OBJECTS:
        yield
        return
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_UNREADABLE = "Could not parse the server's response"


class Fleet:
    """A Sampler, Adapters and Publisher over a pool; made by `open_fleet`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        config: FleetConfig,
        staging: Staging,
        max_calls: int,
    ) -> None:
        self.config = config
        self.capabilities = common_capabilities([r.capabilities for r in replicas])
        model = config.launch.model if config.launch is not None else self.capabilities.root
        self.base = self.first_base = ModelRef(name="base", version=config.name or model)
        for replica in replicas:
            replica.base = self.base
        self._served = ServedAdapters()
        self.pool = Pool(
            replicas,
            served=self._served,
            all_down_timeout_s=config.all_down_timeout_s,
            max_calls=max_calls,
        )
        self.staging = staging
        self._exclusion = CallExclusion()
        self._num_sequences = 0
        """Sequences of all batches, waiting or in flight."""
        self._population: tuple[StepPopulation, StepPopulation] | None = None
        """Population of the last member, and the same with the servers' layer names."""
        folder = Path(self.capabilities.root)
        shapes = read_shapes(folder)
        self._fit = Fit(
            base_names=base_names(config.name, model, self.capabilities.root),
            max_rank=self.capabilities.max_lora_rank,
            shapes=shapes or next((r.layers for r in replicas if r.layers), {}),
            targets=config.launch.lora_targets if config.launch is not None else (),
            head=read_head(folder) if shapes else None,
            has_wrong_head=any(replica.capabilities.has_wrong_head for replica in replicas),
        )

    @property
    def max_rank(self) -> int:
        """Highest rank of an adapter that every server takes."""
        rank = self.capabilities.max_lora_rank
        if rank is None:
            raise ConfigError(
                "The servers do not report their maximum rank: set engine.max_lora_rank to "
                "their --max-lora-rank."
            )
        return rank

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt with its answer on every server, in tokens; None if unreported."""
        return self.capabilities.max_model_len

    @property
    def is_remote(self) -> bool:
        return True

    @property
    def is_batch_invariant(self) -> bool:
        return False

    @property
    def token_counts(self) -> dict[str, int]:
        return {}

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Layers an adapter may adapt, name -> (in, out); FleetError if they are unknown."""
        if not self._fit.shapes:
            raise FleetError(
                f"The layers of {self.base.version} are not known here: its folder is not on this "
                "machine and the servers do not tell. Start from adapters that exist, or start "
                "the servers here (launch)."
            )
        targets = self._fit.targets
        return {
            name: size
            for name, size in self._fit.shapes.items()
            if not targets or name.rpartition(".")[2] in targets
        }

    @property
    def loaded(self) -> tuple[ModelRef, ...]:
        """Adapters that requests can name, oldest first."""
        return self._served.refs

    def find(self, ref: ModelRef) -> Adapter | None:
        """Return a loaded adapter in the form sent to servers."""
        return self._served.find(ref)

    def wire_name(self, ref: ModelRef) -> str:
        """Return the name that servers know the adapter by."""
        return self.staging.wire_name(ref)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        answers = await self._send([self._sample_entry(request) for request in requests])
        with boundary(FleetError, _UNREADABLE):
            return [
                read_completions(request, choices, has_versions=self._is_trained(request.model))
                for request, choices in zip(requests, answers, strict=True)
            ]

    def _sample_entry(self, request: SampleRequest) -> PromptRequest:
        fields = sample_fields(request, capabilities=self.capabilities)
        tell, stream = request.on_delta, None
        if tell is not None:
            # Greedy samples are all equal: the server draws one.
            samples = request.params.n // fields.n

            def tell_all(delta: CompletionDelta) -> None:
                # An error here is the caller's, not one of the server being read.
                with boundary(FleetError, "on_delta of a request failed"):
                    for copy in range(samples):
                        tell(replace(delta, sample=delta.sample + copy))

            stream = StreamedChoices(tell_all, num_top=request.params.top_logprobs)
        return PromptRequest(request.model, fields, request.prompt, request.affinity, stream)

    def _is_trained(self, ref: ModelRef) -> bool:
        """True for base weights of this fleet; other programs name their own on a server."""
        return self.base != self.first_base and self._served.find(ref) is None

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        able, has_head = self.capabilities, self._served.has_head
        plans = [plan_score(r, capabilities=able, has_head=has_head(r.model)) for r in requests]
        entries = [
            PromptRequest(plan.request.model, part.fields, part.prompt, plan.request.affinity)
            for plan in plans
            for part in plan.parts
        ]
        answers = await self._send(entries)
        with boundary(FleetError, _UNREADABLE):
            readings = iter([read_reading(choices[0]) for choices in answers])
            return [assemble_score(plan, [next(readings) for _ in plan.parts]) for plan in plans]

    async def load(self, adapter: Adapter) -> ModelRef:
        """Check the adapter and return its ModelRef. Servers get it with the first request for it.
        If the model's shapes are unknown here, one server loads it now and may refuse it."""
        self.pool.require_open()
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._served.changing(ref):
            if not self._served.add_load(ref):
                self._served.add(ref, await self._admit(ref, adapter))
        return ref

    async def unload(self, ref: ModelRef) -> None:
        """Undo one load. After the last one, the adapter is removed once no request uses it."""
        if ref == self.base:
            raise FleetError("The base model cannot be unloaded.")
        self._require(ref)
        if self._served.release(ref):
            await self._retire(ref)

    async def publish(self, weights: Weights) -> ModelRef:
        """Load new weights; retire the previous ones of that name after their last request."""
        ref = await self.load(require_adapter(weights))
        previous = self._served.publish(ref)
        if previous is not None:
            await self.unload(previous)
        return ref

    async def reset_prefix_cache(self) -> None:
        """Make every server forget its prefixes, after its base weights changed."""
        await self.pool.reset_prefix_cache()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Run the block with no request in flight; later requests wait for its end."""
        async with self._exclusion.take(f"update {uuid4()}"):
            yield

    def rename_base(self, ref: ModelRef) -> None:
        """Set `base` to the version of new base weights; requests for the old one are refused."""
        self.base = ref
        names = self._fit.base_names | base_names(ref.version)
        self._fit = replace(self._fit, base_names=names)

    async def _admit(self, ref: ModelRef, adapter: Adapter) -> Adapter:
        """Return the adapter as servers get it; FleetError or AdapterError if none can serve it."""
        if all(replica.route == "none" for replica in self.pool.replicas):
            raise self.pool.replicas[0].refuse_adapters()
        fitted = self._fit_adapter(adapter)
        if not self._fit.shapes:
            try:
                await self.pool.hold(ref, fitted)
            except RookeryError:
                await self._remove(ref)
                raise
        return fitted

    def _fit_adapter(self, adapter: Adapter) -> Adapter:
        """Check an adapter. A population's members fit if its centre does; none is computed."""
        member = adapter.factors
        if not isinstance(member, PerturbedFactors):
            return check_fit(adapter, self._fit)
        if self._population is None or self._population[0] is not member.population:
            fitted = member.population.fitted(check_fit(member.population.centre, self._fit))
            self._population = member.population, fitted
        factors = PerturbedFactors(self._population[1], seed=member.seed, amount=member.amount)
        return replace(adapter, factors=factors)

    async def _send(self, entries: Sequence[PromptRequest]) -> list[list[Choice]]:
        """Return the choices of every entry, in order."""
        if not entries:
            return []
        async with self._exclusion.take("requests"):
            uses = Counter(entry.ref for entry in entries if entry.ref != self.base)
            for ref in uses:
                self._require(ref)
            spread = Spread(
                num_servers=len(self.pool.replicas),
                num_affinities=self.pool.router.num_affinities,
                max_sequences=self.config.batch,
                num_others=self._num_sequences,
            )
            batches = make_batches(entries, base=self.base, spread=spread, now_s=time.monotonic())
            num_sequences = sum(entry.fields.n for entry in entries)
            self._num_sequences += num_sequences
            try:
                async with self._served.using(uses, retire=self._retire):
                    answers = await self.pool.submit([batch.call for batch in batches])
            finally:
                self._num_sequences -= num_sequences
        choices_by_entry: list[list[Choice]] = [[] for _ in entries]
        for batch, choices in zip(batches, answers, strict=True):
            for position, entry_choices in zip(batch.positions, choices, strict=True):
                choices_by_entry[position] = entry_choices
        return choices_by_entry

    async def _retire(self, ref: ModelRef) -> None:
        """Remove an adapter unless it was loaded again meanwhile."""
        async with self._served.changing(ref):
            if self._served.remove_unused(ref):
                await run_to_end(self._remove(ref))  # nobody would retry

    async def _remove(self, ref: ModelRef) -> None:
        """Remove an adapter from all servers, then the files they read it from."""
        dropped = await asyncio.gather(*(replica.drop(ref) for replica in self.pool.replicas))
        if all(dropped):
            await asyncio.to_thread(self.staging.remove, ref)

    def _require(self, ref: ModelRef) -> None:
        if self._served.find(ref) is None:
            names = ", ".join(r.served_name for r in (self.base, *self.loaded))
            raise FleetError(f"{ref.served_name} is not loaded. Loaded: {names}.")


@asynccontextmanager
async def open_fleet(
    config: FleetConfig, *, progress: Progress | None = None
) -> AsyncIterator[Fleet]:
    """Start or find the servers, run the pool inside the block, then stop what was started."""
    async with AsyncExitStack() as stack:
        stack.enter_context(collected_rarely())
        opened = open_staging(
            config.adapter_folder, in_place=config.in_place, is_searched=config.resolver
        )
        staging = stack.enter_context(opened)
        session = await stack.enter_async_context(open_session())
        replicas = await _open_replicas(
            config, stack=stack, session=session, staging=staging, progress=progress
        )
        await _connect(replicas)
        await clear_left(staging.owner.parent, [replica.client for replica in replicas])
        fleet = Fleet(replicas, config=config, staging=staging, max_calls=max_calls(session))
        try:
            async with fleet.pool.running():
                yield fleet
        finally:
            await run_to_end(_leave(replicas))


async def _open_replicas(
    config: FleetConfig,
    *,
    stack: AsyncExitStack,
    session: aiohttp.ClientSession,
    staging: Staging,
    progress: Progress | None,
) -> list[Replica]:
    """Make a replica per server of the config, after starting those to launch."""
    launch = config.launch
    dtype = None if launch is None else launch.served_dtype

    def make(
        url: str, api_key: str, *, dtype: str | None = None, local: LocalServer | None = None
    ) -> Replica:
        client = Client(url, session=session, config=config.client, api_key=api_key)
        return Replica(client, config=config, staging=staging, dtype=dtype, local=local)

    key = os.environ.get(config.api_key_env, "")
    replicas = [make(url, key) for url in config.urls]
    if launch is not None and launch.placement == "ray":
        cluster = place_on_ray(launch, num=launch.replicas or 1, address=launch.ray_address)
        placed = await stack.enter_async_context(cluster)
        replicas += [make(url, placed.api_key, dtype=dtype) for url in placed.urls]
    elif launch is not None:
        started = open_servers(launch, progress=progress, adapters=staging.root)
        servers = await stack.enter_async_context(started)
        replicas += [make(s.url, s.config.api_key, dtype=dtype, local=s) for s in servers]
    return replicas


async def _leave(replicas: Sequence[Replica]) -> None:
    await asyncio.gather(*(replica.leave() for replica in replicas))


async def _connect(replicas: Sequence[Replica]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(replica.connect())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
