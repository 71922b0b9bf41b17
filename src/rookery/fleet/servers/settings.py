"""How servers are started: their config, command line and environment.

config = LaunchConfig(model="Qwen/Qwen2.5-7B-Instruct", max_lora_rank=32)
command_line(config, port=18000)      # ["/usr/bin/python3", "-m", "vllm...", "--model", ...]
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.fleet.http.client import ClientConfig, check_urls

__all__ = [
    "PLUGIN_MODULE",
    "FleetConfig",
    "LaunchConfig",
    "check_launch",
    "command_line",
    "environment",
    "exported_key",
    "gpus_each",
    "num_replicas",
    "visible_gpus",
]

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM can be started with; other ranks are rounded up."""
GPU_SHARE = 0.9
"""vLLM's default of --gpu-memory-utilization in the supported versions."""
PLUGIN_MODULE = "rookery_vllm_plugin"
"""Name of the copy of `vllm_plugin` in the servers' Python."""
EXTENSION_CLASS = f"{PLUGIN_MODULE}.extension.WorkerExtension"
LIVE_WEIGHTS_CLASS = f"{PLUGIN_MODULE}.live_weights.WorkerExtension"
WHOLE_GRAPHS_CLASS = f"{PLUGIN_MODULE}.whole_graphs.WorkerExtension"
ROUTE_CLASS = f"{PLUGIN_MODULE}.token_route.TokenRoute"
SCHEDULER_CLASS = f"{PLUGIN_MODULE}.whole_answers.WholeAnswers"
WORKER_CLASS = f"{PLUGIN_MODULE}.shared_gpu.Worker"
_SINGLE = "vllm.entrypoints.openai.api_server"
_SEVERAL = "vllm.entrypoints.cli.main"
"""Only the full command line can start several API processes behind one port."""

_KEY = "VLLM_API_KEY"
_HTTP = "servers are reached by http on the address that Rookery gives them"
_CLOSED_FLAGS = {
    "--host": "write launch.host, which needs launch.api_key beyond this machine",
    "--port": "write launch.port",
    "--uds": _HTTP,
    "--grpc-port": _HTTP,
    "--ssl-keyfile": _HTTP,
    "--ssl-certfile": _HTTP,
    "--ssl-ca-certs": _HTTP,
    "--root-path": _HTTP,
    "--allowed-origins": "web pages of other sites may not call a server",
    "--api-key": "write launch.api_key, or export VLLM_API_KEY",
    "--config": "a file could hold any flag: write its flags here, or as keys of launch",
    "--dtype": "write launch.dtype",
}
"""Flags that `args` may not hold, and what to write instead. They decide who can reach a server and
its open routes, or what Rookery checks before a start."""
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Batch sizes to capture graphs for if a short start counts; others are padded to these."""
_VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Batch sizes that vLLM captures by default."""
_SIZE_FLAGS = ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
"""Flags of vLLM that set these sizes."""
_CLOSED_ENV = {
    _KEY: "write launch.api_key, or export it where Rookery runs",
    "VLLM_SERVER_DEV_MODE": "servers that only this machine reaches have it already",
}


class LaunchConfig(Config):
    """Servers to start, all alike."""

    model: str
    """Folder with config.json and safetensors, or Hugging Face id, of the model."""
    python: str = sys.executable
    """Python interpreter that has vLLM; Rookery need not be installed there."""
    replicas: int | None = Field(default=None, ge=1)
    """Number of servers; by default as many as the GPUs allow, one on the CPU."""
    servers_per_gpu: int | None = Field(default=None, ge=1)
    """Servers on each GPU, which share its memory. A small model is answered faster by two, because
    vLLM's Python then limits a server. null: 1, or 2 if a training starts them for a small model.
    """
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where servers compute; `auto` takes GPUs if there are any."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that one copy of the model is spread over."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages that one copy of the model is cut into, each on its own GPUs."""
    spare_gpus: int = Field(default=0, ge=0)
    """Number of GPUs left to others, such as a trainer: the last of the visible ones."""
    data_parallel: int = Field(default=1, ge=1)
    """Copies of the model behind one port, balanced by vLLM."""
    api_servers: int = Field(default=1, ge=1)
    """API processes behind one port. With more than one, vLLM takes no adapters."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on the CPU, as in the embedded engine; on a GPU the model's own type."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Context length in tokens; by default the model's own."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences computed together; by default vLLM's choice for the GPU."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed per step; by default vLLM's choice."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that its servers take. By default 0.9; beside a trainer on the same
    GPU, what the trainer leaves."""
    cpu_cache_gib: int = Field(default=4, ge=1)
    """Size of the key-value cache of a server on the CPU, in GiB."""
    max_loras: int = Field(default=8, ge=0)
    """Adapters computed together. 0 serves the base model alone, which is faster."""
    max_cpu_loras: int = Field(default=64, ge=1)
    """Adapters kept in the server's memory. Adapters beyond this are loaded again when used."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Highest adapter rank, rounded up to the next that vLLM supports."""
    lora_targets: tuple[str, ...] = ()
    """Kinds of layers that adapters adapt, such as q_proj, v_proj; by default every kind the model
    has. Other layers then save two kernels per layer and step, and their memory."""
    prefix_caching: bool = True
    """Cache the keys and values of prompt prefixes."""
    enforce_eager: bool = False
    """Disable compilation and CUDA graphs: starts sooner, runs slower."""
    compile: bool | None = None
    """Use torch.compile, which takes a minute unless an earlier start left its results. false keeps
    the CUDA graphs of decoding. null: false for a server started for one training, else true.
    """
    cuda_graphs: Literal["auto", "full"] = "auto"
    """`full` runs whole steps as CUDA graphs, also those with prompts: short answers come sooner,
    most of all on slow hosts. If the attention cannot (before Hopper), vLLM makes its own choice.
    Every server first shows that it computes correctly."""
    max_logprobs: int = Field(default=20, ge=0)
    """Limit on the likeliest tokens that a request may ask for at each position."""
    live_weights: bool = False
    """The base weights change while they are served. On the CPU vLLM then computes with them and
    not with packed copies, which is slower. A training of all weights sets it itself."""
    extension: bool = True
    """Run Rookery's own code in the servers: adapters straight from memory, a route for tokens."""
    placement: Literal["here", "ray"] = "here"
    """`ray` starts the servers on the nodes of a Ray cluster."""
    ray_address: str = "auto"
    """Address of the Ray cluster; `auto` takes the one of this machine."""
    placement_s: float = Field(default=300.0, gt=0)
    """Seconds for the Ray cluster to make room for all servers; adding nodes takes minutes."""
    host: str = "127.0.0.1"
    """Address to listen on; an address beyond this machine needs a key."""
    api_key: str = Field(default="", repr=False, exclude=True)
    """Key that the servers require; needed if they listen beyond this machine. By default the value
    of VLLM_API_KEY where Rookery runs."""
    port: int = Field(default=18000, ge=1, le=65535)
    """First port to try; the search goes upwards."""
    startup_s: float = Field(default=1200.0, gt=0)
    """Seconds for a server to be ready; 405B-class models take ten minutes."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of a server that died, counting starts that fail."""
    args: tuple[str, ...] = ()
    """Further flags of vLLM's command line, except those that open a server to others."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables of the servers."""

    @model_validator(mode="after")
    def _check(self) -> "LaunchConfig":
        if self.api_servers > 1 and self.max_loras:
            raise ValueError(
                f"api_servers is {self.api_servers} and max_loras is {self.max_loras}; vLLM loads "
                "adapters only with one API process: write max_loras: 0, or api_servers: 1 and "
                "more replicas."
            )
        if self.max_loras > self.max_cpu_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras, "
                f"{self.max_loras}."
            )
        if not self.is_private and not self.api_key:
            raise ValueError(
                f"host is {self.host}; servers without a key listen on 127.0.0.1 only, as whoever "
                "reaches them can load adapters. Reach them by an ssh tunnel, set api_key, or "
                "start vLLM yourself with --api-key and give its URL in urls."
            )
        if self.placement == "ray" and self.replicas is None:
            raise ValueError("placement: ray needs replicas, the number of servers to place.")
        if self.placement == "ray" and self.per_gpu > 1:
            raise ValueError(
                f"servers_per_gpu is {self.per_gpu} and placement is ray, which gives each server "
                "GPUs of its own: leave servers_per_gpu out."
            )
        if self.per_gpu > 1 and gpus_each(self) > 1:
            # Their workers would wait for each other's turns (vllm_plugin/shared_gpu.py).
            raise ValueError(
                f"servers_per_gpu is {self.per_gpu} and each server takes {gpus_each(self)} GPUs "
                "(tensor_parallel x pipeline_parallel x data_parallel): servers that share a GPU "
                "have no other. Leave servers_per_gpu out, or give each server one GPU."
            )
        if self.dtype == "float32" and self.max_loras and not self.is_on_cpu:
            raise ValueError(
                f"dtype is float32 and max_loras is {self.max_loras}; on a GPU vLLM computes "
                "adapters in 16 bits only: write dtype: bfloat16 (or auto), max_loras: 0, or "
                "device: cpu."
            )
        for word in self.args:
            flag = _closed_flag(word)
            if flag:
                raise ValueError(f"args holds {word}, and may not: {_CLOSED_FLAGS[flag]}.")
        for name in self.env.keys() & _CLOSED_ENV.keys():
            raise ValueError(f"env holds {name}, and may not: {_CLOSED_ENV[name]}.")
        return self

    @property
    def per_gpu(self) -> int:
        """Servers on each GPU."""
        return self.servers_per_gpu or 1

    @property
    def is_private(self) -> bool:
        """True if only this machine reaches the servers."""
        return self.host in ("127.0.0.1", "localhost", "::1")

    @property
    def has_extension(self) -> bool:
        """True if servers run the extension: its routes are safe only on private servers."""
        return self.extension and self.is_private

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not visible_gpus())

    @property
    def served_dtype(self) -> str | None:
        """Type the servers compute in; None: the model's own type."""
        if self.dtype == "auto":
            return "float32" if self.is_on_cpu else None
        return self.dtype

    @property
    def has_whole_graphs(self) -> bool:
        return self.cuda_graphs == "full" and not self.enforce_eager and not self.is_on_cpu

    @property
    def compilation(self) -> dict[str, object]:
        """Settings that differ from vLLM's own choice."""
        if self.is_on_cpu or self.enforce_eager:
            return {}
        # vLLM captures up to 512; larger batches would start each kernel separately.
        most, largest = self.max_num_seqs or 0, _VLLM_SIZES[-1]
        larger = [*range(largest + 128, most, 128), most] if most > largest else []
        chosen: dict[str, object] = {}
        if self.compile is False:
            chosen |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        is_said = any(w.replace("_", "-").startswith(_SIZE_FLAGS) for w in self.args)
        if not is_said and (self.compile is False or larger):
            sizes = _GRAPH_SIZES if self.compile is False else _VLLM_SIZES
            chosen["cudagraph_capture_sizes"] = [*sizes, *larger]
        if self.has_whole_graphs:
            chosen["cudagraph_mode"] = "FULL"
        return chosen

    @property
    def lora_rank(self) -> int:
        """Maximum rank to start the server with."""
        return next(rank for rank in LORA_RANKS if rank >= self.max_lora_rank)


class FleetConfig(Config):
    """A pool of vLLM servers."""

    rounding: ClassVar[None] = None
    type: Literal["fleet"] = "fleet"
    urls: tuple[str, ...] = ()
    """Servers that run already."""
    launch: LaunchConfig | None = None
    """Servers to start."""
    name: str = ""
    """Name of the base model in results; by default what it was loaded from."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable that holds the servers' key, if they have one."""
    adapter_folder: Path | None = None
    """Folder that all servers see; the fleet puts its adapters into its own folder there and
    removes it at the end. By default shared memory, which servers on this machine see."""
    resolver: bool = False
    """The servers search adapter_folder by name (lora_filesystem_resolver), so no load is sent."""
    peft_folders: bool = False
    """Send adapters as PEFT folders, even to servers that could take them from memory."""
    in_place: bool = False
    """Servers on the same GPU read adapters there, without a copy."""
    max_loras: int | None = Field(default=None, ge=1)
    """Adapters in flight per server, for servers that do not report their limit."""
    max_lora_rank: int | None = Field(default=None, ge=1)
    """Highest rank, for servers that do not report theirs."""
    device: Literal["gpu", "cpu"] | None = None
    """Device of the servers in `urls`, for those that do not report it. If it is unknown, the base
    model and adapters are not computed together."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Sequences in flight per server; by default twice as many as it computes together."""
    batch: int = Field(default=32, ge=1)
    """Limit on sequences per HTTP call."""
    all_down_timeout_s: float = Field(default=300.0, ge=0)
    """Seconds that requests wait while no server that takes them is up."""
    client: ClientConfig = ClientConfig()

    @model_validator(mode="after")
    def _check(self) -> "FleetConfig":
        if not self.urls and self.launch is None:
            raise ValueError(
                "a fleet needs servers: write urls: [http://host:8000], or a launch section with a "
                "model to start some here."
            )
        if self.resolver and self.adapter_folder is None:
            raise ValueError("resolver: true needs adapter_folder, the folder the servers search.")
        check_urls(self.urls)
        return self


def check_launch(config: LaunchConfig) -> None:
    """ConfigError if the model's config shows that it cannot be split as configured. A model that
    is not on this machine is not checked."""
    try:
        document = json.loads((Path(config.model).expanduser() / "config.json").read_bytes())
        sizes = document.get("text_config") or document
        heads, layers = int(sizes["num_attention_heads"]), int(sizes["num_hidden_layers"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    if heads % config.tensor_parallel:
        fitting = [str(num) for num in range(1, heads + 1) if heads % num == 0]
        raise ConfigError(
            f"launch.tensor_parallel is {config.tensor_parallel}, and each GPU gets as many of the "
            f"{heads} attention heads of {config.model}: write one of {', '.join(fitting)}."
        )
    if config.pipeline_parallel > layers:
        raise ConfigError(
            f"launch.pipeline_parallel is {config.pipeline_parallel}, and {config.model} has "
            f"{layers} layers to cut into stages: write {layers} or less."
        )


def command_line(config: LaunchConfig, *, port: int) -> list[str]:
    """Return the server's command, without the interpreter."""
    head = ["-m", _SEVERAL, "serve"] if config.api_servers > 1 else ["-m", _SINGLE]
    flags: dict[str, object] = {
        "--model": config.model,
        "--host": config.host,
        "--port": port,
        "--dtype": config.served_dtype or "auto",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": config.max_logprobs,
        # A log line per request costs the API process too much.
        "--uvicorn-log-level": "warning",
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--tensor-parallel-size": config.tensor_parallel if config.tensor_parallel > 1 else None,
        "--pipeline-parallel-size": config.pipeline_parallel
        if config.pipeline_parallel > 1
        else None,
        "--data-parallel-size": config.data_parallel if config.data_parallel > 1 else None,
        "--api-server-count": config.api_servers if config.api_servers > 1 else None,
        "--worker-extension-cls": _extension_class(config),
        "--middleware": ROUTE_CLASS if config.has_extension else None,
        "--scheduler-cls": SCHEDULER_CLASS if config.has_extension else None,
    }
    if config.max_loras:
        flags["--max-loras"] = config.max_loras
        flags["--max-cpu-loras"] = config.max_cpu_loras
        flags["--max-lora-rank"] = config.lora_rank
    if not config.is_on_cpu:
        share = config.gpu_memory_utilization or GPU_SHARE
        flags["--gpu-memory-utilization"] = share / config.per_gpu
        flags["--worker-cls"] = WORKER_CLASS if config.per_gpu > 1 else None
    if config.compilation:
        flags["--compilation-config"] = json.dumps(config.compilation)
    words = [w for flag, value in flags.items() if value is not None for w in (flag, str(value))]
    caching = "--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"
    words += [caching]
    if config.is_on_cpu and config.max_num_batched_tokens is None:
        # On the CPU, vLLM fails on a prompt computed in chunks if its request has a seed:
        # generators there cannot be reset by what the first chunk drew.
        words += ["--no-enable-chunked-prefill"]
    words += ["--enable-lora"] if config.max_loras else []
    if config.max_loras and config.lora_targets:
        words += ["--lora-target-modules", *config.lora_targets]
    words += ["--enforce-eager"] if config.enforce_eager else []
    return [*head, *words, *config.args]


def _extension_class(config: LaunchConfig) -> str | None:
    if not config.has_extension:
        return None
    if config.live_weights and config.is_on_cpu:
        return LIVE_WEIGHTS_CLASS
    return WHOLE_GRAPHS_CLASS if config.has_whole_graphs else EXTENSION_CLASS


def environment(
    config: LaunchConfig, *, index: int, num_servers: int, modules: Path, adapters: Path | None
) -> dict[str, str]:
    """Return the server's environment: ours, what Rookery needs, and what the config adds."""
    env = dict(os.environ)
    # vLLM servers read these variables too, but ours are meant for the client.
    for name in ("VLLM_HOST", "VLLM_PORT", _KEY):
        env.pop(name, None)
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["VLLM_SERVER_DEV_MODE"] = "1" if config.is_private else "0"
    # The engine's process then inherits the API process's imports; vLLM spawns it if it must.
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    if config.api_key:
        # In the environment, not on the command line, which every user of the machine can read.
        env[_KEY] = config.api_key
    if config.max_loras:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.max_loras and adapters is not None:
        plugins = [p for p in env.get("VLLM_PLUGINS", "").split(",") if p]
        env["VLLM_PLUGINS"] = ",".join({*plugins, "lora_filesystem_resolver"})
        env["VLLM_LORA_RESOLVER_CACHE_DIR"] = str(adapters)
    path = [str(modules), *([env["PYTHONPATH"]] if env.get("PYTHONPATH") else [])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    env.update(_cuda(config, index) if not config.is_on_cpu else _cpu(config, index, num_servers))
    env.update(config.env)
    return env


def exported_key() -> str:
    """Return the default key of servers; clients read the same variable."""
    return os.environ.get(_KEY, "")


def num_replicas(config: LaunchConfig) -> int:
    if config.replicas is not None:
        return config.replicas
    if config.is_on_cpu:
        return 1
    return max(1, len(_own_gpus(config)) // gpus_each(config)) * config.per_gpu


def _own_gpus(config: LaunchConfig) -> tuple[str, ...]:
    gpus = visible_gpus()
    return gpus[: max(0, len(gpus) - config.spare_gpus)]


def first_spare_gpu(config: LaunchConfig) -> int:
    """Return the index of the first visible GPU that servers leave to others; 0 if none."""
    return len(_own_gpus(config)) if config.spare_gpus else 0


def gpus_each(config: LaunchConfig) -> int:
    return config.tensor_parallel * config.pipeline_parallel * config.data_parallel


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that programs started here may use, named as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    devices = [p.name for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    return tuple(sorted((name.removeprefix("nvidia") for name in devices), key=int))


def _closed_flag(word: str) -> str:
    """Return the closed flag that vLLM may read: `--api_key=x` and abbreviations count too."""
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if not name.startswith("--") or name == "--":
        return ""
    return next((flag for flag in _CLOSED_FLAGS if flag.startswith(name)), "")


def _cuda(config: LaunchConfig, index: int) -> dict[str, str]:
    size = gpus_each(config)
    first = index // config.per_gpu * size
    gpus = _own_gpus(config)[first : first + size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _cpu(config: LaunchConfig, index: int, num_servers: int) -> dict[str, str]:
    """Give each server its own cores: two that spin on the same ones are four times slower."""
    env = {"VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gib)}
    if num_servers > 1 and sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        size = len(cores) // num_servers
        bound = cores[index * size : (index + 1) * size]
        bind = ",".join(str(core) for core in bound) if bound else "nobind"
        env["VLLM_CPU_OMP_THREADS_BIND"] = bind
    return env
