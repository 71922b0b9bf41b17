"""One run as the page requests it: its row, events, curves, programs, answers, documents.

    runs = OpenRuns(RunsFolder(Path("runs")))
    runs.get("demo").events(kind="candidate", offset=0, limit=100)

The most recently requested runs stay open. An open run reads each event once.
"""

import difflib
import json
import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rookery.errors import RookeryError, RunError
from rookery.reports import EvaluationReport, GenomeReport, GrpoReport, IcmReport
from rookery.runs import Event, Run, RunView
from rookery.runs.run_folder import find_sources
from rookery.ui import wording
from rookery.ui.live.digests import DIGESTS, Digest, EvolveDigest, GenomeDigest
from rookery.ui.live.folder import (
    DOCUMENT_BYTES,
    LABELS,
    MALFORMED,
    Curves,
    RunsFolder,
    check_files,
    describe_run,
    run_id,
)
from rookery.ui.loops import SETTING_COLUMNS, setting_rows
from rookery.ui.summary import has_report, parse_report, summarize

__all__ = ["OpenRun", "OpenRuns"]

MOST_OPEN = 8
CHECKPOINTS = "checkpoints"
ADAPTERS = "adapters"
"""Folder of a sweep's runs."""
MOST_EVENTS = 500
LISTED_LABELS = 20_000
LABEL_CHARACTERS = 1 << 20
"""Longest line of labels.jsonl that is read."""
ELSEWHERE: dict[str, set[str]] = {
    "genome": {"lineage", "generations", "population"},
    "grpo": {"steps"},
    "icm": {"items"},
}
"""Parts of each loop's report that the page gets from events, curves and labels instead."""


def _config_of(run: Path) -> Mapping[str, Any]:
    """Config of a run that another run was made from; empty if it cannot be read."""
    with suppress(RookeryError, OSError, *MALFORMED):
        check_files(run)
        with Run.view(run) as view:
            return view.config
    return {}


class OpenRuns:
    """Least-recently-used cache of open runs."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self._mutex = threading.Lock()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()

    def get(self, name: str) -> "OpenRun":
        path = self.folder.path(name)
        check_files(path)
        with self._mutex:
            run = self._open.get(name)
            if run is None or run.is_replaced():
                self._open.pop(name, None)
                run = self._open[name] = self._read(path, name)
            self._open.move_to_end(name)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)  # closed when its last request ends
            return run

    def _read(self, path: Path, name: str) -> "OpenRun":
        try:
            return OpenRun(path, name)
        except FileNotFoundError as error:
            raise _gone(name) from error


class OpenRun:
    """A run open for reading. Thread-safe."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        check_files(path)
        self._inode = (path / "events.db").stat().st_ino
        self._view: RunView = Run.view(path)
        self._mutex = threading.Lock()
        self._curves = Curves(path / "metrics.jsonl")
        self._report: tuple[int, dict[str, Any]] | None = None
        self._chosen: OpenRun | None = None
        """Open run of a sweep's chosen adapter."""
        self._digest: Digest = DIGESTS.get(self._view.kind, Digest)(self._view)

    @property
    def kind(self) -> str:
        return self._view.kind

    def is_replaced(self) -> bool:
        """Whether the run was deleted; another may have its place."""
        try:
            return (self.path / "events.db").stat().st_ino != self._inode
        except OSError:
            return True

    def pulse(self) -> dict[str, Any]:
        """Values that change when the page has something new to read."""
        if self.is_replaced():
            raise _gone(self.name)  # the next request gets the run in its place
        newest = self._view.last()
        metrics = self.path / "metrics.jsonl"
        return {
            "seq": newest.seq if newest else 0,
            "bytes": metrics.stat().st_size if metrics.exists() else 0,
            "status": self._view.status,
            "report": self._written_ns(),
        }

    def overview(self) -> dict[str, Any]:
        """The run's table row, config, sources and numbers of events by kind."""
        return {
            "row": {**describe_run(self.path), "id": self.name, "path": str(self.path)},
            "config": self._view.config,
            "made_from": self._made_from(),
            "counts": self._view.counts(),
            "pulse": self.pulse(),
        }

    def _made_from(self) -> list[dict[str, Any]]:
        """Runs that the config takes inputs from, with their own sources. Each run's sources are
        listed once. A run in the same folder has an `id`."""
        shown = {self.path.resolve()}

        def trace(config: Mapping[str, Any]) -> list[dict[str, Any]]:
            rows = []
            for source in find_sources(config):
                row: dict[str, Any] = {"run": source.run.name, "part": source.part}
                if source.run.parent == self.path.parent:
                    row["id"] = run_id(source.run, self.path.parent)
                if source.run.resolve() not in shown:
                    shown.add(source.run.resolve())
                    row["made_from"] = trace(_config_of(source.run))
                rows.append(row)
            return rows

        return trace(self._view.config)

    def document(self) -> dict[str, Any]:
        """Content of report.json; empty before it exists."""
        if not (self.path / "report.json").is_file():
            return {}
        document = self._view.read_json("report.json")
        return document if isinstance(document, dict) else {}

    def _written_ns(self) -> int:
        files = (self.path / "report.json", self.path / CHECKPOINTS)
        return max(file.stat().st_mtime_ns if file.exists() else 0 for file in files)

    def report(self) -> dict[str, Any]:
        """The report without the parts that the view, the curves and the labels hold."""
        written = self._written_ns()
        with self._mutex:
            if self._report is None or self._report[0] != written:
                document = self.document()
                if not has_report(self.kind, document):
                    return {}
                answer = _report_answer(self.kind, document or self._so_far())
                self._report = (written, answer | {"is_written": bool(document)})
            return self._report[1]

    def _so_far(self) -> dict[str, Any]:
        """The grid of an evolution, from its newest checkpoint."""
        folders = (self.path / CHECKPOINTS).glob("checkpoint_*")
        numbered = [(int(n), f) for f in folders if (n := f.name.rpartition("_")[2]).isdecimal()]
        file = max(numbered)[1] / "metadata.json" if numbered else self.path
        if not file.is_file() or file.stat().st_size > DOCUMENT_BYTES:
            return {}
        self._digest.update()
        programs = self._digest.rows("programs")
        cells = [
            {"island": island, "cell": cell, "program": id, "score": programs[id].get("score")}
            for island, grid in enumerate(json.loads(file.read_bytes())["island_feature_maps"])
            for cell, id in grid.items()
            if id in programs
        ]
        places = [map(int, cell["cell"].split("-")) for cell in cells]
        bins = [1 + max(along) for along in zip(*places, strict=True)]
        database = self._view.config.get("settings", {}).get("database", {})
        return {"cells": cells, "bins": bins} | {
            key: database[key] for key in ("feature_dimensions",) if key in database
        }

    def curves(
        self,
        *,
        points: int,
        first: int = 0,
        last: int | None = None,
        names: Sequence[str] = (),
        after: int = 0,
    ) -> dict[str, Any]:
        with self._mutex:
            self._curves.update()
            return self._curves.document(
                points=points, first=first, last=last, names=names, after=after
            )

    def events(self, *, kind: str, text: str, offset: int, limit: int) -> dict[str, Any]:
        """One page of the event list, with shortened payloads."""
        total, rows = self._view.page(kind, text=text, offset=offset, limit=min(limit, MOST_EVENTS))
        return {"total": total, "rows": rows}

    def all_events(self, kind: str = "") -> Iterator[Event]:
        """Yield whole events in order."""
        return self._view.events(kind or None)

    def event(self, seq: int) -> dict[str, Any]:
        event = next(self._view.events(after=seq - 1), None)
        if event is None or event.seq != seq:
            raise RunError(f"The run {self.name!r} has no event {seq}.")
        return {"seq": seq, "kind": event.kind, "key": event.key, "payload": event.payload}

    def view(
        self, *, after: int = 0, seconds: float = math.inf, most: int | None = None
    ) -> dict[str, Any]:
        """Data for the loop's view that changed after event `after`: as much as can be read in
        `seconds`, and up to about `most` rows."""
        with self._mutex:
            document = self._digest.document(after=after, most=most)
            if document["is_more"]:  # enough for one response without reading
                return document
            is_more = self._digest.update(seconds=seconds)
            if self._digest.seq > document["seq"]:
                document = self._digest.document(after=after, most=most)
            return document | {"is_more": is_more or document["is_more"]}

    def duel(self, candidate: str) -> dict[str, Any]:
        """Compare a candidate of a genome run with the best founder, task by task."""
        with self._mutex:
            self._digest.update()
            if not isinstance(self._digest, GenomeDigest):
                raise RunError(f"The run {self.name!r} has no candidates.")
            return self._digest.duel(candidate)

    def program(self, name: str) -> dict[str, Any]:
        """A program of an evolution with its diff against its parent."""
        with self._mutex:
            self._digest.update()
            digest = self._digest
            if not isinstance(digest, EvolveDigest):
                raise RunError(f"The run {self.name!r} has no programs.")
            document, parent = self._code(digest, name), digest.parent(name)
            before = self._code(digest, parent) if parent else {}
        code = str(document.get("code", ""))
        lines = difflib.unified_diff(
            str(before.get("code", "")).splitlines(), code.splitlines(), parent, name, lineterm=""
        )
        changes = (document.get("metadata") or {}).get("changes", "")
        return {"id": name, "parent": parent, "code": code, "changes": changes, "diff": list(lines)}

    def _code(self, digest: EvolveDigest, name: str) -> dict[str, Any]:
        blob = digest.blobs.get(name, "")
        if not blob:
            return {}
        try:
            document = json.loads(self._view.blobs.read_bytes(blob))
        except (RunError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def step(self, number: int) -> dict[str, Any]:
        """Completions of a training step: all if they are stored, else examples. For a sweep, those
        of the chosen adapter."""
        chosen = self.report().get("chosen") if self.kind == "grpo" else None
        if chosen is not None:
            adapter = self._adapter(chosen["name"])
            if adapter is not None:
                return adapter.step(number)
        batch = self._view.get("batch", str(number))
        payload: Mapping[str, Any] = {} if batch is None else batch.payload
        for digest in (payload[name] for name in ("texts", "digest") if name in payload):
            try:
                data = self._view.blobs.read_bytes(str(digest))
                groups = json.loads(zlib.decompress(data)).get("groups", [])
                shown = [_group(group) for group in groups]
                return {"step": number, "is_whole": True, "groups": shown, "gap": self._gap(number)}
            except (RunError, ValueError, zlib.error, AttributeError, TypeError):
                pass  # written by another version, removed or damaged
        event = self._view.get("step", str(number))
        if event is not None:
            groups = _examples(event.payload.get("examples", []))
        elif chosen is not None and number in chosen["steps"]:
            groups = chosen["steps"][number]
        else:
            raise RunError(f"The run {self.name!r} has no step {number}.")
        return {"step": number, "is_whole": False, "groups": groups, "gap": self._gap(number)}

    def _adapter(self, name: str) -> "OpenRun | None":
        """Run of an adapter of a sweep; None if its folder is gone."""
        path = self.path / ADAPTERS / name
        if name == ".." or Path(name).name != name or not (path / "events.db").is_file():
            return None
        with self._mutex:
            if self._chosen is None or self._chosen.name != name or self._chosen.is_replaced():
                self._chosen = OpenRun(path, name)
            return self._chosen

    def _gap(self, number: int) -> Mapping[str, Any] | None:
        """Token-by-token examples of a step; None if the run has none."""
        event = self._view.get("gap", str(number))
        return event.payload if event is not None else None

    def labels(self) -> dict[str, Any]:
        """Rows of labels.jsonl; empty before the labelling is done."""
        path = self.path / LABELS
        rows: list[Any] = []
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                while len(rows) < LISTED_LABELS and (line := file.readline(LABEL_CHARACTERS)):
                    rows.append(json.loads(line))
        keys = ("id", "label", "margin", "score", "text", "batch", "chain", "iteration")
        return {"labels": [{key: row.get(key) for key in keys} for row in rows]}


def _gone(name: str) -> RunError:
    return RunError(f"The run {name!r} is gone: its folder was deleted or moved.")


def _report_answer(kind: str, document: dict[str, Any]) -> dict[str, Any]:
    """A report without its largest parts, plus compact forms of data that only these hold."""
    report = parse_report(kind, document)
    answer = report.model_dump(mode="json", exclude=ELSEWHERE.get(kind))
    answer["summary"] = asdict(summarize(report))
    if isinstance(report, GenomeReport):
        answer["sources"] = report.sources
        answer["weights"] = {row.id: row.weights for row in report.lineage if row.weights}
    if isinstance(report, GenomeReport | GrpoReport | EvaluationReport):
        answer["sampled"] = _sampled(report)
    if isinstance(report, GrpoReport):
        if report.sweep is not None:
            answer["chosen"] = _chosen(report)
            answer["settings"] = {"columns": SETTING_COLUMNS, "rows": setting_rows(report)}
        examples = [example for step in report.steps for example in step.examples]
        answer["prompts"] = {one.task: [one.prompt, one.reference] for one in examples}
    if isinstance(report, IcmReport):
        for chain in answer["chains"]:
            del chain["steps"]
    return answer


def _sampled(report: GenomeReport | GrpoReport | EvaluationReport) -> dict[str, Any] | None:
    """Table of pass@k and majority as strings; None without several answers per task."""
    rows = report.models if isinstance(report, EvaluationReport) else report.rows
    cells = wording.sampled_rows(rows)
    return {"columns": wording.sampled_columns(rows), "rows": cells} if cells else None


def _chosen(report: GrpoReport) -> dict[str, Any]:
    """Name, curves and steps of a sweep's chosen adapter; the sweep's own events lack them."""
    names = {name for step in report.steps for name in step.metrics}
    curves = {
        name: [(step.step, step.metrics[name]) for step in report.steps if name in step.metrics]
        for name in sorted(names)
    }
    steps = {
        step.step: _examples([one.model_dump() for one in step.examples]) for step in report.steps
    }
    sweep = report.sweep.adapters if report.sweep else ()
    name = next((adapter.name for adapter in sweep if adapter.is_chosen), "")
    return {"name": name, "curves": curves, "steps": steps}


def _examples(examples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    tasks: dict[str, list[dict[str, Any]]] = {}
    for example in examples:
        row = {"text": example.get("text"), "reward": example.get("reward"), "advantage": None}
        tasks.setdefault(str(example.get("task")), []).append(row)
    return [{"task": task, "rollouts": rows} for task, rows in tasks.items()]


def _group(group: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for rollout in group.get("rollouts", []):
        advantages = [a for a in rollout.get("advantages") or [] if isinstance(a, int | float)]
        mean = sum(advantages) / len(advantages) if advantages else None
        row = {"text": rollout.get("text"), "reward": rollout.get("reward"), "advantage": mean}
        rows.append(row)
    return {"task": group.get("task"), "rollouts": rows}
