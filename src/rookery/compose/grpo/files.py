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
    start, init = _start_folder(config, folder), None
    if config.init_from is not None and config.full is None:
        init = read_adapter(config.init_from)
    if config.full is None:
        where = "lora.rank" if init is None else f"The rank of {config.init_from}"
        require_adapters(config.engine, {where: config.lora.rank if init is None else init.rank})
    if config.atropos is not None:
        check_commands(config.atropos.environments)
    template = load_template(folder.path)
    reference: Adapter | Path | None = config.reference
    if config.reference is not None and not (config.reference / "config.json").is_file():
        reference = read_adapter(config.reference)
    has_reference_model = (
        config.needs_reference
        if config.full is not None
        else isinstance(reference, Path) and reference.resolve() != folder.path.resolve()
    )
    place = trainer_place(config.engine)
    return GrpoFiles(tasksets, folder, template, start, init, reference, has_reference_model, place)


def _start_folder(config: GrpoConfig, folder: ModelFolder) -> Path:
    """Where the weights that training begins with are: a model's folder."""
    if config.full is None or config.init_from is None:
        return folder.path
    if (config.init_from / "adapter_config.json").is_file():
        raise ConfigError(
            f"init_from is {config.init_from}, an adapter, and full trains all weights of a model: "
            "give a model folder, or write full: false."
        )
    if not (config.init_from / "config.json").is_file():
        raise ModelError(
            f"init_from is {config.init_from}, which is not a model folder: it has no config.json. "
            "Give a folder written by save_pretrained, such as `trained` of another run."
        )
    return config.init_from.resolve()
