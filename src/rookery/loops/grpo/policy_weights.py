"""The weights that a run trains, an adapter or a whole model, as the loop sees them.

    weights.trainer             # its trainee POLICY is trained and published to the engine
    await weights.write(folder) # as other programs load them
    await weights.measure({"trained": saved, "base model": None}, evaluate)

| | adapter_policy.py | full_policy.py |
|---|---|---|
| trains | a LoRA adapter | the model's own weights |
| publishes | beside the base model | in place of the base model |
| `folder_name` | `adapter_step`, for PEFT and vLLM | `step`, for transformers and vLLM |
| measures | all at the same time | one after another |
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rookery.errors import RunError
from rookery.ports import Trainer
from rookery.types import ModelRef

__all__ = ["POLICY", "REFERENCE", "Evaluate", "PolicyWeights", "SavedWeights"]

POLICY = "policy"
"""The trainee, and the name that its versions are served by."""
REFERENCE = "reference"
"""The trainee that stays as the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights on disk."""

    folder: Path
    version: str
    """Content hash of what was written there."""

    def require(self, version: str) -> None:
        """RunError unless this is what the folder holds now."""
        if version != self.version:
            raise RunError(
                f"{self.folder} does not hold the weights that the run has recorded for it: "
                "restore it from a copy."
            )


Evaluate = Callable[[Mapping[str, ModelRef]], Awaitable[None]]
"""Measures models that the engine serves while it runs, by their names in the report."""


class PolicyWeights(Protocol):
    """What differs between training an adapter and training a model."""

    @property
    def trainer(self) -> Trainer:
        """Of the trainee POLICY."""
        ...

    @property
    def reference(self) -> Trainer:
        """Of the trainee REFERENCE; only used when the loss needs one."""
        ...

    @property
    def folder_name(self) -> str:
        """What checkpoints are named, before the step."""
        ...

    @property
    def start(self) -> Path | None:
        """The folder the run begins from; None: the run keeps the start in its own folder."""
        ...

    async def version(self) -> str:
        """Content hash of the policy as it is now."""
        ...

    async def write(self, folder: Path) -> None:
        """The policy as it is now, as a new folder that other programs load."""
        ...

    async def measure(self, saved: Mapping[str, SavedWeights | None], evaluate: Evaluate) -> None:
        """Serve each, None for the base model, while `evaluate` runs: for all or for some at a
        time. Ends the training: a policy that shares its memory with the engine is overwritten."""
        ...
