"""Finds out what a server can do, by asking it.

    capabilities = await probe(client)

`/openapi.json` names its routes and fields, `/v1/models` its model, `/metrics` its cache,
`/server_info` (servers in development mode) its sizes. Two requests of one token show how it
reports tokens and log-probabilities. Version numbers decide nothing; the build at the end of some
version strings (`0.11.0+cpu`, `0.11.0+cu129`) gives the device.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from statistics import fmean, median
from typing import Any

from rookery.errors import FleetError, boundary
from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.client import Client, ServerLost, ServerRefusal
from rookery.fleet.http.wire import (
    Choice,
    Fields,
    encode_body,
    read_choices,
    read_completion,
    read_reading,
)
from rookery.types import ModelRef, TokenIds

__all__ = [
    "UNREADABLE",
    "Fingerprint",
    "ServerMetrics",
    "gap_between",
    "is_far",
    "is_other",
    "parse_metrics",
    "probe",
    "read_again",
    "read_base",
    "read_fingerprint",
    "read_metrics",
]

# A server's Prometheus page as one record: its load and its prefix cache.


_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """Metrics summed over the engines behind one address; 0 or None if unreported."""

    num_running: int
    num_waiting: int
    cache_usage: float
    """Share of the key-value cache in use, 0 to 1, of the fullest engine."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache since the server started."""
    prefix_hits: int
    block_tokens: int | None
    has_prefix_cache: bool | None
    started_s: float | None = None
    """Start time of its process, in seconds since 1970."""
    is_on_cpu: bool | None = None
    """Known from a cache size that vLLM has only on the CPU; newer versions do not report it."""

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


def parse_metrics(page: str) -> ServerMetrics:
    """Parse the lines of known metrics and skip the others."""
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
        block_tokens=int(block) if block.isdigit() else None,
        has_prefix_cache=None if caching is None else caching == "True",
        started_s=sums.get(_STARTED),
        is_on_cpu=None if space is None else space.isdigit() and int(space) > 0,
    )


UNREADABLE = (AttributeError, TypeError, ValueError, LookupError)
"""Errors raised by reading an answer of an unexpected shape."""
DEFAULT_MAX_LOGPROBS = 20
"""vLLM's default of --max-logprobs, for servers that do not report theirs."""
DEFAULT_BLOCK_TOKENS = 16
"""vLLM's block size on GPUs, for servers that do not report theirs."""
_PROMPT = (1, 2, 3)
_PROBE_LABEL = 7
"""Token that every vocabulary has, like those of `_PROMPT`."""
_HOT = 2.0
"""Highest temperature that vLLM accepts."""
_FLATTENED = 0.2
"""Raw log-probabilities do not depend on the temperature. Processed ones move by more than this at
temperature 2; half-precision rounding moves them by less."""
_INFO = "/server_info"
_BUILDS = ("cpu", "cu", "rocm", "xpu")
"""How the local part of a version names the platform that vLLM was built for."""
_READ_PROMPTS = tuple(_PROMPT * times for times in range(1, 5))
_NUM_READ = 32
"""Tokens drawn after each of these prompts, in one batch, and then read as prompts."""
_FAR_NATS = 0.5
"""Limit on the gap between drawn and read log-probabilities. Rounding in bfloat16 stays below 0.1,
wrongly computed prompts exceed 1."""
_TEXTS = ("The capital of France is", "def fibonacci(n):", "Es war einmal ein", "2 + 3 * 4 =")
"""Texts of a fingerprint: half precision rounds texts that models know only little."""
_NUM_TOP = 5
_OTHER_NATS = 0.25
"""Limit on the gap between fingerprints. In half precision, a model's median gap stays below it,
also after a restart with other flags; two models share under half of the likeliest tokens."""
_OTHER_FLOAT32_NATS = 1e-3


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Likeliest tokens and log-probabilities of a server's base model after fixed texts. Equal
    weights give close fingerprints."""

    rows: tuple[Mapping[str, float], ...]
    system: str | None
    """`system_fingerprint` of its answers, which names its config; None if unreported."""


async def probe(client: Client, *, has_info: bool = True) -> Capabilities:
    """Probe a server; FleetError if it is not a completions server.

    `has_info` reads `/server_info`, which takes seconds; our own servers report its sizes sooner.
    """
    with boundary(FleetError, f"{client.url} answers as no vLLM server does", foreign=UNREADABLE):
        return await _probe(client, has_info=has_info)


async def _probe(client: Client, *, has_info: bool) -> Capabilities:
    models, openapi, version, metrics = await asyncio.gather(
        client.get("/v1/models"),
        _get(client, "/openapi.json"),
        _get(client, "/version"),
        read_metrics(client),
    )
    base = _base_model(models, client.url)
    routes = frozenset(_dig(openapi, "paths"))
    fields = set(_dig(openapi, "components", "schemas", "CompletionRequest", "properties"))
    has_labels = "logprob_token_ids" in fields
    mild = await _one_token(client, base["id"], temperature=1.0, has_labels=has_labels)
    hot = await _one_token(client, base["id"], temperature=_HOT, has_labels=has_labels)
    has_info = has_info and _INFO in routes
    info = await _get(client, f"{_INFO}?config_format=json") if has_info else None
    config = _dig(info, "vllm_config")
    lora, model = _dig(config, "lora_config"), _dig(config, "model_config")
    release = str(_dig(version).get("version", "unknown"))
    is_on_cpu = _is_on_cpu(_dig(config, "device_config").get("device"), release, metrics)
    return Capabilities(
        model=base["id"],
        root=str(base.get("root") or base["id"]),
        version=release,
        max_model_len=_whole(base.get("max_model_len")),
        max_num_seqs=_whole(_dig(config, "scheduler_config").get("max_num_seqs")),
        max_logprobs=_whole(model.get("max_logprobs")) or DEFAULT_MAX_LOGPROBS,
        has_token_ids=bool(mild) and all(token.startswith("token_id:") for token in mild),
        has_label_logprobs=has_labels and f"token_id:{_PROBE_LABEL}" in mild,
        has_prompt_logprobs="prompt_logprobs" in fields and not (lora and is_on_cpu),
        has_json_schemas="structured_outputs" in fields,
        has_processed_logprobs=_is_processed(mild, hot),
        has_prefix_cache=bool(metrics and metrics.has_prefix_cache),
        block_tokens=(metrics and metrics.block_tokens) or DEFAULT_BLOCK_TOKENS,
        routes=routes,
        max_loras=_whole(lora.get("max_loras")),
        max_cpu_loras=_whole(lora.get("max_cpu_loras")),
        max_lora_rank=_whole(lora.get("max_lora_rank")),
        lora_dtype=_text(lora.get("lora_dtype")),
        is_on_cpu=is_on_cpu,
        dtype=_text(model.get("dtype")),
    )


async def read_again(client: Client, server: Capabilities) -> float:
    """Return the mean gap, in nats, between log-probabilities of tokens drawn one by one and of the
    same tokens read in prompts, over several sequences."""
    room = (server.max_model_len or inf) - len(_READ_PROMPTS[-1]) - 1
    num_new = int(max(1, min(_NUM_READ, room)))
    draw = Fields(max_tokens=num_new, temperature=1.0, seed=0, ignore_eos=True)
    answers = await _ask(client, server, draw, _READ_PROMPTS)
    base = ModelRef(name="base", version="")
    try:
        drawn = [read_completion(answer, model=base, num_top=0) for answer in answers]
    except FleetError:  # a log-probability is NaN
        return inf
    texts = [(*prompt, *new.tokens) for prompt, new in zip(_READ_PROMPTS, drawn, strict=True)]
    answers = await _ask(client, server, Fields(prompt_top=0), texts)
    read = [
        read_reading(answer).prompt[len(prompt) :]
        for prompt, answer in zip(_READ_PROMPTS, answers, strict=True)
    ]
    if any(len(rows) != len(new.tokens) for rows, new in zip(read, drawn, strict=True)):
        return inf
    return fmean(
        abs((row or {}).get(token, inf) - logprob)
        for rows, new in zip(read, drawn, strict=True)
        for row, token, logprob in zip(rows, new.tokens, new.logprobs, strict=True)
    )


def is_far(apart: float) -> bool:
    """True if the gap exceeds rounding error or is NaN."""
    return not apart <= _FAR_NATS


async def _ask(
    client: Client, server: Capabilities, fields: Fields, prompts: Sequence[TokenIds]
) -> list[Choice]:
    answer = await client.complete(encode_body(server.model, fields, prompts))
    return [choice for [choice] in read_choices(answer, num_prompts=len(prompts), n=1)]


async def read_base(client: Client) -> tuple[str, str]:
    """Return the server's name of its base model, and what it was loaded from."""
    with boundary(FleetError, f"{client.url} answers as no vLLM server does", foreign=UNREADABLE):
        base = _base_model(await client.get("/v1/models"), client.url)
        return base["id"], str(base.get("root") or base["id"])


async def read_fingerprint(client: Client, server: Capabilities) -> Fingerprint:
    """Ask one token after each text; ask for less if the server refuses that."""
    for prompts in (_TEXTS, _READ_PROMPTS):  # it may have no tokenizer, or a shorter context
        for num_top in (server.max_logprobs, _NUM_TOP):  # it may report fewer
            with suppress(ServerRefusal):
                return await _read_rows(client, server, prompts, num_top)
    return await _read_rows(client, server, [_PROMPT], 1)


async def _read_rows(
    client: Client, server: Capabilities, prompts: Sequence[str | TokenIds], num_top: int
) -> Fingerprint:
    answer = await _ask_likeliest(client, server, prompts, num_top)
    with boundary(FleetError, f"{client.url} answers as no vLLM server does", foreign=UNREADABLE):
        rows = [dict(choice["logprobs"]["top_logprobs"][0]) for choice in answer["choices"]]
        system = answer.get("system_fingerprint")
    return Fingerprint(tuple(rows), system if isinstance(system, str) else None)


def gap_between(read: Fingerprint, expected: Fingerprint) -> float:
    """Return the median gap of the likeliest tokens, in nats; inf if half of them differ."""
    gaps = [
        abs(new.get(token, -inf) - old[token])
        for new, old in zip(read.rows, expected.rows, strict=False)
        for token in sorted(old, key=lambda token: -old[token])[:_NUM_TOP]
    ]
    return median(gaps) if len(read.rows) == len(expected.rows) and gaps else inf


def is_other(gap: float, server: Capabilities) -> bool:
    """True if the gap exceeds rounding error or is NaN."""
    return not gap <= (_OTHER_FLOAT32_NATS if server.is_float32 else _OTHER_NATS)


async def _ask_likeliest(
    client: Client, server: Capabilities, prompts: Sequence[str | TokenIds], num_top: int
) -> Any:
    body = {
        "model": server.model,
        "prompt": prompts,
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": 1,
        "logprobs": num_top,
        "return_tokens_as_token_ids": True,
    }
    return await client.complete(json.dumps(body).encode())


async def read_metrics(client: Client) -> ServerMetrics | None:
    """Return the server's metrics; None if it has no such page."""
    page = await _get(client, "/metrics")
    return parse_metrics(page) if isinstance(page, str) else None


async def _get(client: Client, path: str) -> Any:
    """Return the answer of a route; None if the server does not have it."""
    try:
        return await client.get(path)
    except ServerRefusal:
        return None
    except ServerLost as loss:
        if loss.is_broken:
            raise
        return None


async def _one_token(
    client: Client, model: str, *, temperature: float, has_labels: bool
) -> dict[str, float]:
    """Return the log-probabilities at one new position, by the server's token names."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": [_PROMPT],
        "max_tokens": 1,
        "temperature": temperature,
        "seed": 1,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    if has_labels:
        body["logprob_token_ids"] = [_PROBE_LABEL]
    answer = await client.complete(json.dumps(body).encode())
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices:
        raise FleetError(f"{client.url} does not answer /v1/completions: is it a vLLM server?")
    tops = (choices[0].get("logprobs") or {}).get("top_logprobs")
    return dict(tops[0]) if tops and tops[0] else {}


def _is_on_cpu(device: Any, release: str, metrics: ServerMetrics | None) -> bool | None:
    """Determine the device from whatever a server reports: its config, build or cache."""
    if isinstance(device, str):
        return device == "cpu"
    build = release.partition("+")[2]
    if build.startswith(_BUILDS):
        return build.startswith("cpu")
    return metrics.is_on_cpu if metrics is not None else None


def _is_processed(mild: Mapping[str, float], hot: Mapping[str, float]) -> bool:
    return any(abs(mild[token] - hot[token]) > _FLATTENED for token in mild.keys() & hot.keys())


def _base_model(models: Any, url: str) -> dict[str, Any]:
    """Return the first model that is not an adapter of another."""
    listed = models.get("data") if isinstance(models, dict) else None
    for model in listed or []:
        if isinstance(model, dict) and model.get("id") and not model.get("parent"):
            return model
    raise FleetError(f"{url}/v1/models names no model: is it an OpenAI-compatible server?")


def _dig(document: Any, *keys: str) -> dict[str, Any]:
    """Return the object at a path of keys; empty if there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _whole(value: Any) -> int | None:
    """Return a size; None if the value is not one."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_size else None


def _text(value: Any) -> str | None:
    return value.removeprefix("torch.") if isinstance(value, str) else None
