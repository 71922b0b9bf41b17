"""evolution_trace: one line per child with its parent, in OpenEvolve's format.

    with TraceWriter(output, config=config.evolution_trace) as trace:
        trace.append(step)

Lines are appended at once. The formats `json` and `hdf5` are made from the lines at the end.
"""

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rookery.errors import ConfigError, RunError
from rookery.loops.evolve.answers import code_diff
from rookery.loops.evolve.config import TraceConfig
from rookery.loops.evolve.outputs import ChildStep
from rookery.loops.evolve.program import Metrics, is_number

__all__ = ["TraceWriter", "trace_entry", "trace_path"]

_MAX_ATTRIBUTE_CHARS = 15_000
"""HDF5 keeps at most 64 KiB in an attribute; a character has up to four bytes."""


def trace_entry(step: ChildStep, *, config: TraceConfig) -> dict[str, Any]:
    """Return the line of a step, without unknown or unrequested fields."""
    parent, child = step.parent, step.child
    entry: dict[str, Any] = {
        "iteration": child.iteration,
        "timestamp": child.timestamp,
        "parent_id": parent.id,
        "child_id": child.id,
        "parent_metrics": dict(parent.metrics),
        "child_metrics": dict(child.metrics),
        "parent_changes_description": parent.changes_description,
        "child_changes_description": child.changes_description,
        "improvement_delta": _improvement(parent.metrics, child.metrics),
        "island_id": child.island,
        "generation": child.generation,
        "artifacts": {name: _text(value) for name, value in child.artifacts.items()} or None,
        "metadata": {"changes": child.changes},
    }
    if config.include_code:
        entry |= {"parent_code": parent.code, "child_code": child.code}
        entry["code_diff"] = code_diff(parent.code, child.code)
    if config.include_prompts and step.prompt:
        entry["prompt"] = {"system": step.prompt.system, "user": step.prompt.user}
        entry["llm_response"] = step.answer
    return {key: value for key, value in entry.items() if value is not None}


def trace_path(output: Path, *, config: TraceConfig) -> Path:
    """Return the path of the final file."""
    path = Path(config.output_path or output / f"evolution_trace.{config.format}")
    is_packed = config.compress and config.format == "jsonl"
    return path.with_suffix(".jsonl.gz") if is_packed and path.suffix != ".gz" else path


class TraceWriter:
    """Appends entries, each child once: after a crash, entries may be appended again."""

    def __init__(self, output: Path, *, config: TraceConfig) -> None:
        if config.format == "hdf5" and importlib.util.find_spec("h5py") is None:
            raise ConfigError(
                "evolution_trace.format is hdf5, which needs h5py: pip install h5py, or write "
                "format: jsonl."
            )
        self.path = trace_path(output, config=config)
        self._config = config
        self._lines = self.path if config.format == "jsonl" else self.path.with_suffix(".jsonl")
        self._buffer: list[str] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._known = self._recover()

    def append(self, step: ChildStep) -> None:
        """Buffer the entry of a step; every `buffer_size` entries are written."""
        if step.child.id in self._known:
            return
        self._known.add(step.child.id)
        self._buffer.append(json.dumps(trace_entry(step, config=self._config)) + "\n")
        if len(self._buffer) >= self._config.buffer_size:
            self.flush()

    def flush(self) -> None:
        if self._buffer:
            with _open(self._lines, "at") as file:
                file.writelines(self._buffer)
            self._buffer.clear()

    def close(self) -> None:
        """Write the buffered entries, and make the file of the format. Idempotent."""
        self.flush()
        match self._config.format:
            case "json":
                self._export_json()
            case "hdf5":
                _export_hdf5(list(self._entries()), self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> set[str]:
        """Return the children in the file, after removing a torn last line."""
        ids: list[str] = []
        torn: int | None = None
        try:
            for number, line in enumerate(self._read_lines(), start=1):
                if torn is not None:
                    raise RunError(f"{self._lines}: line {torn} is damaged: move the file away.")
                child = _child_id(line)
                torn = number if child is None else None
                ids += [child] if child is not None else []
        except EOFError:  # the last gzip member was cut off
            torn = len(ids) + 1
        except (OSError, zlib.error, UnicodeDecodeError) as error:
            raise RunError(f"{self._lines} cannot be read: {error}") from error
        if torn is not None:
            self._keep_lines(len(ids))
        return set(ids)

    def _keep_lines(self, num_lines: int) -> None:
        whole = self._lines.with_name(f".whole.{self._lines.name}")
        with _open(whole, "wt") as file:
            file.writelines(islice(self._read_lines(), num_lines))
        whole.replace(self._lines)

    def _entries(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self._read_lines())

    def _read_lines(self) -> Iterator[str]:
        if self._lines.exists():
            with _open(self._lines, "rt") as file:
                yield from file

    def _export_json(self) -> None:
        traces = list(self._entries())
        metadata = {
            "include_code": self._config.include_code,
            "include_prompts": self._config.include_prompts,
            "include_changes_description": True,
            "total_traces": len(traces),
        }
        document = {"metadata": metadata, "traces": traces}
        self.path.write_text(json.dumps(document, indent=2), encoding="utf-8")


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return path.open(mode, encoding="utf-8")


def _child_id(line: str) -> str | None:
    """Return the child of a line; None if the line was cut off."""
    try:
        return str(json.loads(line)["child_id"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _export_hdf5(entries: Iterable[Mapping[str, Any]], path: Path) -> None:
    import h5py  # an optional extra

    entries = list(entries)
    with h5py.File(path, "w") as file:
        file.create_group("metadata").attrs["total_traces"] = len(entries)
        traces = file.create_group("traces")
        for index, entry in enumerate(entries):
            group = traces.create_group(f"trace_{index:06d}")
            for key, value in entry.items():
                plain = json.dumps(value) if isinstance(value, dict | list) else value
                if isinstance(plain, str) and len(plain) > _MAX_ATTRIBUTE_CHARS:
                    group.create_dataset(key, data=plain)
                else:
                    group.attrs[key] = plain


def _improvement(parent: Metrics, child: Metrics) -> dict[str, float]:
    """Return child minus parent per metric that is a number in both."""
    both = (name for name in child if is_number(child[name]) and is_number(parent.get(name)))
    return {name: child[name] - parent[name] for name in both}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
