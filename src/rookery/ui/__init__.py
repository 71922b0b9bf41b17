"""What a person sees of runs: a page over all of them, one page of each, the rows of a table.

display    progress while something runs               wording  numbers and rows as people read them
headline   the result of a search in one sentence      loops    the same of other loops
summary    the top of any report, as HTML too          time_left  how long a run still takes
steps      the same of a run of several runs
live/      the page: `rookery ui` over all runs, `report.html` of one
vendor/    the chart library, as published

The module itself can be called: `rookery.ui("runs").url` is the address of the page over a folder
of runs. Python has no other way for a name that is a package too.
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
    """This module, which can be called."""

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
        """Serve the page over a folder of runs, from a thread of this process, until `close`."""
        from rookery.ui.live.server import open_page

        return open_page(runs_dir, host=host, port=port, key=key, fleet=fleet, service=service)


sys.modules[__name__].__class__ = _Ui
