"""A slotted model whose weights are given: memory that an inference server computes with too."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rookery.errors import ModelError, boundary
from rookery.slots.loading import finish_model, require_config
from rookery.slots.model import SlottedModel

__all__ = ["FindWeights", "attach_model", "read_weights", "weight_shapes"]

FindWeights = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, torch.Tensor]]
"""The weights with these names and shapes, all of them or an error."""


def attach_model(
    folder: Path, find: FindWeights, *, names: frozenset[str] = frozenset()
) -> SlottedModel:
    """The model of a folder over weights that `find` gives; those in the folder are not read.

    Tied weights are asked for once. What a model has besides weights, such as the frequencies of
    its positions, is made by its own code.
    """
    model = _empty_model(folder)
    given = find(_shapes(model))
    _set_weights(model, given)
    device = next(iter(given.values())).device
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return finish_model(model, folder=folder, names=names)


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The weights that `attach_model` asks for."""
    return _shapes(_empty_model(folder))


def read_weights(folder: Path, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights in a model folder, by the same names."""
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _empty_model(folder: Path) -> PreTrainedModel:
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be described"):
        config = AutoConfig.from_pretrained(folder)
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            )
    model.tie_weights()  # making them empty has untied them
    return model


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _set_weights(model: PreTrainedModel, given: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in given.items():
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ModelError(f"No weights were given for {empty[0]}.")
