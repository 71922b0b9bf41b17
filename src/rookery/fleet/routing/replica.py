"""One server of the pool: its client, its capabilities and the adapters it holds.

replica = Replica(client, config=config, staging=staging)
await replica.connect()                     # probes, attaches the worker extension
choices = await replica.serve(call, adapter)
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from rookery.errors import AdapterError, FleetError, RookeryError
from rookery.fleet.http.capabilities import Capabilities, Route, base_names
from rookery.fleet.http.client import Client, ServerLost, ServerRefusal, is_local
from rookery.fleet.http.probe import (
    Fingerprint,
    gap_between,
    is_far,
    is_other,
    probe,
    read_again,
    read_base,
    read_fingerprint,
    read_metrics,
)
from rookery.fleet.http.wire import Choice, compact, encode_body, encode_tokens, read_choices
from rookery.fleet.perturbed import PerturbedFactors
from rookery.fleet.residency import Residency, ServedAdapters, list_names
from rookery.fleet.routing.health import Breaker, Proof, started
from rookery.fleet.routing.load import Call, ReplicaLoad
from rookery.fleet.routing.paused import (
    VERSION,
    CallExclusion,
    TrainerLock,
    WeightsMark,
    load_first_weights,
    name_first_weights,
    read_mark,
    require_first_weights,
    require_left,
    wait_until_running,
)
from rookery.fleet.servers.launch import LocalServer
from rookery.fleet.servers.settings import FleetConfig
from rookery.fleet.staging import Staging
from rookery.fleet.vllm_plugin.token_route import ADAPTER_REFUSED
from rookery.types import Adapter, ModelRef

__all__ = ["Replica"]

logger = logging.getLogger(__name__)
DEFAULT_WINDOW = 256
"""Default number of sequences in flight, for servers that do not report `max_num_seqs`."""
OVERLAP = 2.0
"""Sequences in flight per sequence that the server computes at once. A call holds its places until
its last sequence ends, and the server needs the next calls before that."""


class Replica:
    """One server. `load` counts the work in flight; the pool decides which calls to send."""

    def __init__(
        self,
        client: Client,
        *,
        config: FleetConfig,
        staging: Staging,
        dtype: str | None = None,
        local: LocalServer | None = None,
    ) -> None:
        """`dtype` is the type the server was started with; None leaves the choice to the server."""
        self.client = client
        self.local = local
        self._residency = Residency(client, owner=staging.owner, is_own=local is not None)
        self.load = ReplicaLoad(
            name=client.url, window=DEFAULT_WINDOW, max_loras=1, is_open=False,
            resident=self._residency.resident,
        )  # fmt: skip
        self.breaker = Breaker()
        self.attention = asyncio.Event()
        """Set to have the pool check the server before its next regular check."""
        self.last_error = ""
        self.is_given_up = False
        """True if the server cannot be restarted and is no longer watched."""
        self.excluded = ""
        """Reason why the server takes no requests even if it is healthy; empty if it takes them."""
        self.layers: dict[str, tuple[int, int]] = {}
        self.capabilities: Capabilities
        self.route: Route = "none"
        self.has_token_route = False
        """True if the server has the route of `token_route.py`, which is faster than vLLM's."""
        self._brought: set[ModelRef] = set()
        """Adapters sent along with calls, none of which has been answered yet."""
        self._config = config
        self._dtype = dtype
        self.staging = staging
        self._exclusion = CallExclusion()
        self._base_runs_apart = False
        """True if the base model and adapters must not run together; see `paused.py`."""
        self.base: ModelRef
        """Version of the server's base weights. Calls that name another version are refused."""
        self.renew: Callable[[Replica], Awaitable[None]] | None = None
        """Brings a restarted server up to the newest weights; None if nothing can."""
        self.proof = Proof(client, local)
        self._fingerprint: Fingerprint | None = None
        """Fingerprint of the base model, for a server given by URL: others may restart it."""
        self._systems: set[str | None] = set()
        """`system_fingerprint` values of the server configs whose model was recognised."""
        self.is_marked = False
        """True if the server was told that its weights are not those it was started with."""
        self._lock: TrainerLock | None = None
        """Held from the first `mark` until `leave`."""

    @property
    def url(self) -> str:
        return self.client.url

    async def connect(self) -> None:
        """Probe the server, attach the worker extension and open the load."""
        if self.local is None:
            await require_first_weights(self.client)
            await wait_until_running(self.client)
        probed = await probe(self.client, has_info=self.local is None)
        if not probed.has_token_ids:
            raise FleetError(
                f"{self.url} does not report token ids and their log-probabilities: use vLLM 0.26 "
                "or newer, or configure it as an external API."
            )
        report = await self._attach(probed)
        max_loras, max_cpu_loras, max_rank = self._limits()
        is_on_cpu = self._is_on_cpu(probed)
        self.capabilities = replace(
            probed,
            has_prompt_logprobs=probed.has_prompt_logprobs
            and not (is_on_cpu and (probed.max_loras or max_loras)),
            max_num_seqs=report.get("max_num_seqs", probed.max_num_seqs),
            max_logprobs=report.get("max_logprobs", probed.max_logprobs),
            max_loras=report.get("max_loras", probed.max_loras or max_loras),
            max_cpu_loras=report.get("max_cpu_loras", probed.max_cpu_loras or max_cpu_loras),
            max_lora_rank=report.get("max_lora_rank", probed.max_lora_rank or max_rank),
            lora_dtype=report.get("lora_dtype", probed.lora_dtype),
            has_wrong_head=bool(is_on_cpu) and not report.get("output_layer", False),
            is_on_cpu=is_on_cpu,
            dtype=probed.dtype or self._dtype,
        )
        if self.local is not None and self.local.config.has_whole_graphs:
            await self._check_steps()
        self.layers = {name: (size[0], size[1]) for name, size in report.get("layers", {}).items()}
        self.route = self._choose_route(bool(report))
        self._base_runs_apart = self.route != "none" and is_on_cpu is not False
        if self.route != "none" and is_on_cpu is None:
            logger.warning(
                "%s does not tell whether it is on a GPU: requests for the base model and for "
                "adapters take turns there, as they must on the CPU. Set device to gpu if it is.",
                self.url,
            )
        self.has_token_route = bool(report) and await self.client.has_token_route()
        together = self.capabilities.max_num_seqs
        window = int(OVERLAP * together) if together else DEFAULT_WINDOW
        self.load.window = self._config.max_in_flight or window
        self.load.max_loras = 0 if self.route == "none" else self._max_loras()
        if self.local is None:
            self.proof.recognise(await self.proof.running())
            self._fingerprint = await read_fingerprint(self.client, self.capabilities)
            self._systems.add(self._fingerprint.system)
        self._open()

    async def reconnect(self, served: ServedAdapters) -> None:
        """Reopen after a loss, with the adapters still there; FleetError for another model."""
        await self._recognise()
        await self.reattach()
        self.load.forget()
        self._residency.resident.clear()
        for name in await list_names(self.client, self.staging.owner.token):
            self._residency.expect(name)
            ref = next((ref for ref in served.refs if self.staging.wire_name(ref) == name), None)
            if ref is not None:
                self._residency.add(ref)
            else:
                # Retired while the server was unreachable.
                await self._residency.unload(name, model=self.capabilities.model)
        if self.proof.was_given and not await self.proof.is_current():
            self.exclude(
                f"{self.url} was started again, or does not tell: it may have the weights it began "
                "with. Call update_weights again."
            )
            if self.renew is not None:
                await self.renew(self)
        self._open()

    async def _recognise(self) -> None:
        """FleetError if a server by URL has another model now, or another program trains it."""
        if self._fingerprint is None:
            return
        await self._require_own_weights()
        known = self.capabilities
        name, root = await read_base(self.client)
        if name != known.model or base_names(root) != base_names(known.root):
            raise FleetError(
                f"{self.url} was started again on another model: it served {known.root} as "
                f"{known.model}, and serves {root} as {name} now. Start it on {known.root}."
            )
        process = await self.proof.running()
        if self.proof.is_recognised(process) or (self.proof.was_given and not process):
            return
        fingerprint = await read_fingerprint(self.client, known)
        gap = gap_between(fingerprint, self._fingerprint)
        if is_other(gap, known):
            raise FleetError(
                f"{self.url} was started again with other weights than {known.root} had: "
                f"log-probabilities of fixed texts are off by {gap:.2g} nats. Start it on "
                "the model that it had."
            )
        self._systems.add(fingerprint.system)
        self.is_marked = False
        self.proof.recognise(process)

    async def mark(self, version: str) -> None:
        """Tell a server given by URL that its weights are about to change; its other clients read
        this mark. FleetError if another training may still use the server."""
        if self.local is None and VERSION in self.capabilities.routes:
            if self._lock is None and is_local(self.url):
                self._lock = TrainerLock.take(self.url)
            mark = None if self.is_marked else await read_mark(self.client)
            if mark is not None and not mark.is_own:
                require_left(self.client, mark)
            await self.client.post_json(
                VERSION, {"new_version": str(WeightsMark.made_here(version))}
            )
            self.is_marked = True

    async def _require_own_weights(self) -> None:
        """FleetError while another program trains the server; reload what a dead trainer left."""
        if self.local is None and VERSION in self.capabilities.routes:
            mark = await read_mark(self.client)
            if mark is not None and not mark.is_own:
                await require_first_weights(self.client)

    async def reattach(self) -> None:
        """Install the worker extension's loading of adapters in a restarted process."""
        if self.route == "extension":
            await self.client.call_workers("rookery_attach")

    def exclude(self, reason: str) -> None:
        """Send no requests until `include` is called."""
        self.excluded = self.last_error = reason
        self.load.is_open = False

    def include(self) -> None:
        """Accept requests again."""
        self.excluded = ""
        self._open()

    async def serve(self, call: Call, adapter: Adapter | None) -> list[list[Choice]]:
        """Send a call; an adapter the server lacks goes along with it or is loaded first."""
        kind = self._kind(call)
        is_plain = call.stream is None and not call.fields.json_schema
        can_bring = adapter is None or self.route == "extension"
        is_by_tokens = self.has_token_route and is_plain and can_bring
        if adapter is not None:
            await self.hold(call.ref, adapter, is_brought=is_by_tokens)
        model = self.capabilities.model if adapter is None else self.staging.wire_name(call.ref)
        is_answered = False
        try:
            async with self._exclusion.take(kind):
                self._require_base(call)
                answer = await self._send(call, model, is_by_tokens=is_by_tokens)
            is_answered = True
            self._brought.discard(call.ref)
        except ServerRefusal as refusal:
            is_answered = True
            if refusal.status == 404 and adapter is not None:
                # The server was restarted without a loss seen here: its adapters are gone.
                self._residency.discard(call.ref)
                raise ServerLost(str(refusal), is_broken=False) from refusal
            raise
        finally:
            if adapter is not None and not is_answered:
                self._residency.note_cut(model)
        await self._check_system(answer)
        choices = read_choices(answer, num_prompts=len(call.prompts), n=call.fields.n)
        if call.fields.ids or call.fields.top or call.fields.prompt_top is not None:
            return choices
        return [[compact(choice) for choice in row] for row in choices]

    async def _check_system(self, answer: Any) -> None:
        """Accept answers of another server config only after it has shown its model."""
        system = answer.get("system_fingerprint") if isinstance(answer, dict) else None
        if self._fingerprint is None or system is None or system in self._systems:
            return
        try:
            await self._recognise()
        except FleetError as error:
            raise ServerLost(str(error), is_broken=False) from error
        if self.proof.was_given and await self.proof.is_of_another():
            raise ServerLost(f"{self.url} was started again.", is_broken=False)
        self._systems.add(system)

    def _require_base(self, call: Call) -> None:
        """FleetError if the base weights that the call names were replaced before it was sent."""
        if call.is_base and not call.is_any_base and call.ref != self.base:
            raise FleetError(
                f"{call.ref.served_name} was replaced by {self.base.served_name} before it was "
                "asked: name the newest."
            )

    def _kind(self, call: Call) -> str:
        """Kind of the call for `CallExclusion`; see `paused.py`."""
        kind = "labels" if call.fields.ids else "likeliest" if call.fields.top else ""
        if self._base_runs_apart:
            kind += " of the base" if call.is_base else " of adapters"
        return kind

    async def _send(self, call: Call, model: str, *, is_by_tokens: bool) -> Any:
        if call.stream is not None:
            call.stream.begin()
            body = encode_body(model, call.fields, call.prompts, is_streamed=True)
            await self.client.stream(body, call.stream.add)
            return call.stream.answer
        if not is_by_tokens:
            return await self.client.complete(encode_body(model, call.fields, call.prompts))
        path = None if call.is_base else self._served_path(call.ref)
        body = encode_tokens(model, call.fields, call.prompts, path=path)
        try:
            return await self.client.generate(body)
        except ServerRefusal as refusal:
            if refusal.status != ADAPTER_REFUSED:
                raise
            self._residency.discard(call.ref)
            raise AdapterError(str(refusal)) from refusal

    async def hold(self, ref: ModelRef, adapter: Adapter, *, is_brought: bool = False) -> None:
        """Load the adapter unless the server has it; with `is_brought`, only prepare it for the
        call that brings it along. At most one load of an adapter runs at a time."""
        if self._has(ref, is_brought=is_brought):
            return
        async with self._residency.changing(ref):
            if self._has(ref, is_brought=is_brought):
                return
            num = self.capabilities.max_cpu_loras or self.load.max_loras
            for idle in self._residency.surplus(num, active=self.load.active):
                if self._residency.is_idle(idle, active=self.load.active):
                    await self.drop(idle)
            await self._load(ref, adapter, is_brought=is_brought)
            self._residency.add(ref)

    def _has(self, ref: ModelRef, *, is_brought: bool) -> bool:
        """True if a call can name the adapter. An adapter that was brought along counts after its
        first answer; until then, calls that do not bring it must load it."""
        return self._residency.use(ref) and (is_brought or ref not in self._brought)

    async def drop(self, ref: ModelRef) -> bool:
        """Unload an adapter; True if the server no longer reads its folder."""
        async with self._residency.changing(ref):
            self._residency.discard(ref)
            name = self.staging.wire_name(ref)
            return await self._residency.unload(name, model=self.capabilities.model)

    async def leave(self) -> None:
        """Unload this fleet's adapters and restore the first weights; failures are logged."""
        await self._residency.leave(model=self.capabilities.model)
        try:
            if self.is_marked and self._fingerprint is not None:
                async with asyncio.timeout(self.client.config.control_s):
                    await self._restore(self._fingerprint)
        except (RookeryError, TimeoutError) as error:
            logger.warning(
                "%s keeps weights that were trained here, and its next clients refuse it: %s "
                "Restart it, or write `rookery fleet restore %s`.",
                self.url,
                str(error) or "it takes longer than control_s to load others.",
                self.url,
            )
        finally:
            if self._lock is not None:
                self._lock.release()

    async def _restore(self, first: Fingerprint) -> None:
        mark = await read_mark(self.client)
        if mark is not None and not mark.is_own:
            return
        await load_first_weights(self.client)
        gap = gap_between(await read_fingerprint(self.client, self.capabilities), first)
        if is_other(gap, self.capabilities):
            raise FleetError(f"Log-probabilities of fixed texts are off by {gap:.2g} nats.")
        await name_first_weights(self.client)

    async def measure(self) -> None:
        """Measure the load of other clients; ServerLost if the server does not answer."""
        metrics = await read_metrics(self.client)
        await self._require_own_weights()
        if metrics is not None:
            self.proof.check(metrics)
            process = started(metrics)
            if process and not self.proof.is_recognised(process):
                await self._recognise()
            busy = metrics.num_running + metrics.num_waiting
            self.load.foreign = max(0, busy - self.load.num_sequences)
        elif not await self.client.is_healthy():
            raise ServerLost(f"{self.url} answers neither /metrics nor /health.", is_broken=False)

    async def _attach(self, probed: Capabilities) -> dict[str, Any]:
        """Report of the worker extension; empty without one. Only servers started here have one."""
        if self.local is None or not self.local.config.has_extension or not probed.has_worker_calls:
            return {}
        try:
            reports = await self.client.call_workers("rookery_attach")
        except (ServerLost, FleetError) as error:
            logger.warning("%s: no worker extension, adapters go by HTTP: %s", self.url, error)
            return {}
        return reports[0] if isinstance(reports[0], dict) else {}

    async def _check_steps(self) -> None:
        """FleetError if CUDA graphs of whole steps compute wrong values, which vLLM hides."""
        apart = await read_again(self.client, self.capabilities)
        if is_far(apart):
            raise FleetError(
                f"{self.url} computes wrongly: a token read is {apart:.2f} nats from the same "
                "token drawn. This vLLM's CUDA graphs cannot hold whole steps of this model: write "
                "cuda_graphs: auto."
            )

    def _is_on_cpu(self, probed: Capabilities) -> bool | None:
        if self.local is not None:
            # A CPU build of vLLM ignores the machine's GPUs.
            return self.local.config.is_on_cpu or bool(probed.is_on_cpu)
        if probed.is_on_cpu is not None or self._config.device is None:
            return probed.is_on_cpu
        return self._config.device == "cpu"

    def _limits(self) -> tuple[int | None, int | None, int | None]:
        """`max_loras`, `max_cpu_loras` and `max_lora_rank` of servers that do not report them."""
        if self.local is None:
            return self._config.max_loras, None, self._config.max_lora_rank
        launch = self.local.config
        return launch.max_loras, launch.max_cpu_loras, launch.lora_rank

    def _max_loras(self) -> int:
        if self.capabilities.max_loras is None:
            logger.warning(
                "%s does not tell how many adapters it computes together: taking 1, vLLM's "
                "default. Set max_loras to its --max-loras.",
                self.url,
            )
        return self.capabilities.max_loras or 1

    def _choose_route(self, has_extension: bool) -> Route:
        can_see = self._config.adapter_folder is not None or is_local(self.url)
        if not can_see:
            return "none"
        is_by_memory = has_extension and not self._config.peft_folders
        if is_by_memory and self.capabilities.has_lora_loading:
            return "extension"
        if self.capabilities.has_lora_loading:
            return "http"
        return "resolver" if self._config.resolver else "none"

    def refuse_adapters(self) -> FleetError:
        """Return the error that says why this server takes no adapters."""
        return FleetError(_no_route(self.url, self.capabilities.has_lora_loading))

    def _served_path(self, ref: ModelRef) -> str:
        return self.staging.served_path(ref, dtype=self.capabilities.lora_dtype or "float32")

    async def _load(self, ref: ModelRef, adapter: Adapter, *, is_brought: bool) -> None:
        if self.route == "none":
            raise self.refuse_adapters()
        name = self.staging.wire_name(ref)
        if self.route == "extension":
            path = await self._stage(ref, adapter)
            if is_brought:
                self._residency.expect(name)
                self._brought.add(ref)
                return
            self._brought.discard(ref)
            try:
                await self._residency.load(name, path=path)
            except AdapterError:
                # A restarted server reads buffers only after `rookery_attach`.
                await self.client.call_workers("rookery_attach")
                await self._residency.load(name, path=path)
            return
        folder = await asyncio.to_thread(
            self.staging.peft_folder, ref, adapter, base=self.capabilities.root
        )
        if self.route == "http":
            await self._residency.load(name, path=folder)
        else:
            self._residency.expect(name)

    async def _stage(self, ref: ModelRef, adapter: Adapter) -> str:
        """Write an adapter for the worker extension; return the text the server is given."""
        dtype = self.capabilities.lora_dtype or "float32"
        if isinstance(adapter.factors, PerturbedFactors):
            if self.staging.has_centre(adapter.factors):  # a thread would wait for busy ones
                return self.staging.member_text(ref, adapter)
            return await asyncio.to_thread(self.staging.member_text, ref, adapter)
        if self.staging.is_in_place(adapter):
            # A few GPU kernels: faster than handing the work to a thread.
            return str(self.staging.buffer_folder(ref, adapter, dtype=dtype))
        write = self.staging.buffer_folder
        return str(await asyncio.to_thread(write, ref, adapter, dtype=dtype))

    def _open(self) -> None:
        self.breaker.record_success()
        self.load.is_open = not self.excluded


def _no_route(url: str, has_loading: bool) -> str:
    if has_loading:
        return (
            f"{url} is on another machine and cannot read adapters from this one: set "
            "adapter_folder to a folder that both see at the same path."
        )
    return (
        f"{url} does not load adapters: start it with --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or with VLLM_PLUGINS=lora_filesystem_resolver and "
        "VLLM_LORA_RESOLVER_CACHE_DIR at adapter_folder and resolver: true here."
    )
