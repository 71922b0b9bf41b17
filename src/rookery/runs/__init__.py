"""The run directory: event log, blobs, metrics, lock, resume. Nothing else writes into it.

with Run.create(Path("runs"), kind="genome", name="poet", config=document) as run:
    run.append("evaluation", {"candidate": "c1", "score": 0.5}, key="0/c1")
    run.finish()
list_runs(Path("runs"))
"""

from rookery.runs.blobs import BlobStore, BlobView
from rookery.runs.events import Event, EventLog, EventView, NewEvent
from rookery.runs.lock import Owner, is_locked, read_owner
from rookery.runs.metrics import MetricsRow, read_metrics
from rookery.runs.run import Outcome, Run, RunView, Status
from rookery.runs.summary import (
    RunDetails,
    RunSummary,
    export_events,
    list_runs,
    show,
    summarize,
)

__all__ = [
    "BlobStore",
    "BlobView",
    "Event",
    "EventLog",
    "EventView",
    "MetricsRow",
    "NewEvent",
    "Outcome",
    "Owner",
    "Run",
    "RunDetails",
    "RunSummary",
    "RunView",
    "Status",
    "export_events",
    "is_locked",
    "list_runs",
    "read_metrics",
    "read_owner",
    "show",
    "summarize",
]
