"""What the service asks of the engine and the trainer of one base model; it holds no tensors."""

from dataclasses import dataclass

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
