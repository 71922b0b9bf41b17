"""Runs of a folder as rows, read again only if one of their files changed.

folder = RunsFolder(Path("runs"))
folder.refresh(seconds=0.3)      # reads changed runs for at most about 0.3 s
folder.changes(since=0)          # {"version": 7, "pending": 0, "runs": [...], "removed": []}

`Curves` reads the metrics of a run as they are written, and thins them without losing extremes.

curves = Curves(run / "metrics.jsonl")
curves.update()
curves.document(points=600)     {"revision": 0, "rows": 99, "curves": {"loss/kl": [[0, 0.1], ..]}}
"""

import hashlib
import json
import math
import os
import stat
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.errors import RookeryError, RunError
from rookery.runs import OPENED, Run, RunView, find_runs, is_locked, read_rows
from rookery.ui.time_left import PROGRESS

__all__ = [
    "DOCUMENT_BYTES",
    "LABELS",
    "MALFORMED",
    "Curves",
    "RunsFolder",
    "check_files",
    "describe_run",
    "malformed",
    "run_id",
    "spark",
    "thin",
]


Point = tuple[int, float | None]
BLOCK_ROWS = 4096
"""Lines read at a time, to bound memory."""
SPARK_LINES = 48
"""Lines of a long file that a sparkline uses."""
LINE_BYTES = 1 << 13
"""Upper bound on the bytes of a line."""
WHOLE_BYTES = 1 << 17
"""Largest file read whole for a sparkline, and longest line read, in bytes."""


class Curves:
    """All metrics of a run, each as an array of steps in order and an array of values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._written: dict[str, array[int]] = {}
        """Which row of the file each was in: curves of one run need not be at the same step."""
        self._num_rows = 0
        self.revision = 0
        """Rises when a step is measured again, as after a resume: drawn curves are then stale."""

    def update(self) -> None:
        """Read the lines written since the last call."""
        if self._path.exists() and self._path.stat().st_size < self._read_bytes:
            self._read_bytes, self._steps, self._values = 0, {}, {}
            self._written, self._num_rows = {}, 0
            self.revision += 1
        is_more = True
        while is_more:
            rows, self._read_bytes = read_rows(
                self._path, after_bytes=self._read_bytes, most=BLOCK_ROWS
            )
            is_more = len(rows) == BLOCK_ROWS
            for row in rows:
                self._num_rows += 1
                for name, value in row.values.items():
                    self._put(name, row.step, value)

    def _put(self, name: str, step: int, value: float) -> None:
        steps = self._steps.setdefault(name, array("q"))
        values = self._values.setdefault(name, array("d"))
        written = self._written.setdefault(name, array("q"))
        if not steps or step > steps[-1]:
            steps.append(step)
            values.append(value)
            written.append(self._num_rows)
            return
        self.revision += 1
        place = bisect_left(steps, step)
        if steps[place] == step:
            values[place] = value
        else:
            steps.insert(place, step)
            values.insert(place, value)
            written.insert(place, written[place])

    def document(
        self,
        *,
        points: int,
        first: int = 0,
        last: int | None = None,
        names: Sequence[str] = (),
        after: int = 0,
    ) -> dict[str, Any]:
        """The curves from step `first` to `last`, each with up to about `points` points. With
        `after`, only values of rows of the file behind that many."""
        chosen = {}
        for name in sorted(names or self._steps):
            steps = self._steps.get(name)
            if steps is None:
                continue
            low = max(bisect_left(steps, first), bisect_right(self._written[name], after))
            high = len(steps) if last is None else bisect_left(steps, last + 1)
            thinned = thin(steps[low:high], self._values[name][low:high], points=points)
            if thinned:
                chosen[name] = thinned
        return {"revision": self.revision, "rows": self._num_rows, "curves": chosen}


def thin(steps: Sequence[int], values: Sequence[float], *, points: int) -> list[Point]:
    """Keep the minimum and maximum of each stretch and both ends; NaN and infinity become None.

    >>> thin(range(6), [0, 9, 1, 1, -5, 2], points=4)
    [(0, 0), (1, 9), (4, -5), (5, 2)]
    """
    if len(steps) <= points:
        return [(s, _finite(v)) for s, v in zip(steps, values, strict=True)]
    num, chosen = max(1, points // 2), {0, len(steps) - 1}
    for bucket in range(num):
        places = range(len(steps) * bucket // num, len(steps) * (bucket + 1) // num)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            chosen |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(places):
            chosen.add(next(p for p in places if not math.isfinite(values[p])))
    return [(steps[place], _finite(values[place])) for place in sorted(chosen)]


def spark(path: Path, prefixes: Sequence[str]) -> tuple[str, list[float]]:
    """Name and a few dozen numbers of the first metric that matches a prefix, in their order. A
    long file is read only at evenly spaced lines."""
    if not path.exists():
        return "", []
    rows = _sampled_rows(path)
    names = {name: None for row in rows for name in row if "/" in name}
    shown = [name for prefix in prefixes for name in names if name.startswith(prefix)]
    name = next(iter(shown), "")
    numbers = [float(row[name]) for row in rows if name in row]
    thinned = thin(range(len(numbers)), numbers, points=SPARK_LINES)
    return name, [value for _, value in thinned if value is not None]


def _sampled_rows(path: Path) -> list[dict[str, Any]]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if size_bytes <= WHOLE_BYTES:
            lines = file.read().split(b"\n")[:-1]
        else:
            lines = []
            for part in range(SPARK_LINES):
                file.seek((size_bytes - LINE_BYTES) * part // (SPARK_LINES - 1))
                if part:
                    file.readline(WHOLE_BYTES)  # skip the rest of a line
                lines.append(file.readline(WHOLE_BYTES))
            lines += file.read().split(b"\n")[-2:-1]  # the newest line
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            continue  # `Curves` reports the damage
    return [row for row in rows if isinstance(row, dict)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


WATCHED = (
    "events.db", "events.db-wal", "metrics.jsonl", "report.json", "config.json", PROGRESS,
)  # fmt: skip
LABELS = "labels.jsonl"
READ = (*WATCHED, LABELS, "events.db-journal")
"""Files of a run that are opened. SQLite reads the journal first, if there is one."""
DOCUMENT_BYTES = 1 << 28
"""Limit on config.json and report.json in bytes; the largest runs stay below it."""
MAIN_METRICS = {
    "genome": ("genome/best",),
    "grpo": ("reward/mean",),
    "icm": ("icm/best_utility", "icm/"),
    "evolve": ("evolve/best_score",),
}
ANY_METRIC = ("reward/", "train/loss", "loss/", "")
METRIC_WORDS = {
    "genome/best": "best score",
    "reward/mean": "mean reward",
    "icm/best_utility": "best utility",
    "evolve/best_score": "best score",
    "train/loss": "loss",
}
LOOK_AGAIN_S = 0.3
"""Seconds between two checks of the files, so that several pages share one."""
LOOK_SHARE = 0.05
"""Largest share of a processor that checking files takes: it sees 1,000 runs every second."""
MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors raised by JSON files that do not have the form that a run writes."""
ROW_CHARACTERS = 1_000
"""Characters kept of a text in a row; an error message is whole in its event."""
STOPPED_BY = ("KeyboardInterrupt", "CancelledError", "SystemExit")
"""Errors that end a run that was stopped without a message of its own."""
STATES = {"finished": "done", "running": "running", "failed": "failed", "unreadable": "unreadable"}


class RunsFolder:
    """Rows of the table of runs. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._reading = threading.Lock()
        """Held while a request reads files."""
        self._mutex = threading.Lock()
        """Held only briefly, so that responses never wait for reading."""
        self._paths: dict[str, Path] = {}
        self._seen: dict[str, object] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._removed: dict[str, int] = {}
        self._stale: list[tuple[str, Path, tuple[int, ...]]] = []
        """Runs whose row must be read, newest last."""
        self._look_again_s = 0.0
        self._first = self._version = time.time_ns() // 1_000_000
        """Above the versions of earlier servers, which open pages may still send."""

    def refresh(self, *, seconds: float = math.inf) -> None:
        """Read the rows of changed runs, newest first, for about `seconds`; the next call goes on.
        Files are checked again once all changed rows are read. While another thread is reading,
        this one waits for it instead, up to `seconds`."""
        until = time.monotonic() + seconds
        if not self._reading.acquire(timeout=-1 if seconds == math.inf else seconds):
            return
        try:
            if not self._stale and (seconds == math.inf or time.monotonic() > self._look_again_s):
                self._look()
            while self._stale:
                name, path, state = self._stale[-1]
                row = describe_run(path)
                with self._mutex:
                    self._version += 1
                    self._rows[name] = {**row, "id": name, "version": self._version}
                    self._seen[name] = state
                    self._stale.pop()
                if time.monotonic() > until:
                    break
        finally:
            self._reading.release()

    def _look(self) -> None:
        begun_s = time.thread_time()
        with self._mutex:
            self._find()
        for name, path in self._paths.items():
            state = _state(path)
            if self._seen.get(name) != state or self._has_died(name, path):
                self._stale.append((name, path, state))
        self._stale.sort(key=lambda one: one[2])
        pause_s = max(LOOK_AGAIN_S, (time.thread_time() - begun_s) / LOOK_SHARE)
        self._look_again_s = time.monotonic() + pause_s

    def _find(self) -> None:
        paths = {run_id(path, self.root): path for path in find_runs(self.root)}
        for name in self._rows.keys() - paths.keys():
            self._version += 1
            self._removed[name] = self._version
            del self._rows[name], self._seen[name]
        self._paths = paths

    def _has_died(self, name: str, path: Path) -> bool:
        """Whether a running run lost its lock: a killed process changes no file."""
        row = self._rows.get(name, {})
        try:
            return row.get("status") == "running" and not is_locked(path / "run.lock")
        except RunError:
            return True  # its new row gives the reason

    def changes(self, *, since: int = 0) -> dict[str, Any]:
        """Rows that changed after a version, and removed runs; all rows if the version comes from
        an earlier server."""
        with self._mutex:
            return {
                "folder": str(self.root),
                "version": self._version,
                "pending": len(self._stale) if self._look_again_s else 1,  # not checked yet
                "is_whole": since < self._first,
                "runs": [row for row in self._rows.values() if row["version"] > since],
                "removed": [
                    n for n, v in self._removed.items() if v > since and n not in self._rows
                ],
            }

    def path(self, name: str) -> Path:
        """Folder of a listed run. The requested name is looked up, never joined into a path."""
        with self._mutex:
            if name not in self._paths:
                self._find()
            if name not in self._paths:
                raise RunError(f"There is no run {name!r} in {self.root}.")
            return self._paths[name]


def describe_run(path: Path) -> dict[str, Any]:
    """One row of the table; an unreadable run gets a row with the reason."""
    try:
        check_files(path)
        with Run.view(path) as run:
            return {name: _cut(value) for name, value in _describe(run).items()}
    except (RookeryError, OSError, *MALFORMED) as error:
        reason = malformed(path, error) if isinstance(error, MALFORMED) else error
        return {
            "name": path.name,
            "kind": "",
            "status": "unreadable",
            "reason": _cut(str(reason)),
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


def _cut(value: Any) -> Any:
    """Shorten the texts of a row's value to ROW_CHARACTERS."""
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    return value[:ROW_CHARACTERS] if isinstance(value, str) else value


def check_files(path: Path) -> None:
    """Raise RunError if a file of the run is a pipe or device (reading may never end), a link
    out of the folder of runs, or a document too large to read whole."""
    for name in READ:
        file = f"{path}/{name}"
        try:
            seen = os.stat(file)
        except OSError:
            continue  # a reader that needs the file reports it
        if not stat.S_ISREG(seen.st_mode):
            raise RunError(f"{file} is not a plain file: restore the folder from a copy.")
        runs = os.path.dirname(os.path.realpath(path))
        if os.path.islink(file) and os.path.commonpath([runs, os.path.realpath(file)]) != runs:
            raise RunError(f"{file} is a link out of {runs}: put the file itself there.")
        if name.endswith(".json") and seen.st_size > DOCUMENT_BYTES:
            raise RunError(
                f"{file} has {seen.st_size >> 20:,} MiB, the page reads up to "
                f"{DOCUMENT_BYTES >> 20}: restore the folder from a copy."
            )


def malformed(path: Path, error: Exception) -> RunError:
    """Make the error for a file that does not have the form that a run writes."""
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
        result = {"label": f"{METRIC_WORDS.get(spark_of, spark_of)} so far", "mean": numbers[-1]}
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
    """Status (done, running, failed, stopped by Ctrl-C, killed or unreadable) and its reason."""
    status, ending = run.status, run.ending
    message = str(ending.payload.get("message", "")) if ending is not None else ""
    if status != "interrupted":
        return STATES[status], message
    if ending is not None:
        has_reason = message and message.partition(":")[0] not in STOPPED_BY
        return "stopped", message if has_reason else "Stopped before its end."
    return "killed", "Its process ended silently: killed, or the machine went down."


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
    if not (run.path / PROGRESS).is_file():
        return None
    written = run.read_json(PROGRESS)
    done, total, left_s = (written.get(key) for key in ("done", "total", "left_s"))
    if not total:
        return None
    opened = run.last(OPENED)
    if opened is not None and opened.time_s > written["time_s"]:
        left_s = None  # predicted by the previous process
    if left_s is not None:
        left_s = max(left_s - max(0.0, time.time() - written["time_s"]), left_s / 2)
    return {"done": min(done, total), "total": total, "noun": written["noun"], "left_s": left_s}


def _result(run: RunView) -> dict[str, Any] | None:
    if not (run.path / "report.json").is_file():
        return None
    report = run.read_json("report.json")
    if not isinstance(report, dict):
        return None
    match run.kind:
        case "icm":
            gold = report.get("gold") or {}
            number = {
                k: gold.get(v) for k, v in (("mean", "accuracy"), ("low", "low"), ("high", "high"))
            }
            measured = "accuracy, " if gold else ""
            return {"label": f"{measured}{report.get('verdict', '')}", **number}
        case "evolve":
            best = report.get("best")
            return {"label": "best score", "mean": best.get("score")} if best else None
        case "league":
            ranked = [row for row in report.get("rows", []) if row.get("mean") is not None]
            return (
                _estimate(ranked[0], f"accuracy, {ranked[0].get('name', '')}") if ranked else None
            )
        case "eval" | "pipeline":
            models = [m for m in report.get("models", []) if m.get("mean") is not None]
            if not models:
                return None
            # The result of a pipeline is its last step, that of an evaluation its best model.
            shown = models[-1] if run.kind == "pipeline" else max(models, key=lambda m: m["mean"])
            return _estimate(shown, f"mean reward, {shown.get('name', '')}")
        case "sft":
            return {"label": "loss of the last step", "mean": report.get("last_loss")}
    rows = [row for row in report.get("rows", []) if row.get("is_winner")]
    what = "accuracy" if run.kind == "genome" else "mean reward"
    return _estimate(rows[0], f"{what}, {rows[0].get('name', '')}") if rows else None


def _estimate(row: Mapping[str, Any], label: str) -> dict[str, Any]:
    kept = {key: row.get(key) for key in ("mean", "low", "high", "gain")}
    return {"label": label, **kept}


def _state(path: Path) -> tuple[int, ...]:
    """Newest modification time, then time and size of each file; 0 for a missing one."""
    stamps = []
    for name in WATCHED:
        try:
            seen = os.stat(f"{path}/{name}")
            # A reader leaves an empty write-ahead log behind, which is no change.
            stamps.append((seen.st_mtime_ns, seen.st_size) if seen.st_size else (0, 0))
        except OSError:
            stamps.append((0, 0))
    return (max(time_ns for time_ns, _ in stamps), *(number for pair in stamps for number in pair))


def run_id(path: Path, root: Path) -> str:
    """Id of a run in addresses: its folder's name. A run that is not directly in `root`, or has a
    name that is not UTF-8, gets a unique suffix."""
    name = path.name.encode(errors="replace").decode()
    if path.parent == root and name == path.name:
        return name
    return f"{name}~{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
