"""What the KL term of a grpo run is to, made as the config says.

| `reference` | an adapter is trained | all weights are trained |
|---|---|---|
| none | the start | another copy of the start |
| the engine's model | the model without an adapter | another copy of it |
| another model | a copy of that model | a copy of that model |
| an adapter | the adapter | another copy of the engine's model, with the adapter |
"""

from pathlib import Path

from rookery.compose.grpo_files import GrpoFiles
from rookery.errors import ModelError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import REFERENCE
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, initial_adapter
from rookery.types import Adapter

__all__ = ["has_reference_model", "make_reference", "needs_reference"]


def needs_reference(config: GrpoConfig) -> bool:
    return "reference_logprobs" in config.loss.needs


def has_reference_model(config: GrpoConfig, files: GrpoFiles) -> bool:
    """Whether the reference is a model in memory besides the one that is trained."""
    if config.full is not None:
        return needs_reference(config)
    return isinstance(files.reference, Path) and not _is_base(files.reference, files)


def make_reference(
    config: GrpoConfig, files: GrpoFiles, model: SlottedModel
) -> Adapter | LoraTrainer | None:
    """An adapter of `model`, which is trained, or the trainee REFERENCE over another model. None:
    the loss needs none, or it is the adapter that training begins with. Loads a model: slow."""
    if not has_reference_model(config, files):
        return _adapter(files, model)
    given = files.reference
    folder = files.start if given is None else files.folder.path
    other = _load(given if isinstance(given, Path) else folder, like=model)
    trainer = LoraTrainer(other, config=config.trainer)
    trainer.add(REFERENCE, given if isinstance(given, Adapter) else _unchanged(other))
    return trainer


def _adapter(files: GrpoFiles, model: SlottedModel) -> Adapter | None:
    if isinstance(files.reference, Path):
        return _unchanged(model)
    if files.reference is not None:
        model.bank.check(files.reference, max_rank=max(files.reference.rank, 1))
    return files.reference


def _load(folder: Path, *, like: SlottedModel) -> SlottedModel:
    dtype = str(like.dtype).removeprefix("torch.")
    model = load_model(folder, device=like.device.type, dtype=dtype)
    if model.shape.vocab_size != like.shape.vocab_size:
        raise ModelError(
            f"reference is {folder}, with a vocabulary of {model.shape.vocab_size} tokens, and the "
            f"model that is trained has {like.shape.vocab_size}: take a model with the same "
            "tokenizer."
        )
    return model


def _unchanged(model: SlottedModel) -> Adapter:
    """An adapter that changes no bit of the model, and takes no memory for masters."""
    lora = LoraConfig(rank=1, targets=(next(iter(model.linears)),))
    return initial_adapter(model, lora, name=REFERENCE, base="", seed=0)


def _is_base(folder: Path, files: GrpoFiles) -> bool:
    return folder.resolve() == files.folder.path.resolve()
