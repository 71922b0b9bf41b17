"""Everything of a grpo run that is read before a model is loaded."""

from dataclasses import dataclass, field
from pathlib import Path

from rookery.compat.atropos.programs import check_commands
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
    "read_files",
    "read_reference",
    "require_start",
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
            start = require_start(config.init_from)
    if config.full is None:
        where = "lora.rank" if init is None else f"The rank of {config.init_from}"
        require_adapters(config.engine, {where: config.lora.rank if init is None else init.rank})
    if config.atropos is not None:
        check_commands(config.atropos.environments)
    template, reference = load_template(folder.path), read_reference(config)
    has_reference_model = (
        config.needs_reference
        if config.full is not None
        else isinstance(reference, Path) and reference.resolve() != folder.path.resolve()
    )
    place = trainer_place(config.engine)
    return GrpoFiles(tasksets, folder, template, start, init, reference, has_reference_model, place)


def require_start(folder: Path) -> Path:
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


def read_reference(config: GrpoConfig) -> Adapter | Path | None:
    """The adapter, or the model folder."""
    folder = config.reference
    if folder is None or (folder / "config.json").is_file():
        return folder
    return read_adapter(folder)
