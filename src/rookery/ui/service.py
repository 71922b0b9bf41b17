"""The status page of a service, which loads itself anew every few seconds. It has no script."""

from collections.abc import Sequence
from html import escape

from rookery.reports import ServiceStatus
from rookery.ui.live.export import read_file
from rookery.ui.wording import count

__all__ = ["render_service_page"]

QUEUES = ("Queue", "Requests waiting", "Tokens waiting", "Tokens/s", "Until all are done")
TENANTS = (
    "Tenant", "Requests waiting or running", "Models in training", "Checkpoints", "Trained tokens",
    "Sampled tokens", "Prompt tokens",
)  # fmt: skip


def render_service_page(status: ServiceStatus) -> str:
    """Queues and tenants as they are now."""
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
