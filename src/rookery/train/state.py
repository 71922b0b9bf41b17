"""A trainer's state as one safetensors file: tensors, and a JSON object in its header.

    write_state(path, tensors={"weights/model.layers.0.mlp.up_proj/a": ...}, document={...})
    tensors, document = read_state(path)

One file, written aside and renamed into place: a reader sees the old state or the new one.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rookery.errors import TrainError, boundary
from rookery.runs.disk import disk_boundary, new_scratch, sync_file, sync_folder
from rookery.types import Json

__all__ = ["read_state", "write_state"]

_HEADER = "rookery_trainer"
"""Metadata key of the JSON object; a file without it is not a trainer's state."""


def write_state(
    path: Path, *, tensors: Mapping[str, torch.Tensor], document: dict[str, Json]
) -> None:
    """Replace `path`, durably. Folders on the way are made."""
    if path.is_dir():
        raise TrainError(f"{path} is a folder; a trainer's state is a file: name one in it.")
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with boundary(TrainError, f"making the folder {path.parent}", foreign=(OSError,)):
        path.parent.mkdir(parents=True, exist_ok=True)
    aside = new_scratch(path.parent)
    foreign = (SafetensorError,)
    with disk_boundary(f"Writing {path}"), boundary(TrainError, f"writing {path}", foreign=foreign):
        try:
            # Straight to the file: as bytes in memory it would be there a second time.
            save_file(plain, aside, metadata={_HEADER: json.dumps(document)})
            sync_file(aside)
            os.replace(aside, path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """What `write_state` wrote, tensors on the CPU; TrainError when it is anything else."""
    if not path.is_file():
        raise TrainError(f"There is no trainer state {path}: give a file that `save` wrote.")
    with (
        boundary(TrainError, f"reading {path}", foreign=(OSError, SafetensorError, ValueError)),
        safe_open(str(path), framework="pt") as file,
    ):
        header = (file.metadata() or {}).get(_HEADER)
        if header is None:
            raise TrainError(
                f"{path} is not a trainer state but another safetensors file; an adapter "
                "folder is a start (init_from), a trainer state is what `save` wrote."
            )
        document: dict[str, Json] = json.loads(header)
        return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118
