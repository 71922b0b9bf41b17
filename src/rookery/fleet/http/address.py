"""Where a server is, by its URL."""

from ipaddress import ip_address
from urllib.parse import urlsplit

__all__ = ["is_local"]


def is_local(url: str) -> bool:
    """Whether a URL is of this machine, so that the server sees our files."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
