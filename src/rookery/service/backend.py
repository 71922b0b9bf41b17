"""What the service asks of the engine and the trainer of one base model; it holds no tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rookery.ports import AdapterFolders, Codec, Engine, Trainees, Trainer

__all__ = ["Backend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One base model: sampling, training, and its tokenizer."""

    engine: Engine
    trainer: Trainer
    trainees: Trainees
    folders: AdapterFolders
    codec: Codec
    tokenizer: str
    """What clients load the tokenizer from: a Hugging Face id or a folder."""
    merge: Callable[[Path, Path], object]
    """(PEFT folder, new folder): writes the base model with the adapter in its weights. Waits for
    the disk."""
