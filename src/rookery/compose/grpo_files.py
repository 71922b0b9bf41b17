"""Everything of a grpo run that is read before a model is loaded."""

from dataclasses import dataclass

import torch

from rookery.embedded import EngineConfig
from rookery.embedded.folders import ModelFolder
from rookery.engines import find_model
from rookery.loops.grpo import GrpoConfig
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.types import Adapter
from rookery.weights import read_adapter

__all__ = ["GrpoFiles", "read_files", "trainer_place"]


@dataclass(frozen=True, slots=True)
class GrpoFiles:
    """What the config names."""

    tasksets: list[Taskset]
    folder: ModelFolder
    template: Template
    init: Adapter | None


def read_files(config: GrpoConfig) -> GrpoFiles:
    tasksets = load_tasksets(config.tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    init = None if config.init_from is None else read_adapter(config.init_from)
    return GrpoFiles(tasksets, folder, load_template(folder.path), init)


def trainer_place(config: GrpoConfig) -> tuple[str, str]:
    """The device and the type of the trainer's model: those of an engine in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(config.engine, EngineConfig):
        return device, "auto"
    return device if config.engine.device == "auto" else config.engine.device, config.engine.dtype
