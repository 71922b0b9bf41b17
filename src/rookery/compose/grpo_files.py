"""Everything of a grpo run that is read before a model is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from rookery.compose.grpo_policy import start_folder
from rookery.embedded import EngineConfig
from rookery.embedded.folders import ModelFolder
from rookery.engines import find_model
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.checks import check_splits
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
    start: Path
    """The model that training begins with."""
    init: Adapter | None


def read_files(config: GrpoConfig) -> GrpoFiles:
    tasksets = load_tasksets(config.judged_tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    check_splits(tasksets)
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    start, init = start_folder(config, folder), None
    if config.init_from is not None and config.full is None:
        init = read_adapter(config.init_from)
    return GrpoFiles(tasksets, folder, load_template(folder.path), start, init)


def trainer_place(config: GrpoConfig) -> tuple[str, str]:
    """The device and the type of the trainer's model: those of an engine in this process. Each
    process of torchrun has a GPU of its own."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", "auto"
    if isinstance(config.engine, EngineConfig):
        device = device if config.engine.device == "auto" else config.engine.device
        dtype = config.engine.dtype
    own = os.environ.get("LOCAL_RANK")
    return f"cuda:{own}" if device == "cuda" and own else device, dtype
