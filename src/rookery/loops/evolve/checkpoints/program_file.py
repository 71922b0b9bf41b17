"""One program as the document of `programs/<id>.json`, and back."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rookery.loops.evolve.program import ProgramRecord

__all__ = ["ProgramFile", "program_document", "read_artifacts", "split_artifacts"]

_OWN = ("changes", "parent_metrics", "island")
"""Entries of OpenEvolve's `metadata` that are fields of a ProgramRecord."""


class ProgramFile(BaseModel):
    """What is read of the document. Entries of other versions are left out."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Also a file name, so no path."""
    code: str
    changes_description: str | None = None
    language: str | None = None
    parent_id: str | None = None
    generation: int = 0
    timestamp: float = 0.0
    iteration_found: int = 0
    metrics: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    prompts: dict[str, Any] | None = None
    artifacts_json: str | None = None
    artifact_dir: str | None = None
    embedding: tuple[float, ...] | None = None

    def record(self, *, island: int | None, artifacts: Mapping[str, str | bytes]) -> ProgramRecord:
        """The program, on the island that the metadata names or else its own document."""
        own = self.metadata.get("island")
        own_island = own if isinstance(own, int) and not isinstance(own, bool) else None
        parent_metrics = self.metadata.get("parent_metrics")
        return ProgramRecord(
            id=self.id,
            code=self.code,
            language=self.language or "unknown",
            parent_id=self.parent_id,
            generation=self.generation,
            iteration=self.iteration_found,
            timestamp=self.timestamp,
            metrics=self.metrics,
            island=own_island if island is None else island,
            changes=str(self.metadata.get("changes") or ""),
            changes_description=self.changes_description or "",
            parent_metrics=parent_metrics if isinstance(parent_metrics, dict) else {},
            metadata={key: value for key, value in self.metadata.items() if key not in _OWN},
            artifacts=artifacts,
            prompts=self.prompts or {},
            embedding=self.embedding,
        )


def program_document(
    program: ProgramRecord, *, small: Mapping[str, str | bytes], artifact_dir: Path | None
) -> dict[str, Any]:
    """The document. Small artifacts stand in it, large ones in their own folder."""
    own = {
        "changes": program.changes or None,
        "parent_metrics": dict(program.parent_metrics) or None,
        "island": program.island,
    }
    kept = {key: value for key, value in own.items() if value is not None}
    return {
        "id": program.id,
        "code": program.code,
        "changes_description": program.changes_description,
        "language": program.language,
        "parent_id": program.parent_id,
        "generation": program.generation,
        "timestamp": program.timestamp,
        "iteration_found": program.iteration,
        "metrics": dict(program.metrics),
        "complexity": float(len(program.code)),
        "metadata": {**program.metadata, **kept},
        "prompts": dict(program.prompts) or None,
        "artifacts_json": json.dumps(small, default=_encode_bytes) if small else None,
        "artifact_dir": str(artifact_dir) if artifact_dir else None,
        "embedding": list(program.embedding) if program.embedding is not None else None,
    }


def split_artifacts(
    artifacts: Mapping[str, str | bytes], *, max_bytes: int
) -> tuple[dict[str, str | bytes], dict[str, bytes]]:
    """Those that stand in the document, and file name to content of the larger ones."""
    small: dict[str, str | bytes] = {}
    large: dict[str, bytes] = {}
    for name, value in artifacts.items():
        data = value.encode(errors="replace") if isinstance(value, str) else value
        if len(data) <= max_bytes:
            small[name] = value
        else:
            large[_new_file_name(name, large)] = data
    return small, large


def read_artifacts(text: str | None, folder: Path | None) -> dict[str, str | bytes]:
    """The artifacts of a document and of its folder. Files that are no text are bytes."""
    loaded = json.loads(text) if text else {}
    entries = loaded if isinstance(loaded, dict) else {}
    artifacts = {name: _decode(value) for name, value in entries.items()}
    for path in sorted(folder.iterdir()) if folder else ():
        if path.is_file() and not path.is_symlink():
            artifacts[path.name] = _as_text(path.read_bytes())
    return artifacts


def _new_file_name(name: str, taken: Mapping[str, bytes]) -> str:
    file = "".join(char for char in name if char.isalnum() or char in "._-").lstrip(".")
    file = file[:100] or "artifact"
    while file in taken:
        file += "_"
    return file


def _encode_bytes(value: object) -> dict[str, str]:
    assert isinstance(value, bytes)
    return {"__bytes__": base64.b64encode(value).decode()}


def _decode(value: object) -> str | bytes:
    if isinstance(value, dict) and list(value) == ["__bytes__"]:
        return base64.b64decode(value["__bytes__"])
    return value if isinstance(value, str) else json.dumps(value)


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
