"""The user interface of runs: the page over all runs, one page per run, tables, progress.

display    progress while something runs               wording    numbers and rows as text
headline   the result of a search in one sentence      loops      the same for other loops
summary    the top of any report, as HTML too          time_left  how long a run still takes
steps      the time left of a run made of several runs
live/      the page: `rookery ui` for all runs, `report.html` for one
vendor/    the chart library, as published

The module is callable: `rookery.ui("runs").url` is the address of the page over a folder of runs.
A module class with `__call__` is the only way to give a package that behaviour.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rookery.ui.live.server import LivePage

__all__: list[str] = []


class _Ui(ModuleType):
    """Makes this module callable."""

    def __call__(
        self,
        runs_dir: str | Path = "runs",
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        key: str = "",
        fleet: Sequence[str] = (),
        service: str = "",
    ) -> "LivePage":
        """Serve the page over a folder of runs from a thread of this process, until `close`."""
        from rookery.ui.live.server import open_page

        return open_page(runs_dir, host=host, port=port, key=key, fleet=fleet, service=service)


sys.modules[__name__].__class__ = _Ui
