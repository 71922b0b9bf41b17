"""One run as one file that opens offline, with what the page shows of it.

export_run(Path("runs/demo"), Path("demo.html"))

The file holds the page's own modules, joined, and the answers that its server would give,
compressed. Its policy allows these scripts, by their hash, and no request.
"""

import base64
import gzip
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rookery.errors import ConfigError, RunError
from rookery.runs import find_runs
from rookery.ui.live.folder import RunsFolder
from rookery.ui.live.reading import OpenRun, OpenRuns
from rookery.ui.live.server import read_file

__all__ = ["export_run", "join_modules"]

MODULES = (
    "dom", "words", "source", "table", "charts", "lineage", "genome", "grpo", "icm", "evolve",
    "eval", "events", "runs", "compare", "run", "app",
)  # fmt: skip
"""In the order in which they need one another; joined they are one module."""
POINTS = 4_000
MOST_BYTES = 200_000_000
"""Of events and programs, before they are compressed: what a browser opens without trouble."""


def export_run(path: Path, out: Path) -> None:
    """Write the page of a run; `out` appears when it is whole."""
    path = path.absolute()
    if path not in find_runs(path.parent):
        raise RunError(f"{path} is not a run: give its folder, or its name and the folder of runs.")
    if out.suffix not in {".html", ".htm"}:
        raise ConfigError(f"Got {out}: the file to write ends in .html.")
    run = OpenRuns(RunsFolder(path.parent)).get(path.name)
    text = render(run)
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error


def render(run: OpenRun) -> str:
    """The file as text."""
    saved = gzip.compress(json.dumps(_saved(run), separators=(",", ":")).encode(), 6, mtime=0)
    scripts = [_inline(read_file("vendor/echarts.min.js")), _inline(join_modules())]
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data:"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri \'none\'">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(run.name)} · Rookery</title>",
            f"<style>{read_file('page.css')}{read_file('live/static/live.css')}</style></head>",
            '<body class="live"><main id="main"><p class="empty">Reading …</p></main>',
            f'<script type="text/plain" id="saved">{base64.b64encode(saved).decode()}</script>',
            f"<script>{scripts[0]}</script>",
            f'<script type="module">{scripts[1]}</script>',
            "</body></html>\n",
        ]
    )


def join_modules() -> str:
    """The modules of the page as one, which a file that is opened from disk may hold."""
    texts = [read_file(f"live/static/{name}.js") for name in MODULES]
    joined = "\n".join(texts)
    joined = re.sub(r"^import [^;]*?;\n", "", joined, flags=re.MULTILINE)
    return re.sub(r"^export (?=(async function|function|class|const) )", "", joined, flags=re.M)


def _saved(run: OpenRun) -> dict[str, Any]:
    base = f"runs/{run.name}"
    view = run.view()
    overview = run.overview()
    answers: dict[str, Any] = {
        base: overview,
        f"{base}/report": run.report(),
        f"{base}/view": view,
        f"{base}/labels": run.labels(),
        f"{base}/curves": run.curves(points=POINTS, first=0, last=None, names=[]),
    }
    lists = view["lists"]
    if overview["row"]["kind"] == "genome":
        answers[f"{base}/duel"] = run.duel("")
    for row in lists.get("steps", []):
        answers[f"{base}/step/{row['id']}"] = run.step(int(row["id"]))
    left = MOST_BYTES
    for row in lists.get("programs", []):
        program = run.program(row["id"])
        left -= len(program["code"]) + sum(map(len, program["diff"]))
        if left > 0:
            answers[f"{base}/program/{row['id']}"] = program
    return {"id": run.name, "answers": answers, "events": list(_events(run, left))}


def _events(run: OpenRun, left: int) -> Iterator[list[Any]]:
    """Every event, whole, as long as there is room."""
    for event in run.all_events():
        payload = json.dumps(event.payload, ensure_ascii=False)
        left -= len(payload)
        if left <= 0:
            return
        yield [event.seq, event.kind, event.key, payload, event.time_s]


def _inline(script: str) -> str:
    """The same program without the two texts that end or bend a script element."""
    return re.sub(r"<(?=/script|!--)", r"<\\", script, flags=re.IGNORECASE)


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
