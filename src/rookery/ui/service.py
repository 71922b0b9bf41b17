"""The status page of a service, which loads itself anew every few seconds."""

from rookery.reports import ServiceStatus
from rookery.ui.page import render_template

__all__ = ["render_service_page"]


def render_service_page(status: ServiceStatus) -> str:
    """The page; without scripts."""
    return render_template("service.html.jinja", scripts=(), status=status)
