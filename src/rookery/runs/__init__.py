"""The run directory: event log, journal, blobs, metrics, lock, resume; its only writer.

with Run.create(Path("runs"), kind="genome", name="poet", config=document) as run:
    await run.append("evaluation", {"candidate": "c1", "score": 0.5}, key="0/c1")
    run.finish()
list_runs(Path("runs"))
"""

from rookery.runs.blobs import BlobStore, BlobView
from rookery.runs.disk import LockOwner, is_locked, read_owner
from rookery.runs.event_log import FORMER, Event, EventLog, EventView, NewEvent
from rookery.runs.journal import Entry, Journal
from rookery.runs.metrics import MetricsRow, read_metrics, read_rows
from rookery.runs.run import EXTENDED, FINISHED, OPENED, SET_ASIDE, Outcome, Run, RunView, Status
from rookery.runs.summary import (
    Attempt,
    AttemptLog,
    AttemptState,
    RunDetails,
    RunSummary,
    export_events,
    find_runs,
    list_runs,
    read_attempts,
    show,
    summarize,
)

__all__ = [
    "EXTENDED",
    "FINISHED",
    "FORMER",
    "OPENED",
    "SET_ASIDE",
    "Attempt",
    "AttemptLog",
    "AttemptState",
    "BlobStore",
    "BlobView",
    "Entry",
    "Event",
    "EventLog",
    "EventView",
    "Journal",
    "LockOwner",
    "MetricsRow",
    "NewEvent",
    "Outcome",
    "Run",
    "RunDetails",
    "RunSummary",
    "RunView",
    "Status",
    "export_events",
    "find_runs",
    "is_locked",
    "list_runs",
    "read_attempts",
    "read_metrics",
    "read_owner",
    "read_rows",
    "show",
    "summarize",
]
