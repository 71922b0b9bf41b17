"""All runs of a folder as rows, read again only where one of their files changed.

folder = RunsFolder(Path("runs"))
folder.refresh(seconds=0.3)      # looks at the files; reads what changed, for so long
folder.changes(since=0)          # {"version": 7, "pending": 0, "runs": [...], "removed": []}
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.errors import RookeryError, RunError
from rookery.runs import Run, RunView, find_runs, is_locked
from rookery.ui.live.curves import spark
from rookery.ui.time_left import PROGRESS

__all__ = ["MALFORMED", "RunsFolder", "describe_run", "malformed"]

WATCHED = (
    "events.db", "events.db-wal", "metrics.jsonl", "report.json", "config.json", PROGRESS,
)  # fmt: skip
MAIN_METRICS = {
    "genome": ("genome/best",),
    "grpo": ("reward/mean",),
    "icm": ("icm/best_utility", "icm/"),
    "evolve": ("evolve/best_score",),
}
ANY_METRIC = ("reward/", "train/loss", "loss/", "")
LOOK_AGAIN_S = 0.3
"""Several pages that ask at once share one look at the files."""
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What reading a file raises that is JSON, but not as a run writes it."""
STATES = {"finished": "done", "running": "running", "failed": "failed", "unreadable": "unreadable"}


class RunsFolder:
    """The rows of the table. Usable from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._mutex = threading.Lock()
        self._paths: dict[str, Path] = {}
        self._seen: dict[str, object] = {}
        """What the files of a run looked like when its row was read."""
        self._rows: dict[str, dict[str, Any]] = {}
        self._removed: dict[str, int] = {}
        self._stale: list[tuple[str, Path, tuple[int, ...]]] = []
        """Runs whose row is to be read, the newest last."""
        self._looked_s = 0.0
        self._version = 0

    def refresh(self, *, seconds: float = math.inf) -> None:
        """Read the rows of runs that changed, the newest first, and stop when the time is over:
        the next call goes on there. Files are looked at once everything is read."""
        with self._mutex:
            if not self._stale and (
                seconds == math.inf or time.monotonic() > self._looked_s + LOOK_AGAIN_S
            ):
                self._look()
            until = time.monotonic() + seconds
            while self._stale:
                name, path, state = self._stale.pop()
                self._version += 1
                row = {**describe_run(path), "id": name, "version": self._version}
                self._rows[name], self._seen[name] = row, state
                if time.monotonic() > until:
                    break

    def _look(self) -> None:
        """Find the runs whose files are not as they were."""
        self._find()
        for name, path in self._paths.items():
            state = _state(path)
            if self._seen.get(name) != state or self._has_died(name, path):
                self._stale.append((name, path, state))
        self._stale.sort(key=lambda one: one[2])
        self._looked_s = time.monotonic()

    def _find(self) -> None:
        paths = {_id(path, self.root): path for path in find_runs(self.root)}
        for name in self._rows.keys() - paths.keys():
            self._version += 1
            self._removed[name] = self._version
            del self._rows[name], self._seen[name]
        self._paths = paths

    def _has_died(self, name: str, path: Path) -> bool:
        """A process that was killed changes no file."""
        row = self._rows.get(name, {})
        return row.get("status") == "running" and not is_locked(path / "run.lock")

    def changes(self, *, since: int = 0) -> dict[str, Any]:
        """The rows that are new after a version, and what is gone."""
        with self._mutex:
            return {
                "folder": str(self.root),
                "version": self._version,
                "pending": len(self._stale),
                "runs": [row for row in self._rows.values() if row["version"] > since],
                "removed": [
                    n for n, v in self._removed.items() if v > since and n not in self._rows
                ],
            }

    def path(self, name: str) -> Path:
        """The folder of a run in the list; no path is made of what was asked."""
        with self._mutex:
            if name not in self._paths:
                self._find()
            if name not in self._paths:
                raise RunError(f"There is no run {name!r} in {self.root}.")
            return self._paths[name]


def describe_run(path: Path) -> dict[str, Any]:
    """One row of the table, also of a run that cannot be read."""
    try:
        with Run.view(path) as run:
            return _describe(run)
    except (RookeryError, OSError, *MALFORMED) as error:
        reason = malformed(path, error) if isinstance(error, MALFORMED) else error
        return {
            "name": path.name,
            "kind": "",
            "status": "unreadable",
            "reason": str(reason),
            "model": "",
            "started_s": 0.0,
            "last_event_s": 0.0,
            "worked_s": 0.0,
            "num_events": 0,
            "progress": None,
            "result": None,
            "spark": [],
            "spark_of": "",
        }


def malformed(path: Path, error: Exception) -> RunError:
    """The error of a run with a file that is not as a run writes it."""
    return RunError(
        f"A file of {path} is not as a run writes it ({type(error).__name__}: {error}): restore "
        "the folder from a copy."
    )


def _describe(run: RunView) -> dict[str, Any]:
    newest = run.last() or run.created
    status, reason = _status(run)
    config = run.config
    metrics = run.path / "metrics.jsonl"
    spark_of, numbers = spark(metrics, (*MAIN_METRICS.get(run.kind, ()), *ANY_METRIC))
    result = _result(run)
    if result is None and numbers and status != "done":
        result = {"label": f"{spark_of} so far", "mean": numbers[-1]}
    return {
        "name": run.name,
        "kind": run.kind,
        "status": status,
        "reason": reason,
        "model": _model(config),
        "started_s": run.created.time_s,
        "last_event_s": newest.time_s,
        "worked_s": run.worked_s,
        "num_events": newest.seq,
        "progress": _progress(run) if status != "done" else None,
        "result": result,
        "spark": numbers,
        "spark_of": spark_of,
    }


def _status(run: RunView) -> tuple[str, str]:
    """done, running, failed, stopped (Ctrl-C), killed, and why."""
    status, ending = run.status, run.ending
    message = str(ending.payload.get("message", "")) if ending is not None else ""
    if status != "interrupted":
        return STATES[status], message
    if ending is not None:
        return "stopped", message.rstrip(": ") or "Stopped before its end."
    return "killed", "Its process ended without a word: killed, or the machine went down."


def _model(config: Mapping[str, Any]) -> str:
    engine, settings = config.get("engine"), config.get("settings")
    if isinstance(engine, Mapping) and engine.get("model"):
        return str(engine["model"])
    llm = settings.get("llm") if isinstance(settings, Mapping) else config.get("llm")
    if isinstance(llm, Mapping):
        models = [m.get("name") for m in llm.get("models") or [] if isinstance(m, Mapping)]
        return ", ".join(str(name) for name in models or [llm.get("primary_model") or ""] if name)
    return str(config.get("model") or "")


def _progress(run: RunView) -> dict[str, Any] | None:
    """How far it is, as its own process told it last."""
    if not (run.path / PROGRESS).is_file():
        return None
    told = run.read_json(PROGRESS)
    done, total, left_s = (told.get(key) for key in ("done", "total", "left_s"))
    if not total:
        return None
    if left_s is not None:
        left_s = max(left_s - max(0.0, time.time() - told["time_s"]), left_s / 2)
    return {"done": min(done, total), "total": total, "noun": told["noun"], "left_s": left_s}


def _result(run: RunView) -> dict[str, Any] | None:
    """The number that the report is about, with its interval."""
    if not (run.path / "report.json").is_file():
        return None
    report = run.read_json("report.json")
    if not isinstance(report, dict):
        return None
    match run.kind:
        case "genome" | "grpo":
            rows = [row for row in report.get("rows", []) if row.get("is_winner")]
            what = "accuracy" if run.kind == "genome" else "mean reward"
            return _estimate(rows[0], f"{what}, {rows[0].get('name', '')}") if rows else None
        case "icm":
            gold = report.get("gold") or {}
            number = {
                k: gold.get(v) for k, v in (("mean", "accuracy"), ("low", "low"), ("high", "high"))
            }
            measured = ", agreement with the true labels" if gold else ""
            return {"label": f"{report.get('verdict', '')}{measured}", **number}
        case "evolve":
            best = report.get("best")
            return {"label": "best score", "mean": best.get("score")} if best else None
        case "eval" | "pipeline":
            models = report.get("models", [])
            best = max(models, key=lambda m: m.get("mean") or -math.inf, default=None)
            return _estimate(best, f"mean reward, {best.get('name', '')}") if best else None
        case "sft":
            return {"label": "loss of the last step", "mean": report.get("last_loss")}
    return None


def _estimate(row: Mapping[str, Any], label: str) -> dict[str, Any]:
    kept = {key: row.get(key) for key in ("mean", "low", "high", "gain")}
    return {"label": label, **kept}


def _state(path: Path) -> tuple[int, ...]:
    """When a file changed last, then all times and sizes; a missing one counts 0."""
    found = []
    for name in WATCHED:
        try:
            stat = os.stat(f"{path}/{name}")
            # A reader leaves an empty log behind: it tells of no change.
            found.append((stat.st_mtime_ns, stat.st_size) if stat.st_size else (0, 0))
        except OSError:
            found.append((0, 0))
    return (max(time_ns for time_ns, _ in found), *(number for pair in found for number in pair))


def _id(path: Path, root: Path) -> str:
    """The name of a run below the folder; of one elsewhere a word that no other has."""
    if path.parent == root:
        return path.name
    return f"{path.name}~{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
