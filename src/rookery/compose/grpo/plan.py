"""`plan_grpo`: estimates the memory of a training, and whether it fits, before weights are loaded.

    plan = plan_grpo("mine.yaml")
    plan.total_bytes, plan.fits, [(row.name, row.num_bytes) for row in plan.rows]

Data count with their maximum length: the longest prompts, with answers of `drawing.max_tokens` or
the tokens that a game may draw (`environment.max_tokens`), up to the model's context.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rookery.compose.grpo.setup import GrpoSetup, LaunchSettings, read_setup
from rookery.compose.running import (
    ConfigSource,
    num_local_processes,
    num_processes,
    quiet_libraries,
    read_config,
)
from rookery.embedded import EngineConfig
from rookery.embedded.prefix import memory_bytes
from rookery.engines import launch_of
from rookery.errors import ConfigError
from rookery.fleet.servers.settings import GPU_SHARE, LaunchConfig
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.sweep import swept
from rookery.slots.linear import can_pack
from rookery.tasks.splits import SplitName
from rookery.train.memory import Lengths, ModelPlace, StepMemory, measure_step
from rookery.train.slotted_trainer import CPU_TOKENS, MOST_TOKENS, PASS_PART

__all__ = ["MemoryPlan", "MemoryRow", "plan_grpo", "plan_servers", "server_row"]

GIB = 2**30
MOST_COPIES = 32
"""Upper bound for models, masters, gradients, moments and a copy to publish, in multiples of the
weight files. It holds for float32 models with 16-bit files."""
MANY_TOKENS = 64
"""A pass of this many tokens takes less memory than MOST_COPIES of the weight files."""
SERVER = "vLLM"
CUDA_PART = 0.08
"""Fraction of a GPU shared by two programs for contexts, graphs and fragmentation."""
ADAPTER_COPIES = 1.5
"""Memory of a trainer's model and an adapter in training, in multiples of the weight files."""
LEAST_CACHE = GIB
"""Minimum bytes for keys and values with which a server is useful."""
SMALL_WEIGHTS = 4 * GIB
"""Weights of a model that two servers on one GPU answer faster than one."""
ROOM_EACH = 8 * GIB
"""Minimum bytes that each of two such servers has beside its weights."""
DRAWN_TOKEN_BYTES = 300
"""Bytes per token of an answer that waits for training: Python numbers, and the batch in written
form. Measured: 193, with prompts of 100 and answers of 400 tokens."""
KERNEL_PART = 0.1
"""Fraction of a pass on the CPU for kernels, and for memory that the allocator cannot return at
once. Measured: 0.08, with passes of 4,096 tokens."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File with the memory limit of a container."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One part of the memory that is held at the same time."""

    name: str
    num_bytes: int
    note: str
    remedy: str = ""
    """Advice to make it smaller; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one training on the trainer's device."""

    device: str
    rows: tuple[MemoryRow, ...]
    available_bytes: int
    """Total memory of the device, used or free."""

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    @property
    def complaint(self) -> str:
        """Why the training does not fit, and which key to change. Empty if it fits."""
        if self.fits:
            return ""
        largest = max((row for row in self.rows if row.remedy), key=lambda row: row.num_bytes)
        return (
            f"The training needs {_gib(self.total_bytes)} and the memory of {self.device} is "
            f"{_gib(self.available_bytes)}. {_gib(largest.num_bytes)} are for {largest.name} "
            f"({largest.note}): {largest.remedy}. `rookery grpo plan` lists all parts."
        )


def plan_grpo(config: ConfigSource | GrpoConfig, **values: Any) -> MemoryPlan:
    """Plan the memory of a config. `values` are keys of it, as for `run_grpo`."""
    quiet_libraries()
    loaded = read_config(GrpoConfig, config, values)
    if loaded.engine.type == "service":
        raise ConfigError(
            "engine is a service, which trains with its own memory: nothing is held here."
        )
    setup = read_setup(loaded)
    return _make_plan(_with_largest(loaded), setup, _drawn_prompts(loaded, setup))


def plan_servers(config: GrpoConfig, setup: GrpoSetup) -> LaunchSettings:
    """Return the fraction of its GPU that the trainer leaves to servers on it, and their number.
    Empty if they do not share a GPU, or if the config sets the fraction. Raises ConfigError if the
    training does not fit. A plan takes seconds, so small trainings skip it."""
    config, launch = _with_largest(config), launch_of(setup.engine)
    is_configured = launch is not None and launch.gpu_memory_utilization is not None
    is_needed = setup.place.has_servers and not is_configured
    share = _quick_share(config, setup)
    if share is None:
        prompts = _drawn_prompts(config, setup)
        if not is_needed and _is_small(config, setup, _lengths(config, prompts)):
            return {}
        plan = _make_plan(config, setup, prompts)
        if plan.complaint:
            raise ConfigError(plan.complaint)
        servers = [row.num_bytes for row in plan.rows if row.name == SERVER]
        share = sum(servers) / plan.available_bytes
    if not is_needed:
        return {}
    num = _num_servers(setup, int(share * _memory(setup.place.device)))
    return {"gpu_memory_utilization": math.floor(100 * share) / 100, "servers_per_gpu": num}


def _num_servers(setup: GrpoSetup, num_bytes: int) -> int:
    """Choose two servers if they serve a small policy alone and fit into these bytes."""
    launch, weights = launch_of(setup.engine), _file_bytes(setup)
    is_merged = setup.bridge is not None and setup.bridge.is_merged
    assert launch is not None, "servers are started here"
    if launch.servers_per_gpu or launch.replicas or not is_merged:
        return launch.per_gpu
    fits = weights <= SMALL_WEIGHTS and num_bytes >= 2 * (weights + ROOM_EACH)
    return 2 if fits else 1


def _with_largest(config: GrpoConfig) -> GrpoConfig:
    """Plan a sweep as if all its adapters had the settings that need most memory."""
    if config.sweep is None:
        return config

    def size(config: GrpoConfig) -> tuple[int, bool]:
        num_rollouts = (1 + (config.staleness or 0)) * config.max_groups * config.group_size
        return num_rollouts * config.max_drawn_tokens, config.needs_reference

    largest = max((adapter.config for adapter in swept(config)), key=size)
    return largest.model_copy(update={"sweep": config.sweep})


def _is_small(config: GrpoConfig, setup: GrpoSetup, lengths: Lengths) -> bool:
    """True if weights and tokens are so few that no plan is needed."""
    device = setup.place.device
    size = lengths.prompt_tokens + lengths.answer_tokens
    most_tokens = setup.trainer.pass_tokens or (CPU_TOKENS if device == "cpu" else MOST_TOKENS)
    tokens = max(size, min(most_tokens, size * lengths.num_data))
    most = MOST_COPIES * _file_bytes(setup) * (1 + tokens / MANY_TOKENS)
    return most + _drawn_row(config, lengths).num_bytes < min(_memory(device), _memory("cpu"))


def _quick_share(config: GrpoConfig, setup: GrpoSetup) -> float | None:
    """Return a server's fraction of the GPU beside an adapter's trainer. None: it needs a plan."""
    if not setup.place.has_servers or setup.full is not None:
        return None
    if setup.trainer.pass_tokens is not None or config.needs_reference:
        return None
    total, weights = _memory(setup.place.device), _file_bytes(setup)
    left = (1 - CUDA_PART - PASS_PART) * total - ADAPTER_COPIES * weights
    launch = launch_of(setup.engine)
    assert launch is not None, "servers are started here"
    return left / total if left > 2 * launch.per_gpu * (weights + LEAST_CACHE) else None


def _file_bytes(setup: GrpoSetup) -> int:
    return sum(path.stat().st_size for path in setup.start.glob("*.safetensors"))


def _make_plan(config: GrpoConfig, setup: GrpoSetup, prompts: Sequence[int]) -> MemoryPlan:
    """Plan the memory. `prompts` are the token counts of the prompts to train on."""
    device, lengths = setup.place.device, _lengths(config, prompts)
    step = measure_step(
        setup.start,
        trained=setup.full or setup.init or setup.lora,
        trainer=setup.trainer,
        lengths=lengths,
        place=ModelPlace(device=device, dtype=setup.place.dtype, is_exact=setup.is_shared),
    )
    drawn = _drawn_row(config, lengths.within(step.shape.context_tokens))
    if drawn.num_bytes > _memory("cpu"):
        raise ConfigError(
            f"{drawn.note} take {_gib(drawn.num_bytes)} and this machine has "
            f"{_gib(_memory('cpu'))}: {drawn.remedy}."
        )
    # Processes share the memory of a machine, but each has its own GPU.
    many = num_local_processes() if device == "cpu" else 1
    rows_each = [*_process_rows(device), *_trainer_rows(config, setup, step)]
    trainer = [replace(row, num_bytes=many * row.num_bytes) for row in rows_each]
    if setup.engine.type == "fleet":
        rows = [*_server_rows(setup, step, beside=trainer), *trainer]
    else:
        assert setup.engine.type == "embedded", "a service has its own memory"
        rows = [*_engine_rows(config, setup, setup.engine, step, prompts), *trainer]
    if device == "cpu":
        rows.append(drawn)
    return MemoryPlan(
        device=device,
        rows=tuple(row for row in rows if row.num_bytes),
        available_bytes=_memory(device),
    )


def _lengths(config: GrpoConfig, prompts: Sequence[int]) -> Lengths:
    return Lengths(
        prompt_tokens=max(prompts),
        answer_tokens=_answer_tokens(config),
        num_data=config.groups_per_step * config.group_size * config.num_policies,
    )


def _answer_tokens(config: GrpoConfig) -> int:
    """Return the most tokens after the prompt. Earlier answers in Atropos count as prompt."""
    if config.atropos is None:
        return config.max_drawn_tokens
    return min(config.drawing.max_tokens, config.atropos.max_token_len - 1)


def _drawn_prompts(config: GrpoConfig, setup: GrpoSetup) -> list[int]:
    """Return the token counts of the prompts to train on; for Atropos, their maximum."""
    if config.atropos is not None:
        longest = config.atropos.max_token_len - _answer_tokens(config)
        return [longest] * config.groups_per_step
    return _prompt_tokens(setup, "search")


def _prompt_tokens(setup: GrpoSetup, split: SplitName) -> list[int]:
    tasks = [task for taskset in setup.tasksets for task in taskset.split(split)]
    return [len(setup.template.encode(task)) for task in tasks]


def _drawn_row(config: GrpoConfig, lengths: Lengths) -> MemoryRow:
    """Return the memory of waiting answers in this process; with staleness, of several steps."""
    tokens = lengths.prompt_tokens + lengths.answer_tokens
    num = (1 + (config.staleness or 0)) * config.max_groups * config.group_size
    num *= config.num_policies
    return MemoryRow(
        "drawn answers",
        num * tokens * DRAWN_TOKEN_BYTES,
        f"{num:,} answers of up to {tokens:,} tokens with their prompts",
        "lower groups_per_step, max_extra_groups or group_size",
    )


def _process_rows(device: str) -> Iterator[MemoryRow]:
    if device == "cpu":
        yield MemoryRow("this process", _resident_bytes(), "Python, libraries")


def _engine_rows(
    config: GrpoConfig,
    setup: GrpoSetup,
    engine: EngineConfig,
    step: StepMemory,
    prompts: Sequence[int],
) -> Iterator[MemoryRow]:
    device, shape = setup.place.device, step.shape
    if not setup.is_shared:
        is_packed = can_pack(device=torch.device(device), dtype=step.dtype)
        yield MemoryRow(
            "engine weights",
            step.weights + (step.tied_head if is_packed else 0),
            "packed, the tied head beside the embeddings" if is_packed else str(step.dtype),
            "write share: true, or a smaller engine.dtype",
        )
    if setup.full is None:
        yield MemoryRow("adapter slots", 2 * config.num_policies * step.masters, "two versions")
    longest = sorted(prompts)[-config.max_groups :]
    select, report = (sum(_prompt_tokens(setup, split)) for split in ("select", "report"))
    kept = sum(longest) + max(select, 2 * report)
    limit = int(engine.cache_gib * GIB)
    yield MemoryRow(
        "prefix cache",
        # A GPU cache is allocated at the start; on the CPU, unused pages take no memory.
        limit if device != "cpu" else min(limit, kept * shape.token_bytes(step.dtype)),
        f"{kept:,} tokens of prompts, {engine.cache_gib:g} GiB at most",
        "lower engine.cache_gib",
    )
    rows = min(engine.max_rows, config.groups_per_step * config.group_size)
    length = min(max(longest) + _answer_tokens(config), shape.context_tokens)
    kv_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * step.dtype.itemsize
    note = f"{rows} rows of {length:,} tokens"
    yield MemoryRow("answers in flight", rows * length * kv_bytes, note, "lower engine.max_rows")


def _server_rows(
    setup: GrpoSetup, step: StepMemory, *, beside: Sequence[MemoryRow]
) -> Iterator[MemoryRow]:
    """Yield the memory of servers started here; others have their own."""
    device, launch = setup.place.device, launch_of(setup.engine)
    if launch is not None and launch.is_on_cpu and device == "cpu":
        yield MemoryRow(
            "server cache",
            launch.cpu_cache_gib * GIB,
            "engine.launch.cpu_cache_gib; its weights come on top",
            "lower engine.launch.cpu_cache_gib",
        )
    if launch is not None and setup.place.has_servers:
        total = memory_bytes(torch.device(device))
        yield server_row(launch, step.weights, total=total, beside=beside)


def server_row(
    launch: LaunchConfig, weights: int, *, total: int, beside: Sequence[MemoryRow]
) -> MemoryRow:
    """Return the memory of servers on a GPU with `total` bytes, `beside` the rows of a trainer."""
    if launch.gpu_memory_utilization is not None:
        return MemoryRow(
            SERVER,
            int(launch.gpu_memory_utilization * total),
            "engine.launch.gpu_memory_utilization of the GPU",
            "lower engine.launch.gpu_memory_utilization",
        )
    left = int((1 - CUDA_PART) * total) - sum(row.num_bytes for row in beside)
    least = launch.per_gpu * (weights + LEAST_CACHE)
    num_bytes = min(int(GPU_SHARE * total), max(left, least))
    note = "what the trainer leaves; weights and 1 GiB for keys and values at least"
    if launch.per_gpu > 1:
        note = f"{note}, {launch.per_gpu} times"
    return MemoryRow(SERVER, num_bytes, note)


def _trainer_rows(config: GrpoConfig, setup: GrpoSetup, step: StepMemory) -> Iterator[MemoryRow]:
    dtype, is_full = str(step.dtype).removeprefix("torch."), setup.full is not None
    name = "weights" if setup.is_shared else "trainer weights"
    note = f"{dtype}, engine and trainer" if setup.is_shared else dtype
    parts = num_processes() if is_full else 1  # each process keeps a part of the weights
    own_weights = step.weights // parts
    # With `alias` the weights are the servers' and counted there.
    held = 0 if config.bridge == "alias" else own_weights
    yield MemoryRow(name, held, note, "take a smaller model")
    fewer = "train an adapter (full: false)" if is_full else "lower lora.rank"
    halved = "write full.optimizer: adamw_8bit" if is_full else fewer
    many, trained = config.num_policies, f"{step.trained:,} numbers"
    if many > 1:
        trained, fewer = f"{many} adapters of {trained}", f"{fewer}, or train fewer adapters"
    yield MemoryRow("masters", many * step.masters // parts, trained, fewer)
    yield MemoryRow("gradients", many * step.gradients // parts, "float32", fewer)
    yield MemoryRow("moments", many * step.moments // parts, "of AdamW", halved)
    if config.needs_reference:
        held = step.weights if setup.has_reference_model else step.masters
        yield MemoryRow("reference", held, "what the KL term is to", "leave loss.kl out")
    below = "below the first adapted layer"
    yield MemoryRow("hidden states", step.trunk, below, "lower trainer.trunk_cache_gib")
    # Gradients of a pass are cut as they are made; published weights are gathered.
    published = step.weights if is_full and not setup.is_shared else 0
    kernels = KERNEL_PART if setup.place.device == "cpu" else 0
    one_pass = int((1 + kernels) * step.one_pass) - step.weights + own_weights
    note = f"activations of {step.pass_tokens:,} tokens"
    lower = "lower trainer.pass_tokens or drawing.max_tokens"
    if setup.trainer.checkpoint_layers:
        note = f"{note}, layers checkpointed"
    else:
        lower = f"{lower}, or write trainer.checkpoint_layers: true"
    # A pass, a step and a publication do not hold their memory at the same time.
    yield MemoryRow("one pass", max(one_pass, step.one_step // parts, published), note, lower)


def _resident_bytes() -> int:
    """Return the memory of this process in bytes: libraries of the training, but no weights."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return 0
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(device: str) -> int:
    total = memory_bytes(torch.device(device))
    if device == "cpu" and CGROUP_LIMIT.is_file():
        limit = CGROUP_LIMIT.read_text().strip()
        return min(total, int(limit)) if limit.isdigit() else total
    return total


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
