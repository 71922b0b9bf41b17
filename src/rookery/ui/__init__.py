"""What a person sees of runs: a page over all of them, one page of each, the rows of a table.

display    progress while something runs               wording  numbers and rows as people read them
headline   the result in one number and one sentence
page       the self-contained HTML page                vendor/  the chart library, as published
grpo, icm, evolve  the same of a training, a labelling, an evolution of programs
live/      `rookery ui`, the page over all runs

The module itself can be called: `rookery.ui("runs").url` is the address of the page over a folder
of runs. Python has no other way for a name that is a package too.
"""

import sys
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
    ) -> "LivePage":
        """Serve the page over a folder of runs, from a thread of this process, until `close`."""
        from rookery.ui.live.server import open_page

        return open_page(runs_dir, host=host, port=port, key=key)


sys.modules[__name__].__class__ = _Ui
