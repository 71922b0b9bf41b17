"""Options of the Atropos example trainer and its server, translated to a config of Rookery.

    document, notes = translate(AtroposOptions(model_name="Qwen/Qwen2.5-3B"), os.environ)

A note names the replacement of an option that has no use here.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rookery.errors import ConfigError

__all__ = ["AtroposOptions", "translate"]

Mode = Literal["none", "shared_vllm", "lora_only"]


@dataclass(frozen=True, kw_only=True)
class AtroposOptions:
    """Options of `example_trainer/grpo.py` and `vllm_api_server.py`, with their defaults."""

    model_name: str = ""
    "Hugging Face id or folder."
    model: str = ""
    "The same, as the server calls it."
    weight_bridge_mode: Mode = "none"
    "none: checkpoint and restart; shared_vllm: one copy of the weights; lora_only: an adapter."
    single_copy: bool = False
    "The same as --weight-bridge-mode shared_vllm."
    vllm_config_path: Path | None = None
    "Not needed: servers report their memory."
    vllm_port: int = 9001
    "Port at which environments ask the engine."
    port: int | None = None
    "The same, as the server calls it."
    engine_ports: tuple[int, ...] = (9004, 9005, 9006, 9007)
    "Further such ports: gsm8k_server.py always asks these."
    training_steps: int = 10
    "Optimizer steps."
    batch_size: int = 2
    "Sequences per micro-batch."
    gradient_accumulation_steps: int = 32
    "Micro-batches per step: a step has batch_size times as many sequences."
    seq_len: int = 2048
    "Longest sequence, in tokens."
    lr: float = 1e-5
    "Learning rate."
    warmup_steps: int = 0
    "Steps over which the learning rate rises."
    clip_eps: float = 0.2
    "Distance from 1 at which a token's ratio is clipped."
    save_path: Path = Path("trained_model_checkpoints")
    "The run's folder; checkpoints are in its folder checkpoints."
    checkpoint_interval: int = 3
    "Steps between checkpoints; 0: only one at the end."
    vllm_restart_interval: int = 3
    "Steps between restarts, with --weight-bridge-mode none."
    lora_r: int = 16
    "Rank of the adapter."
    lora_alpha: float = 32.0
    "The adapter's output is multiplied by lora_alpha / lora_r."
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    "Type of the served weights."
    benchmark: bool = False
    "Print step, sync and fetch times and memory."
    use_wandb: bool = False
    "Write the curves to Weights & Biases."
    trainer_rank: int | None = None
    "Not needed: torchrun starts several processes."
    world_size: int | None = None
    "Not needed: torchrun starts several processes."
    atropos_url: str = ""
    "A run-api or gateway that already runs; else one is started here on port 8000."
    tensor_parallel_size: int = 1
    "GPUs that one copy of the model is spread over."
    pipeline_parallel_size: int = 1
    "Pipeline stages of one copy of the model."
    gpu_memory_utilization: float | None = None
    "Share of the GPU's memory for the server; by default what the trainer leaves."
    max_model_len: int = 4096
    "Context of the server in tokens."
    max_lora_rank: int | None = None
    "Highest rank that the server takes; by default --lora-r."
    enable_lora: bool = False
    "Implied by --weight-bridge-mode lora_only."
    enforce_eager: bool = False
    "Disable CUDA graphs."
    vllm_python: str = sys.executable
    "Python interpreter that has vLLM."
    device: Literal["auto", "cuda", "cpu"] = "auto"
    "Where the server computes."


def translate(
    options: AtroposOptions, environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Translate to a config document, and to notes on options that it has no key for."""
    _check(options)
    mode = _mode(options, environment)
    sequences = options.batch_size * options.gradient_accumulation_steps
    publish_every = options.vllm_restart_interval if mode == "none" else 1
    interval = options.checkpoint_interval or options.training_steps
    save_every = -(-interval // publish_every) * publish_every
    document: dict[str, Any] = {
        "engine": {"type": "fleet", "launch": _launch(options, mode)},
        "environment": {"type": "atropos", "max_token_len": options.seq_len},
        "bridge": _bridge(options, mode),
        "steps": options.training_steps,
        "groups_per_step": sequences // 2,
        "group_size": 2,
        "learning_rate": options.lr,
        "warmup": min(1.0, options.warmup_steps / options.training_steps),
        "loss": {"type": "grpo", "clip_low": options.clip_eps, "clip_high": options.clip_eps},
        "drawing": {"max_tokens": options.seq_len},
        "publish_every": publish_every,
        "save_every": save_every,
    }
    if options.atropos_url:
        document["environment"]["url"] = options.atropos_url
    else:
        port = options.vllm_port if options.port is None else options.port
        document["environment"]["engine_ports"] = list(dict.fromkeys((port, *options.engine_ports)))
    if mode == "lora_only":
        document["lora"] = {"rank": options.lora_r, "alpha": options.lora_alpha}
    else:
        document["full"] = True
    if options.use_wandb:
        document["track"] = ["wandb"]
    return document, _notes(options, environment, mode)


def _check(options: AtroposOptions) -> None:
    """Check values that the config is computed from and cannot check itself."""
    if bool(options.model_name) == bool(options.model):
        how_many = "both" if options.model else "neither"
        raise ConfigError(f"Got {how_many} of --model-name and --model: give the model once.")
    least = {
        "training_steps": 1, "vllm_restart_interval": 1, "batch_size": 1, "warmup_steps": 0,
        "gradient_accumulation_steps": 1, "checkpoint_interval": 0,
    }  # fmt: skip
    for name, smallest in least.items():
        if getattr(options, name) < smallest:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} is {getattr(options, name)}: give {smallest} or a larger number."
            )
    sequences = options.batch_size * options.gradient_accumulation_steps
    if sequences % 2:
        raise ConfigError(
            f"batch_size {options.batch_size} times gradient_accumulation_steps "
            f"{options.gradient_accumulation_steps} is {sequences} sequences, and a step needs an "
            "even number of at least 2: change one of them."
        )


def _bridge(options: AtroposOptions, mode: Mode) -> str:
    if mode == "shared_vllm" and _has_parts(options):
        return "copy"
    return {"none": "restart", "shared_vllm": "alias", "lora_only": "auto"}[mode]


def _has_parts(options: AtroposOptions) -> bool:
    """True if each of several workers has a part of the weights."""
    return options.tensor_parallel_size * options.pipeline_parallel_size > 1


def _mode(options: AtroposOptions, environment: Mapping[str, str]) -> Mode:
    wants_one_copy = environment.get("VLLM_ENABLE_SHARED_WEIGHTS", "") not in ("", "0")
    if options.weight_bridge_mode == "none" and (options.single_copy or wants_one_copy):
        return "shared_vllm"
    return options.weight_bridge_mode


def _launch(options: AtroposOptions, mode: Mode) -> dict[str, Any]:
    launch: dict[str, Any] = {
        "model": options.model_name or options.model,
        "python": options.vllm_python,
        "replicas": 1,
        "device": options.device,
        "dtype": options.dtype,
        "tensor_parallel": options.tensor_parallel_size,
        "pipeline_parallel": options.pipeline_parallel_size,
        "max_model_len": options.max_model_len,
        "enforce_eager": options.enforce_eager,
    }
    if options.gpu_memory_utilization is not None:
        launch["gpu_memory_utilization"] = options.gpu_memory_utilization
    if mode == "lora_only":
        launch["max_lora_rank"] = options.max_lora_rank or options.lora_r
    return launch


def _notes(options: AtroposOptions, environment: Mapping[str, str], mode: Mode) -> list[str]:
    notes = [
        f"--save-path: the run is {options.save_path}, its checkpoints are in "
        f"{options.save_path / 'checkpoints'}, logs of environments in {options.save_path / 'logs'}"
    ]
    if options.vllm_config_path is not None:
        notes.append(
            "--vllm-config-path: no file is needed; the server is asked for its memory, and a dead "
            "server has none"
        )
    if options.trainer_rank is not None or options.world_size is not None:
        notes.append(
            "--trainer-rank, --world-size: start several processes with `torchrun "
            "--nproc-per-node N -m rookery grpo run CONFIG`; their gradients are added up"
        )
    if options.enable_lora and mode != "lora_only":
        notes.append("--enable-lora: adapters are served with --weight-bridge-mode lora_only")
    if mode == "shared_vllm" and _has_parts(options):
        notes.append(
            "--weight-bridge-mode shared_vllm: several workers have a part of the weights each, "
            "which are copied to them (bridge: copy)"
        )
    known = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "all weights are trained in the server's memory"
        if mode == "shared_vllm"
        else f"--weight-bridge-mode {mode} does without",
        "VLLM_SKIP_WEIGHT_DAEMON": "there is no weight daemon",
        "NUM_INFERENCE_NODES": "servers elsewhere are engine: {type: fleet, urls: [...]}",
        "LOGDIR": f"logs are in {options.save_path / 'logs'}",
    }
    notes += [f"{name}: {said}" for name, said in known.items() if environment.get(name)]
    return notes
