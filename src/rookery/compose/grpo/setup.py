"""Setup of a grpo run: reads all that the config names and decides what it means, before a model is
loaded or a server starts. All adapters of a sweep share one setup.

    config = settle(config, run_folder)
    setup = read_setup(config)
    setup.tasksets, setup.start, setup.place.has_servers, setup.bridge.engine
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rookery.compat.atropos.programs import check_commands
from rookery.compose.inputs import IsMade, RunInputs, list_inputs, load_not_made
from rookery.compose.running import num_processes
from rookery.embedded.folders import ModelFolder
from rookery.engines import AnyEngineConfig, find_model, launch_of, require_adapters, trainer_place
from rookery.environments import GameConfig
from rookery.environments.atropos import AtroposConfig
from rookery.errors import ConfigError, ModelError
from rookery.fleet import FleetConfig
from rookery.fleet.servers.settings import gpus_each, num_replicas
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.checkpoints import START
from rookery.loops.grpo.config import BridgeName
from rookery.loops.grpo.policy_trainer import check_splits
from rookery.loops.grpo.sweep import ADAPTERS
from rookery.slots.loading import require_decoder
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.train import FullConfig, LoraConfig, TrainerConfig
from rookery.types import Adapter
from rookery.weights import read_adapter

__all__ = [
    "BridgePlan",
    "GrpoSetup",
    "LaunchSettings",
    "Place",
    "find_inputs",
    "plan_bridge",
    "read_setup",
    "read_step_inputs",
    "settle",
]


LaunchSettings = Mapping[str, object]
"""Values of keys of `engine.launch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The trainer's device, and whether servers started here share it."""

    device: str
    dtype: str
    """The dtype of the trainer's model."""
    has_servers: bool = False
    """True if servers started here run on the trainer's GPU."""
    has_all_servers: bool = False
    """True if that GPU is the only one that servers run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgePlan:
    """Decisions on a bridge before servers start. `choose_bridge` makes the rest."""

    name: BridgeName
    """The configured name."""
    engine: FleetConfig
    """The engine's config with the settings that the bridge needs."""
    folder: Path | None
    """The model's folder, to check that servers share all its weights. None: no check."""
    is_full: bool
    """True if all weights are trained."""
    is_merged: bool
    """True if adapters are merged into the weights of servers, which then serve none."""
    why_apart: str
    """Why trainer and servers cannot share one copy of the weights; empty: servers decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSetup:
    """The inputs that the config names, and the decisions that follow from it."""

    engine: AnyEngineConfig
    bridge: BridgePlan | None
    """How weights reach servers; None: the engine has no servers."""
    place: Place
    folder: ModelFolder
    template: Template
    tasksets: list[Taskset]
    game: GameConfig | None
    """The game to play; None: prompts are answered once."""
    atropos: AtroposConfig | None
    """The environments that draw the groups elsewhere; None: this run draws them."""
    start: Path
    """The model folder that training begins with."""
    init: Adapter | None
    """The adapter that training begins with; None: a new one."""
    lora: LoraConfig
    """The shape of a new adapter."""
    full: FullConfig | None
    """How all weights are trained; None: an adapter is trained."""
    trainer: TrainerConfig
    is_shared: bool
    """True if the embedded engine computes with the trainer's model."""
    reference: Adapter | Path | None
    """Reference of the KL term: an adapter or a model folder. None: the start of the training."""
    has_reference_model: bool
    """True if the reference is a second model in memory."""


def settle(config: GrpoConfig, folder: Path | None) -> GrpoConfig:
    """Fill in config values that depend on others. A resumed run begins with the adapter stored in
    its `folder`, because `init_from` may have been changed or deleted."""
    if folder is not None and config.init_from is not None and config.full is None:
        starts = [folder / START, *sorted((folder / ADAPTERS).glob(f"*/{START}"))]
        kept_start = next((start for start in starts if start.is_dir()), config.init_from)
        config = config.model_copy(update={"init_from": kept_start})
    is_open = config.staleness is None and config.atropos is None
    if is_open and _find_place(config.engine).has_all_servers:
        config = config.model_copy(update={"staleness": 1})
    return config


def read_setup(config: GrpoConfig) -> GrpoSetup:
    tasksets = load_tasksets(config.judged_tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses an empty required split
    check_splits(tasksets)
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    require_decoder(folder.path)  # refuse before servers start
    start, init, full = folder.path, None, None
    if config.full is not None:
        full = FullConfig(**config.trainer.model_dump(), **config.full.model_dump())
        start = start if config.init_from is None else _require_start(config.init_from)
    else:
        init = None if config.init_from is None else read_adapter(config.init_from)
        where = "lora.rank" if init is None else f"The rank of {config.init_from}"
        require_adapters(config.engine, {where: config.lora.rank if init is None else init.rank})
    if config.atropos is not None:
        check_commands(config.atropos.environments)
    template, reference = load_template(folder.path), _read_reference(config)
    has_reference_model = (
        config.needs_reference
        if full is not None
        else isinstance(reference, Path) and reference.resolve() != folder.path.resolve()
    )
    place, bridge = _find_place(config.engine), None
    if config.engine.type == "fleet":
        layers = config.lora.targets if init is None else init.factors
        is_beside = place.has_all_servers
        bridge = plan_bridge(config, folder=folder.path, layers=layers, is_beside=is_beside)
    return GrpoSetup(
        engine=config.engine, bridge=bridge, place=place, folder=folder, template=template,
        tasksets=tasksets, game=config.game, atropos=config.atropos, start=start, init=init,
        lora=config.lora, full=full, trainer=config.trainer, is_shared=config.share,
        reference=reference, has_reference_model=has_reference_model,
    )  # fmt: skip


def _find_place(engine: AnyEngineConfig) -> Place:
    device, dtype = trainer_place(engine)
    launch = launch_of(engine)
    if launch is None or device == "cpu" or launch.is_on_cpu or launch.spare_gpus:
        return Place(device=device, dtype=dtype)
    has_all = num_replicas(launch) <= launch.per_gpu and gpus_each(launch) == 1
    return Place(device=device, dtype=dtype, has_servers=True, has_all_servers=has_all)


def _require_start(folder: Path) -> Path:
    """Require a model folder for a full-weight training."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"init_from is {folder}, an adapter, and full trains all weights of a model: "
            "give a model folder, or write full: false."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"init_from is {folder}, which is not a model folder: it has no config.json. "
            "Give a folder written by save_pretrained, such as `trained` of another run."
        )
    return folder.resolve()


def _read_reference(config: GrpoConfig) -> Adapter | Path | None:
    """Read the reference: an adapter, or just the path of a model folder."""
    folder = config.reference
    if folder is None or (folder / "config.json").is_file():
        return folder
    return read_adapter(folder)


# Decisions on the bridge before servers start.


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys with the number of experts."""


def plan_bridge(
    config: GrpoConfig,
    *,
    folder: Path | None = None,
    layers: Collection[str] = (),
    is_beside: bool = False,
) -> BridgePlan:
    """Decide what is known about the bridge before servers start. `folder` is the model's, `layers`
    are the adapted layers. `is_beside` means that all servers run on the trainer's GPU."""
    engine = config.engine
    assert engine.type == "fleet", "only servers have a bridge"
    is_full = config.full is not None
    has_head = any(layer.endswith("lm_head") for layer in layers)
    if config.bridge == "merge" and has_head:
        raise ConfigError(
            "bridge is merge and the adapter adapts lm_head, whose weights the embeddings may "
            "share: write bridge: slot, or leave lm_head out of lora.targets."
        )
    is_merged = config.bridge == "merge"
    if config.bridge == "auto" and not is_full and not has_head and is_beside:
        is_only = config.sweep is None and config.atropos is None
        is_merged = is_only and folder is not None and not _has_own_layout(folder)
    changed: dict[str, object] = {}
    if config.bridge == "adapter":
        changed["peft_folders"] = True
    elif not is_full and is_beside:
        changed["in_place"] = True
    launch = engine.launch
    if launch is not None:
        launch_changes: dict[str, object] = {}
        if is_full or is_merged:
            # No adapter can be served while the weights change.
            launch_changes = {"live_weights": config.bridge != "restart", "max_loras": 0}
        if config.num_policies > launch.max_loras and not is_full:
            # One more: a new version loads while the previous ones still answer.
            num = config.num_policies + 1
            launch_changes |= {
                "max_loras": num,
                "max_cpu_loras": max(launch.max_cpu_loras, 3 * num),
            }
        if is_beside and launch.compile is None:
            launch_changes["compile"] = False
        changed["launch"] = launch.model_copy(update=launch_changes)
    return BridgePlan(
        name=config.bridge, engine=engine.model_copy(update=changed), folder=folder,
        is_full=is_full, is_merged=is_merged, why_apart=_why_apart(config, engine),
    )  # fmt: skip


def _has_own_layout(folder: Path) -> bool:
    """True if vLLM stores other weights than the folder: quantised, fused experts, or products."""
    document = json.loads((folder / "config.json").read_bytes())
    sizes = document.get("text_config") or document
    has_experts = any(sizes.get(key) for key in _EXPERTS)
    return "quantization_config" in document or has_experts or bool(sizes.get("kv_lora_rank"))


def _why_apart(config: GrpoConfig, engine: FleetConfig) -> str:
    if num_processes() > 1:
        return f"each of {num_processes()} processes of torchrun has a part of the weights"
    if engine.launch is not None and engine.launch.spare_gpus:
        return "the trainer has a GPU of its own (launch.spare_gpus)"
    return "publish_every is above 1" if config.publish_every > 1 else ""


# Digests of the run's inputs.


def find_inputs(setup: GrpoSetup) -> RunInputs:
    """List the tasks and the models. The run itself stores the adapter that it begins with."""
    models = {"the model": setup.folder.path}
    if setup.start != setup.folder.path:
        models["init_from"] = setup.start
    return _list(setup.tasksets, models, setup.reference, game=setup.game)


def read_step_inputs(config: GrpoConfig, is_made: IsMade) -> RunInputs:
    tasksets = load_not_made(config.judged_tasksets, is_made)
    models = {}
    if not is_made("engine", "tokenizer"):
        models["the model"] = find_model(config.engine, tokenizer=config.tokenizer).path
    if config.init_from is not None and not is_made("init_from"):
        if config.full is not None:
            models["init_from"] = _require_start(config.init_from)
        else:
            read_adapter(config.init_from)  # only checked: the run stores the adapter
    reference = None if is_made("reference") else _read_reference(config)
    return _list(tasksets, models, reference, game=config.game)


def _list(
    tasksets: list[Taskset],
    models: Mapping[str, Path],
    reference: Adapter | Path | None,
    *,
    game: GameConfig | None,
) -> RunInputs:
    if isinstance(reference, Path):
        return list_inputs(tasksets, {}, {**models, "reference": reference}, game=game)
    version = {} if reference is None else {"reference": reference.version}
    return list_inputs(tasksets, version, models, game=game)
