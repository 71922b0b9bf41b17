"""`plan_grpo`: what a training holds in memory, and whether it fits, before weights are loaded.

    plan = plan_grpo("mine.yaml")
    plan.total_bytes, plan.fits, [(row.name, row.num_bytes) for row in plan.rows]

Data are taken at their longest: the longest prompts with answers of `drawing.max_tokens`, or with
all that a game may draw (`environment.max_tokens`), as far as the model's context goes.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rookery.compose.grpo.files import GrpoFiles, read_files
from rookery.compose.running import (
    ConfigSource,
    num_local_processes,
    num_processes,
    quiet_libraries,
    read_config,
)
from rookery.embedded import EngineConfig
from rookery.embedded.prefix import memory_bytes
from rookery.engines import AnyEngineConfig, launch_of, trainer_place
from rookery.errors import ConfigError
from rookery.fleet import FleetConfig
from rookery.fleet.servers.settings import GPU_SHARE, LaunchConfig, gpus_each, num_replicas
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.sweep import swept
from rookery.slots.linear import can_pack
from rookery.slots.model import ModelShape
from rookery.tasks.splits import SplitName
from rookery.train import FullConfig, LoraConfig
from rookery.train.memory import Lengths, ModelPlace, StepMemory, measure_step
from rookery.train.slotted_trainer import CPU_TOKENS, MOST_TOKENS, PASS_PART
from rookery.types import Adapter

__all__ = [
    "MemoryPlan",
    "MemoryRow",
    "check_plan",
    "has_one_gpu",
    "plan_grpo",
    "server_row",
    "server_share",
]

GIB = 2**30
MOST_COPIES = 32
"""Times the weight files: float32 models, masters, gradients, moments and a copy to publish take
less, also where the files have 16 bit."""
MANY_TOKENS = 64
"""A pass of so many tokens holds less than MOST_COPIES of the weights."""
SERVER = "vLLM"
CUDA_PART = 0.08
"""Of a GPU that two programs share: their contexts, graphs, and memory in pieces too small."""
ADAPTER_COPIES = 1.5
"""Times the weight files: a trainer's model, and an adapter with gradients and moments."""
LEAST_CACHE = GIB
"""For keys and values, below which a server is of no use."""
DRAWN_TOKEN_BYTES = 300
"""Of a token of an answer that waits to be trained on: numbers of Python, and the batch as it is
written. 193 were measured for prompts of 100 and answers of 400 tokens."""
KERNEL_PART = 0.1
"""Of a pass, on the CPU: what kernels take for themselves, and what the allocator cannot give back
at once. 0.08 were measured for passes of 4,096 tokens."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""What a container may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One part of what is held at the same time."""

    name: str
    num_bytes: int
    note: str
    remedy: str = ""
    """What to write to make it smaller; empty where nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one training on the device that the trainer computes on."""

    device: str
    rows: tuple[MemoryRow, ...]
    available_bytes: int
    """All memory of the device, taken or free."""

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    @property
    def complaint(self) -> str:
        """Why it does not fit and which key to change; empty when it fits."""
        if self.fits:
            return ""
        largest = max((row for row in self.rows if row.remedy), key=lambda row: row.num_bytes)
        return (
            f"The training needs {_gib(self.total_bytes)} and the memory of {self.device} is "
            f"{_gib(self.available_bytes)}. {_gib(largest.num_bytes)} are for {largest.name} "
            f"({largest.note}): {largest.remedy}. `rookery grpo plan` lists all parts."
        )


def plan_grpo(config: ConfigSource | GrpoConfig, **values: Any) -> MemoryPlan:
    """The plan of a config; `values` are keys of it, as for `run_grpo`."""
    quiet_libraries()
    loaded = read_config(GrpoConfig, config, values)
    if loaded.engine.type == "service":
        raise ConfigError(
            "engine is a service, which trains with its own memory: nothing is held here."
        )
    return make_plan(_with_largest(loaded), read_files(loaded))


def check_plan(config: GrpoConfig, files: GrpoFiles) -> MemoryPlan | None:
    """Refuse a training that does not fit into memory. None for one that is far from it: a plan
    takes seconds."""
    config = _with_largest(config)
    if _quick_share(config, files) is not None or _is_small(config, files):
        return None
    plan = make_plan(config, files)
    if plan.complaint:
        raise ConfigError(plan.complaint)
    return plan


def _with_largest(config: GrpoConfig) -> GrpoConfig:
    """A sweep is planned as if all its adapters had the values of the one that needs most."""
    if config.sweep is None:
        return config

    def size(config: GrpoConfig) -> tuple[int, bool]:
        num_rollouts = (1 + (config.staleness or 0)) * config.max_groups * config.group_size
        return num_rollouts * config.max_drawn_tokens, config.needs_reference

    largest = max((adapter.config for adapter in swept(config)), key=size)
    return largest.model_copy(update={"sweep": config.sweep})


def _is_small(config: GrpoConfig, files: GrpoFiles) -> bool:
    """Whether weights and tokens are so few that no plan is needed."""
    device, _ = files.place
    weights = sum(path.stat().st_size for path in files.start.glob("*.safetensors"))
    lengths = _lengths(config, files)
    size = lengths.prompt_tokens + lengths.answer_tokens
    most_tokens = config.trainer.pass_tokens or (CPU_TOKENS if device == "cpu" else MOST_TOKENS)
    tokens = max(size, min(most_tokens, size * lengths.num_data))
    most = MOST_COPIES * weights * (1 + tokens / MANY_TOKENS)
    return most + _drawn_row(config, lengths).num_bytes < min(_memory(device), _memory("cpu"))


def _quick_share(config: GrpoConfig, files: GrpoFiles) -> float | None:
    """The part of a GPU for a server beside a trainer whose passes are of the GPU's size: known
    without a plan. None: it has to be planned."""
    device, _ = files.place
    launch = launch_of(config.engine)
    if launch is None or not _is_beside(launch, device) or config.full is not None:
        return None
    if config.trainer.pass_tokens is not None or config.needs_reference:
        return None
    total = _memory(device)
    weights = sum(path.stat().st_size for path in files.start.glob("*.safetensors"))
    left = (1 - CUDA_PART - PASS_PART) * total - ADAPTER_COPIES * weights
    return left / total if left > 2 * (weights + LEAST_CACHE) else None


def make_plan(config: GrpoConfig, files: GrpoFiles) -> MemoryPlan:
    device, dtype = files.place
    step = measure_step(
        files.start,
        trained=_trained(config, files),
        trainer=config.trainer,
        lengths=_lengths(config, files),
        place=ModelPlace(device=device, dtype=dtype, is_exact=config.share),
    )
    drawn = _drawn_row(config, _lengths(config, files).within(step.shape.context_tokens))
    if drawn.num_bytes > _memory("cpu"):
        raise ConfigError(
            f"{drawn.note} take {_gib(drawn.num_bytes)} and this machine has "
            f"{_gib(_memory('cpu'))}: {drawn.remedy}."
        )
    # The processes of a machine share its memory; each has a GPU of its own.
    many = num_local_processes() if device == "cpu" else 1
    trainer = list(
        _times(many, [*_process_rows(device), *_trainer_rows(config, files, step, device)])
    )
    if config.engine.type == "fleet":
        rows = [*_server_rows(config.engine, step, device, beside=trainer), *trainer]
    else:
        assert config.engine.type == "embedded", "a service has its own memory"
        rows = [*_engine_rows(config, config.engine, files, step, device), *trainer]
    if device == "cpu":
        rows.append(drawn)
    return MemoryPlan(
        device=device,
        rows=tuple(row for row in rows if row.num_bytes),
        available_bytes=_memory(device),
    )


def _times(num: int, rows: Iterable[MemoryRow]) -> Iterator[MemoryRow]:
    return (replace(row, num_bytes=num * row.num_bytes) for row in rows)


def _trained(config: GrpoConfig, files: GrpoFiles) -> LoraConfig | Adapter | FullConfig:
    if config.full is not None:
        return FullConfig(**config.trainer.model_dump(), **config.full.model_dump())
    return files.init or config.lora


def _lengths(config: GrpoConfig, files: GrpoFiles) -> Lengths:
    return Lengths(
        prompt_tokens=max(_drawn_prompts(config, files)),
        answer_tokens=_answer_tokens(config),
        num_data=config.groups_per_step * config.group_size * config.num_policies,
    )


def _answer_tokens(config: GrpoConfig) -> int:
    """Tokens that follow the prompt. Of environments elsewhere the last answer: what comes before
    it counts as prompt."""
    if config.atropos is None:
        return config.max_drawn_tokens
    return min(config.drawing.max_tokens, config.atropos.max_token_len - 1)


def _drawn_prompts(config: GrpoConfig, files: GrpoFiles) -> list[int]:
    """The lengths of the prompts that are trained on; those of environments elsewhere are taken at
    their longest."""
    if config.atropos is not None:
        longest = config.atropos.max_token_len - _answer_tokens(config)
        return [longest] * config.groups_per_step
    return _prompt_tokens(files, "search")


def _prompt_tokens(files: GrpoFiles, split: SplitName) -> list[int]:
    if split not in files.prompt_tokens:
        tasks = [task for taskset in files.tasksets for task in taskset.split(split)]
        files.prompt_tokens[split] = [len(files.template.encode(task)) for task in tasks]
    return files.prompt_tokens[split]


def _drawn_row(config: GrpoConfig, lengths: Lengths) -> MemoryRow:
    """Answers in the memory of this process; with staleness those of two steps."""
    tokens = lengths.prompt_tokens + lengths.answer_tokens
    num = (1 + (config.staleness or 0)) * config.max_groups * config.group_size
    num *= config.num_policies
    return MemoryRow(
        name="drawn answers",
        num_bytes=num * tokens * DRAWN_TOKEN_BYTES,
        note=f"{num:,} answers of up to {tokens:,} tokens with their prompts",
        remedy="lower groups_per_step, max_extra_groups or group_size",
    )


def _process_rows(device: str) -> Iterator[MemoryRow]:
    if device == "cpu":
        yield MemoryRow(name="this process", num_bytes=_resident_bytes(), note="Python, libraries")


def _engine_rows(
    config: GrpoConfig, engine: EngineConfig, files: GrpoFiles, step: StepMemory, device: str
) -> Iterator[MemoryRow]:
    if not config.share:
        is_packed = can_pack(device=torch.device(device), dtype=step.dtype)
        yield MemoryRow(
            name="engine weights",
            num_bytes=step.weights + (step.tied_head if is_packed else 0),
            note="packed, the tied head beside the embeddings" if is_packed else str(step.dtype),
            remedy="write share: true, or a smaller engine.dtype",
        )
    if config.full is None:
        slots = 2 * config.num_policies * step.masters
        yield MemoryRow(name="adapter slots", num_bytes=slots, note="two versions")
    yield from _cache_rows(config, engine, files, step, device)


def _cache_rows(
    config: GrpoConfig, engine: EngineConfig, files: GrpoFiles, step: StepMemory, device: str
) -> Iterator[MemoryRow]:
    shape, size = step.shape, step.dtype.itemsize
    longest = sorted(_drawn_prompts(config, files))[-config.max_groups :]
    select, report = (sum(_prompt_tokens(files, split)) for split in ("select", "report"))
    kept = sum(longest) + max(select, 2 * report)
    limit = int(engine.cache_gib * GIB)
    kept_bytes = kept * shape.token_bytes(step.dtype)
    yield MemoryRow(
        name="prefix cache",
        # On a GPU it is taken as a whole at the start; on the CPU untouched pages are free.
        num_bytes=limit if device != "cpu" else min(limit, kept_bytes),
        note=f"{kept:,} tokens of prompts, {engine.cache_gib:g} GiB at most",
        remedy="lower engine.cache_gib",
    )
    rows = min(engine.max_rows, config.groups_per_step * config.group_size)
    length = min(max(longest) + _answer_tokens(config), shape.context_tokens)
    yield MemoryRow(
        name="answers in flight",
        num_bytes=rows * length * _kv_bytes(shape) * size,
        note=f"{rows} rows of {length:,} tokens",
        remedy="lower engine.max_rows",
    )


def _kv_bytes(shape: ModelShape) -> int:
    """Numbers of one token's keys and values."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim


def server_share(
    config: GrpoConfig, files: GrpoFiles, plan: MemoryPlan | None = None
) -> float | None:
    """The part of its GPU that the trainer leaves to a server there; None: they have one each, or
    the config says it. `plan` is made where it is not given."""
    config = _with_largest(config)
    launch = launch_of(config.engine)
    if launch is None or not _is_beside(launch, files.place[0]):
        return None
    if launch.gpu_memory_utilization is not None:
        return None
    share = None if plan is not None else _quick_share(config, files)
    if share is None:
        plan = plan or make_plan(config, files)
        [row] = [row for row in plan.rows if row.name == SERVER]
        share = row.num_bytes / plan.available_bytes
    return math.floor(100 * share) / 100


def has_one_gpu(engine: AnyEngineConfig) -> bool:
    """Whether one server is started, on the trainer's GPU."""
    launch = launch_of(engine)
    if launch is None or not _is_beside(launch, trainer_place(engine)[0]):
        return False
    return num_replicas(launch) == gpus_each(launch) == 1


def _is_beside(launch: LaunchConfig, device: str) -> bool:
    """Whether servers compute on the trainer's GPU."""
    return device != "cpu" and not launch.is_on_cpu and not launch.spare_gpus


def _server_rows(
    engine: FleetConfig, step: StepMemory, device: str, *, beside: Sequence[MemoryRow]
) -> Iterator[MemoryRow]:
    """Servers that are started here; others have their own memory."""
    launch = engine.launch
    if launch is None:
        return
    if launch.is_on_cpu and device == "cpu":
        yield MemoryRow(
            name="server cache",
            num_bytes=launch.cpu_cache_gib * GIB,
            note="engine.launch.cpu_cache_gib; its weights come on top",
            remedy="lower engine.launch.cpu_cache_gib",
        )
    if _is_beside(launch, device):
        total = memory_bytes(torch.device(device))
        yield server_row(launch, step.weights, total=total, beside=beside)


def server_row(
    launch: LaunchConfig, weights: int, *, total: int, beside: Sequence[MemoryRow]
) -> MemoryRow:
    """What a server takes of a GPU with `total` bytes, `beside` a trainer there."""
    if launch.gpu_memory_utilization is not None:
        return MemoryRow(
            name=SERVER,
            num_bytes=int(launch.gpu_memory_utilization * total),
            note="engine.launch.gpu_memory_utilization of the GPU",
            remedy="lower engine.launch.gpu_memory_utilization",
        )
    left = int((1 - CUDA_PART) * total) - sum(row.num_bytes for row in beside)
    return MemoryRow(
        name=SERVER,
        num_bytes=min(int(GPU_SHARE * total), max(left, weights + LEAST_CACHE)),
        note="what the trainer leaves; weights and 1 GiB for keys and values at least",
    )


def _trainer_rows(
    config: GrpoConfig, files: GrpoFiles, step: StepMemory, device: str
) -> Iterator[MemoryRow]:
    dtype = str(step.dtype).removeprefix("torch.")
    name = "weights" if config.share else "trainer weights"
    note = f"{dtype}, engine and trainer" if config.share else dtype
    is_full = config.full is not None
    parts = num_processes() if is_full else 1  # each process keeps a part of a model
    own_weights = step.weights // parts
    # With alias they are the servers', and counted there.
    held = 0 if config.bridge == "alias" else own_weights
    yield MemoryRow(name=name, num_bytes=held, note=note, remedy="take a smaller model")
    fewer = "train an adapter (full: false)" if is_full else "lower lora.rank"
    halved = "write full.optimizer: adamw_8bit" if is_full else fewer
    trained = f"{step.trained:,} numbers"
    many = config.num_policies
    if many > 1:
        trained, fewer = f"{many} adapters of {trained}", f"{fewer}, or train fewer adapters"
    yield MemoryRow(
        name="masters", num_bytes=many * step.masters // parts, note=trained, remedy=fewer
    )
    yield MemoryRow(
        name="gradients", num_bytes=many * step.gradients // parts, note="float32", remedy=fewer
    )
    yield MemoryRow(
        name="moments", num_bytes=many * step.moments // parts, note="of AdamW", remedy=halved
    )
    if config.needs_reference:
        yield MemoryRow(
            name="reference",
            num_bytes=step.weights if files.has_reference_model else step.masters,
            note="what the KL term is to",
            remedy="leave loss.kl out",
        )
    yield MemoryRow(
        name="hidden states",
        num_bytes=step.trunk,
        note="below the first adapted layer",
        remedy="lower trainer.trunk_cache_gib",
    )
    checkpointed = config.trainer.checkpoint_layers
    # Gradients of a pass are cut as they are made; what is published is put together.
    published = step.weights if is_full and not config.share else 0
    one_pass = int((1 + (KERNEL_PART if device == "cpu" else 0)) * step.one_pass)
    yield MemoryRow(
        name="one pass",
        # What a pass, a step and a publication take for themselves is not held at the same time.
        num_bytes=max(one_pass - step.weights + own_weights, step.one_step // parts, published),
        note=f"activations of {step.pass_tokens:,} tokens"
        + (", layers checkpointed" if checkpointed else ""),
        remedy="lower trainer.pass_tokens or drawing.max_tokens"
        + ("" if checkpointed else ", or write trainer.checkpoint_layers: true"),
    )


def _resident_bytes() -> int:
    """Of this process, which has loaded what a training loads, but no weights."""
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
