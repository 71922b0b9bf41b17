"""A run to look at: its events, blobs, metrics, documents and status.

    with Run.view(Path("runs/poet")) as run:
        run.status, run.last("evaluation"), run.config

Needs no lock and changes nothing; the owner may be writing meanwhile.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rookery.errors import RunError
from rookery.runs.blobs import BlobView
from rookery.runs.disk import decode, disk_boundary
from rookery.runs.event_log import Event, EventView
from rookery.runs.lock import is_locked, require_free
from rookery.runs.metrics import MetricsRow, read_metrics
from rookery.runs.run_folder import CONFIG, LOCK, METRICS, check_name

__all__ = ["CREATED", "FINISHED", "OPENED", "Outcome", "RunView", "Status"]

Outcome = Literal["finished", "failed", "interrupted"]
Status = Literal["running", "finished", "failed", "interrupted"]
CREATED, OPENED, FINISHED = "run/created", "run/opened", "run/finished"


class RunView:
    """A run to look at. Needs no lock and changes nothing; the owner may be writing meanwhile."""

    def __init__(self, path: Path, log: EventView, blobs: BlobView) -> None:
        self.path = path
        self.blobs = blobs
        self._log = log
        created = log.get(CREATED, CREATED)
        if created is None:
            raise RunError(f"{path} was stopped before it began: create it again under its name.")
        self.created: Event = created

    @property
    def kind(self) -> str:
        """What it executes: "genome", "grpo", "icm", "evolve", "eval", ..."""
        return str(self.created.payload["kind"])

    @property
    def name(self) -> str:
        return str(self.created.payload["name"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config it was created with, and with what `extend` changed."""
        document = self.read_json(CONFIG)
        if not isinstance(document, dict):
            raise RunError(f"{self.path / CONFIG} is damaged: it holds no JSON object.")
        return document

    @property
    def status(self) -> Status:
        """How the last owner ended; while it did not say: running if it lives, else interrupted."""
        lock = self.path / LOCK
        had_owner = is_locked(lock)  # asked before too: it may finish and leave meanwhile
        ending = self.ending
        if ending is not None:
            outcome: Outcome = ending.payload["outcome"]
            return outcome
        return "running" if had_owner or is_locked(lock) else "interrupted"

    def require_free(self) -> None:
        """Raise the RunError that `Run.open` would, when a process owns the run."""
        require_free(self.path / LOCK)

    @property
    def ending(self) -> Event | None:
        """What `finish` stored, {"outcome", "message"}; None when it was opened again since."""
        finished, opened = self.last(FINISHED), self.last(OPENED)
        if finished is None or (opened is not None and opened.seq > finished.seq):
            return None
        return finished

    def events(self, kind: str | None = None, *, after: int = 0) -> Iterator[Event]:
        """Events in order of `seq`, of one kind or all, beginning behind seq `after`."""
        return self._log.events(kind, after=after)

    def last(self, kind: str | None = None) -> Event | None:
        """The newest event, of one kind or of all."""
        return self._log.last(kind)

    def get(self, kind: str, key: str) -> Event | None:
        """The event that was appended under a key."""
        return self._log.get(kind, key)

    def page(
        self, kind: str = "", *, text: str = "", offset: int = 0, limit: int = 100
    ) -> tuple[int, list[tuple[int, str, str, str, float]]]:
        """Some rows of a long list of events, see `EventView.page`."""
        return self._log.page(kind, text=text, offset=offset, limit=limit)

    def counts(self) -> dict[str, int]:
        """How many events there are of each kind."""
        return self._log.counts()

    @property
    def worked_s(self) -> float:
        """Seconds from each opening of the run to the last event before the next one."""
        openings = [self.created, *self.events(OPENED)]
        newest = self.last() or self.created
        ends = [self._log.time_s(opening.seq - 1) for opening in openings[1:]] + [newest.time_s]
        spans = zip(openings, ends, strict=True)
        return sum(max(0.0, end - opening.time_s) for opening, end in spans)

    def metrics(self) -> list[MetricsRow]:
        """What `log_metrics` wrote, one row per step."""
        return read_metrics(self.path / METRICS)

    def read_json(self, name: str) -> Any:
        """A document that `write_json` wrote."""
        check_name(name, what="file name")
        path = self.path / name
        with disk_boundary(f"Reading {path}"):
            return decode(path.read_bytes(), what=str(path))

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
