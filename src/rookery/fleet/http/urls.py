"""The addresses of servers, as they are written in a config."""

from collections.abc import Sequence

from rookery.config import check_url

__all__ = ["check_urls"]

_PORTS = {"http": 80, "https": 443}


def check_urls(urls: Sequence[str]) -> None:
    """ValueError unless each is the URL of another server."""
    seen: dict[tuple[str, str, int, str], str] = {}
    for url in urls:
        place = _place(url)
        if place in seen:
            raise ValueError(
                f"urls names one server twice, as {seen[place]} and {url}: write it once; "
                "max_in_flight says how much it gets at a time."
            )
        seen[place] = url


def _place(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path: equal for two spellings of one server."""
    parts = check_url(url, named="urls has")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts.scheme, host, parts.port or _PORTS[parts.scheme], path
