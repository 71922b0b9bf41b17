"""A server's own Prometheus page as one record: its load and its prefix cache."""

import math
import re
from dataclasses import dataclass

__all__ = ["ServerMetrics", "parse_metrics"]

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """Summed over the engines behind one address. What a server does not tell is 0 or None."""

    num_running: int
    num_waiting: int
    cache_usage: float
    """Share of the key-value cache in use, 0 to 1; the fullest engine's."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache since the server started."""
    prefix_hits: int
    generated_tokens: int
    block_tokens: int | None
    has_prefix_cache: bool | None
    started_s: float | None = None
    """When its process was started, in seconds since 1970."""
    is_on_cpu: bool | None = None
    """By a size of the cache that vLLM has on the CPU only; newer ones do not report it."""

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


def parse_metrics(page: str) -> ServerMetrics:
    """Read the lines that matter; unknown ones are skipped."""
    sums: dict[str, float] = {}
    cache_usage = 0.0
    cache: dict[str, str] = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        if match is None or not match["name"].startswith(("vllm:", _STARTED)):
            continue
        name = match["name"].removeprefix("vllm:").removesuffix("_total")
        if name == "cache_config_info":
            cache = dict(_LABEL.findall(match["labels"] or ""))
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        sums[name] = sums.get(name, 0.0) + value
        if name == "kv_cache_usage_perc":
            cache_usage = max(cache_usage, value)
    block = cache.get("block_size", "")
    caching = cache.get("enable_prefix_caching")
    space = cache.get("cpu_kvcache_space_bytes")
    return ServerMetrics(
        num_running=int(sums.get("num_requests_running", 0)),
        num_waiting=int(sums.get("num_requests_waiting", 0)),
        cache_usage=cache_usage,
        prefix_queries=int(sums.get("prefix_cache_queries", 0)),
        prefix_hits=int(sums.get("prefix_cache_hits", 0)),
        generated_tokens=int(sums.get("generation_tokens", 0)),
        block_tokens=int(block) if block.isdigit() else None,
        has_prefix_cache=None if caching is None else caching == "True",
        started_s=sums.get(_STARTED),
        is_on_cpu=None if space is None else space.isdigit() and int(space) > 0,
    )
