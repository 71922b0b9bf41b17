"""Everything of a grpo run that is read before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rookery.compat.atropos.programs import check_commands
from rookery.compose.inputs import IsMade, RunInputs, list_inputs, load_not_made
from rookery.embedded.folders import ModelFolder
from rookery.engines import find_model, require_adapters, trainer_place
from rookery.errors import ConfigError, ModelError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_trainer import check_splits
from rookery.slots.loading import require_decoder
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.types import Adapter
from rookery.weights import read_adapter

__all__ = [
    "GrpoFiles",
    "find_inputs",
    "read_files",
    "read_step_inputs",
]


@dataclass(frozen=True, slots=True)
class GrpoFiles:
    """What the config names."""

    tasksets: list[Taskset]
    folder: ModelFolder
    template: Template
    start: Path
    """The model that training begins with."""
    init: Adapter | None
    reference: Adapter | Path | None
    """What a KL term is to, an adapter or a model folder; None: what training begins with."""
    has_reference_model: bool
    """Whether that is a model in memory besides the one that is trained."""
    place: tuple[str, str]
    """The device and the type of the trainer's model, see `trainer_place`."""
    prompt_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Lengths of the prompts of the splits that were counted."""


def read_files(config: GrpoConfig) -> GrpoFiles:
    tasksets = load_tasksets(config.judged_tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    check_splits(tasksets)
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    require_decoder(folder.path)  # before servers are started on it
    start, init = folder.path, None
    if config.init_from is not None:
        if config.full is None:
            init = read_adapter(config.init_from)
        else:
            start = _require_start(config.init_from)
    if config.full is None:
        where = "lora.rank" if init is None else f"The rank of {config.init_from}"
        require_adapters(config.engine, {where: config.lora.rank if init is None else init.rank})
    if config.atropos is not None:
        check_commands(config.atropos.environments)
    template, reference = load_template(folder.path), _read_reference(config)
    has_reference_model = (
        config.needs_reference
        if config.full is not None
        else isinstance(reference, Path) and reference.resolve() != folder.path.resolve()
    )
    place = trainer_place(config.engine)
    return GrpoFiles(tasksets, folder, template, start, init, reference, has_reference_model, place)


def _require_start(folder: Path) -> Path:
    """The folder of a model whose weights are all trained; an error where it is none."""
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


def read_step_inputs(config: GrpoConfig, is_made: IsMade) -> RunInputs:
    tasksets = load_not_made(config.judged_tasksets, is_made)
    models = {}
    if not is_made("engine", "tokenizer"):
        models["the model"] = find_model(config.engine, tokenizer=config.tokenizer).path
    if config.init_from is not None and not is_made("init_from"):
        if config.full is not None:
            models["init_from"] = _require_start(config.init_from)
        else:
            read_adapter(config.init_from)  # which its run keeps
    reference = None if is_made("reference") else _read_reference(config)
    return _list(config, tasksets, models, reference)


def find_inputs(config: GrpoConfig, files: GrpoFiles) -> RunInputs:
    """Of the tasks and the models. An adapter to begin with is in the run itself."""
    models = {"the model": files.folder.path}
    if files.start != files.folder.path:
        models["init_from"] = files.start
    return _list(config, files.tasksets, models, files.reference)


def _list(
    config: GrpoConfig,
    tasksets: list[Taskset],
    models: Mapping[str, Path],
    reference: Adapter | Path | None,
) -> RunInputs:
    if isinstance(reference, Path):
        return list_inputs(tasksets, {}, {**models, "reference": reference}, game=config.game)
    version = {} if reference is None else {"reference": reference.version}
    return list_inputs(tasksets, version, models, game=config.game)


def _read_reference(config: GrpoConfig) -> Adapter | Path | None:
    """The adapter, or the model folder."""
    folder = config.reference
    if folder is None or (folder / "config.json").is_file():
        return folder
    return read_adapter(folder)
