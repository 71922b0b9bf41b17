"""Export one run as a file that opens offline and shows the run's page: its `report.html`.

export_run(Path("runs/demo"), Path("demo.html"))

The file holds the joined modules of the page and, compressed, the responses that the server would
give. Its content security policy allows these scripts by hash, and no requests.

The status page of a service has no script: it reloads every few seconds.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rookery.errors import ConfigError, RookeryError, RunError
from rookery.reports import ServiceStatus
from rookery.runs import find_runs
from rookery.ui.live.folder import MALFORMED, malformed, run_id
from rookery.ui.live.reading import OpenRun
from rookery.ui.summary import parse_report, render_summary
from rookery.ui.wording import count

__all__ = [
    "MODULES",
    "export_run",
    "inline",
    "join_modules",
    "read_file",
    "render_run",
    "render_service_page",
    "to_json",
]


MODULES = (
    "dom", "words", "source", "table", "charts", "report", "lineage", "genome", "grpo", "icm",
    "evolve", "eval", "league", "events", "runs", "compare", "fleet", "run", "app",
)  # fmt: skip
"""Modules in the order of their imports, to join into one."""
UNQUOTED = "!*'()"
"""Characters that `encodeURIComponent` keeps and `quote` does not."""
POINTS = 4_000
MOST_BYTES = 32_000_000
"""Limit on completions, programs and events, in bytes before compression: the file stays small
enough to send and to open at once."""


def export_run(path: Path, out: Path) -> None:
    """Write the page of a run; `out` appears only when complete."""
    path = path.absolute()
    if path not in find_runs(path.parent):
        raise RunError(f"{path} is not a run: give its folder, or its name and the folder of runs.")
    if out.suffix not in {".html", ".htm"}:
        raise ConfigError(f"Got {out}: the file to write ends in .html.")
    try:
        text = render_run(path)
    except MALFORMED as error:
        raise malformed(path, error) from error
    partial = out.with_name(f".{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error


def render_run(path: Path, *, status: str = "") -> str:
    """The file as text. `status` overrides the status of the run: its owner writes the page
    before it records the end."""
    run = OpenRun(path, run_id(path, path.parent))
    saved = gzip.compress(to_json(_saved(run, status)).encode(), 6, mtime=0)
    scripts = [inline(read_file("vendor/echarts.min.js")), inline(join_modules())]
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; img-src data:"
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri \'none\'; '
            "form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(run.name)} · Rookery</title>",
            f"<style>{read_file('page.css')}{read_file('live.css')}</style></head>",
            f'<body class="live"><main id="main">{_without_script(run)}</main>',
            "<footer>Made by Rookery. Charts drawn with Apache ECharts.</footer>",
            f'<script type="text/plain" id="saved">{base64.b64encode(saved).decode()}</script>',
            f"<script>{scripts[0]}</script>",
            f'<script type="module">{scripts[1]}</script>',
            "</body></html>\n",
        ]
    )
    return page.encode(errors="replace").decode()  # a lone surrogate has no UTF-8


def to_json(document: Any) -> str:
    """JSON that browsers can read: lone surrogates are escaped, NaN and infinity become null."""
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_without_nan(document), separators=(",", ":"))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_script(run: OpenRun) -> str:
    """The result in a few lines, shown until the page is drawn or if JavaScript is off."""
    try:
        shown = render_summary(parse_report(run.kind, run.document()))
    except RookeryError:
        shown = ""
    note = '<noscript><p class="empty">Charts and details need JavaScript.</p></noscript>'
    title = f'<header class="masthead"><h1>{html.escape(run.name)}</h1></header>'
    return f'{title}<div class="plain-summary">{shown}</div>{note}'


def join_modules() -> str:
    """Join the modules into one, because a file opened from disk cannot import others."""
    joined = "\n".join(read_file(f"{name}.js") for name in MODULES)
    joined = re.sub(r"^import [^;]*?;\n", "", joined, flags=re.MULTILINE)
    return re.sub(r"^export (?=(async function|function|class|const) )", "", joined, flags=re.M)


def _saved(run: OpenRun, status: str) -> dict[str, Any]:
    base = f"runs/{quote(run.name, safe=UNQUOTED)}"
    view, overview = run.view(), run.overview()
    overview["row"] |= {"path": "", **({"status": status, "progress": None} if status else {})}
    answers: dict[str, Any] = {
        base: overview,
        f"{base}/report": run.report(),
        f"{base}/view": view,
        f"{base}/labels": run.labels(),
        f"{base}/curves": run.curves(points=POINTS),
    }
    lists = view["lists"]
    wanted: set[int] = set()
    if run.kind == "genome":
        duel = answers[f"{base}/duel"] = run.duel("")
        answers[f"{base}/duel?candidate={duel['candidate']}"] = duel
        wanted = {seq for row in duel["tasks"] for seq in (row[2], row[4]) if row[1] != row[3]}
    left = MOST_BYTES
    chosen = answers[f"{base}/report"].get("chosen", {})  # only a sweep has a chosen adapter
    numbers = chosen.get("steps") or [int(row["id"]) for row in lists.get("steps", [])]
    for number in reversed(list(numbers)):
        step = run.step(number)
        size = len(to_json(step))
        if size < left:
            left -= size
            answers[f"{base}/step/{number}"] = step
    for row in lists.get("programs", []):
        program = run.program(row["id"])
        size = len(program["code"]) + sum(map(len, program["diff"]))
        if size < left:
            left -= size
            answers[f"{base}/program/{row['id']}"] = program
    events = sorted(_events(run, wanted, left))
    return {"id": run.name, "answers": answers, "events": events}


def _events(run: OpenRun, wanted: set[int], left: int) -> Iterator[list[Any]]:
    """Yield whole events up to `left` bytes: the wanted ones first, then the rarest kinds."""
    counts = run.overview()["counts"]
    orders: list[tuple[str, set[int]]] = [("", wanted)] if wanted else []
    orders += [(kind, set()) for kind in sorted(counts, key=counts.__getitem__)]
    for kind, only in orders:
        for event in run.all_events(kind):
            if (only and event.seq not in only) or (not only and event.seq in wanted):
                continue
            payload = json.dumps(event.payload, ensure_ascii=False)
            left -= len(payload)
            if left <= 0:
                return
            yield [event.seq, event.kind, event.key, payload, event.time_s]


@cache
def read_file(name: str) -> str:
    """Read a file of the page by name, or of `rookery.ui` by path. Line ends become LF, as in
    browsers; other line ends would change the hashes."""
    path = name if "/" in name else f"live/static/{name}"
    text = files("rookery.ui").joinpath(path).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def inline(script: str) -> str:
    """Escape the texts that would end or alter a script element."""
    return re.sub(r"<(?=/script|!--)", r"<\\", script, flags=re.IGNORECASE)


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


QUEUES = ("Queue", "Requests waiting", "Tokens waiting", "Tokens/s", "Until all are done")
TENANTS = (
    "Tenant", "Requests waiting or running", "Models in training", "Checkpoints", "Trained tokens",
    "Sampled tokens", "Prompt tokens",
)  # fmt: skip


def render_service_page(status: ServiceStatus) -> str:
    queues = [
        (
            queue.name,
            str(queue.num_waiting),
            count(queue.tokens_waiting),
            f"{queue.tokens_per_s:.0f}" if queue.tokens_per_s else "not measured yet",
            f"{queue.wait_s:.0f} s" if queue.wait_s is not None else "not known",
        )
        for queue in status.queues
    ]
    tenants = [
        (
            tenant.name,
            *(str(n) for n in (tenant.num_pending, tenant.num_models, tenant.num_checkpoints)),
            *(count(tenant.tokens.get(kind, 0)) for kind in ("trained", "sampled", "prompt")),
        )
        for tenant in status.tenants
    ]
    facts = {
        "Waiting": str(sum(queue.num_waiting for queue in status.queues)),
        "Tenants": str(len(status.tenants)),
        "Journal since the last snapshot": f"{status.journal_bytes / 1048576:.1f} MiB",
    }
    shown = "".join(f"<div><dt>{term}</dt><dd>{fact}</dd></div>" for term, fact in facts.items())
    nobody = '<p class="empty">Nobody has used it yet.</p>'
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="refresh" content="3">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>Service · Rookery</title><style>{read_file('page.css')}</style></head>",
            '<body><main><header class="masthead"><p class="brand">Rookery <span>service</span>',
            f"</p><h1>{escape(', '.join(status.models))}</h1>",
            f'<dl class="facts">{shown}</dl></header>',
            f"<section><h2>Queues</h2>{_table(QUEUES, queues)}</section>",
            f"<section><h2>Tenants</h2>{_table(TENANTS, tenants) if tenants else nobody}</section>",
            "</main></body></html>\n",
        ]
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
