"""What is right and wrong with one server, as a list of checks: behind `rookery fleet verify`.

for check in await verify("http://127.0.0.1:8000"):
    show("✓" if check.is_fine else "✗", check.name, check.detail)
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import RookeryError
from rookery.fleet.adapters.fit import read_shapes
from rookery.fleet.adapters.residency import Residency
from rookery.fleet.adapters.staging import open_staging
from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.client import Client, ClientConfig, is_local, open_session
from rookery.fleet.http.probe import is_far, probe, read_again, read_metrics
from rookery.fleet.http.wire import Fields, encode_body, read_choices, read_completion, read_reading
from rookery.types import Adapter, Completion, LoraFactors, ModelRef

__all__ = ["Check", "verify"]

_PROMPT = (1, 2, 3)
_BASE = ModelRef(name="base", version="verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: `Check(name="log-probs", is_fine=True, detail="of tokens drawn ...")`."""

    name: str
    is_fine: bool | None
    """None: not tested, `detail` says why."""
    detail: str


async def verify(
    url: str, *, api_key: str = "", adapter: Adapter | None = None
) -> tuple[Check, ...]:
    """All checks, in order; the first failure to reach the server ends them.

    Adapters are tested with the given one, else with one of zeros when the model's folder is here.
    """
    async with open_session() as session:
        client = Client(url, session=session, config=ClientConfig(), api_key=api_key)
        try:
            server = await probe(client)
        except RookeryError as error:
            return (Check(name="server", is_fine=False, detail=str(error)),)
        context = f"context {server.max_model_len}" if server.max_model_len else "context unknown"
        checks = [
            Check(name="server", is_fine=True, detail=f"{server.model}, {context}"),
            Check(name="version", is_fine=True, detail=f"vLLM {server.version}"),
        ]
        steps: list[tuple[str, Callable[[], Awaitable[tuple[bool | None, str]]]]] = [
            ("completion", lambda: _completion(client, server)),
            ("log-probs", lambda: _processed(server)),
            ("label log-probs", lambda: _labels(client, server)),
            ("prompt log-probs", lambda: _prompt_logprobs(client, server)),
            ("adapters", lambda: _adapters(client, server, adapter)),
            ("prefix cache", lambda: _prefix_cache(client, server)),
        ]
        for name, step in steps:
            try:
                is_fine, detail = await step()
            except RookeryError as error:
                is_fine, detail = False, str(error)
            checks.append(Check(name=name, is_fine=is_fine, detail=detail))
    return tuple(checks)


async def _sample(client: Client, model: str) -> Completion:
    body = encode_body(model, Fields(max_tokens=4), [_PROMPT])
    [[choice]] = read_choices(await client.complete(body), num_prompts=1, n=1)
    return read_completion(choice, model=_BASE, num_top=0)


async def _completion(client: Client, server: Capabilities) -> tuple[bool, str]:
    completion = await _sample(client, server.model)
    return True, f"{len(completion.tokens)} tokens with ids and log-probabilities"


async def _processed(server: Capabilities) -> tuple[bool, str]:
    if server.has_processed_logprobs:
        return True, "of the distribution drawn from"
    return False, (
        "before temperature and cuts: start the server with --logprobs-mode processed_logprobs to "
        "sample at temperatures other than 0 and 1"
    )


async def _labels(client: Client, server: Capabilities) -> tuple[bool, str]:
    if not server.has_label_logprobs:
        return False, (
            f"only the {server.max_logprobs} likeliest tokens: labels beyond them are an error; "
            "use a vLLM with logprob_token_ids, or raise --max-logprobs"
        )
    body = encode_body(server.model, Fields(ids=(5, 6, 7)), [_PROMPT])
    [[choice]] = read_choices(await client.complete(body), num_prompts=1, n=1)
    after = read_reading(choice).after
    return all(token in after for token in (5, 6, 7)), "of any token, exactly"


async def _prompt_logprobs(client: Client, server: Capabilities) -> tuple[bool | None, str]:
    if not server.has_prompt_logprobs and server.has_label_logprobs:
        return None, "not used: not offered, or deadly there; texts are scored token by token"
    if not server.has_prompt_logprobs:
        return False, "not offered: texts cannot be scored; use a vLLM server"
    apart = await read_again(client, server)
    if is_far(apart):
        return False, (
            f"{apart:.2f} nats from those of the same tokens when they were drawn: the server "
            "computes wrongly. vLLM does so with cudagraph_mode FULL; else try --enforce-eager"
        )
    return True, f"as when the same tokens were drawn ({apart:.2g} nats apart)"


async def _adapters(
    client: Client, server: Capabilities, adapter: Adapter | None
) -> tuple[bool | None, str]:
    if not server.has_lora_loading:
        return False, (
            "not loaded at run time: start the server with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if not is_local(client.url):
        return None, "not tested: the server is on another machine and cannot read files here"
    chosen = adapter or await asyncio.to_thread(_zeros, Path(server.root))
    if chosen is None:
        return None, "not tested: the model's folder is not here; give an adapter to test with"
    ref = ModelRef(name=f"verify-{chosen.name}", version=chosen.version)
    with open_staging(None) as staging:
        folder = await asyncio.to_thread(staging.peft_folder, ref, chosen, base=server.root)
        name = staging.wire_name(ref)
        residency = Residency(client, owner=staging.owner, is_own=False)
        try:
            await residency.load(name, path=folder)
            changed = await _sample(client, name)
        finally:
            await residency.leave(model=server.model)
    if adapter is None and changed.tokens != (await _sample(client, server.model)).tokens:
        return False, "an adapter of zeros changes what the model says"
    limits = f"at most {server.max_loras} at a time" if server.max_loras else "number unknown"
    rank = f", rank {server.max_lora_rank}" if server.max_lora_rank else ""
    return True, f"loaded, sampled, unloaded; {limits}{rank}"


def _zeros(folder: Path) -> Adapter | None:
    """An adapter that changes nothing, of one query projection of the model."""
    shapes = read_shapes(folder)
    layer = next((name for name in shapes if name.endswith("q_proj")), None)
    if layer is None:
        return None
    # Only where adapters are tested, which is where torch is.
    import torch

    size_in, size_out = shapes[layer]
    factors = LoraFactors(a=torch.zeros(8, size_in), b=torch.zeros(size_out, 8), scale=1.0)
    return Adapter(name="zeros", base="", factors={layer: factors}, version="0")


async def _prefix_cache(client: Client, server: Capabilities) -> tuple[bool | None, str]:
    before = await read_metrics(client)
    if before is None:
        return None, "not tested: the server has no /metrics"
    if not server.has_prefix_cache:
        return False, "off: start the server with --enable-prefix-caching"
    limit = server.max_model_len or 4 * server.block_tokens + 2
    prompt = tuple(_PROMPT[i % 3] for i in range(min(4 * server.block_tokens + 1, limit - 2)))
    if len(prompt) <= server.block_tokens:
        return None, f"not tested: the context is shorter than a block of {server.block_tokens}"
    for _ in range(2):
        await client.complete(encode_body(server.model, Fields(), [prompt]))
    after = await read_metrics(client)
    hits = after.prefix_hits - before.prefix_hits if after is not None else 0
    rate = after.hit_rate if after is not None else None
    shown = "" if rate is None else f"; {rate:.0%} of all prompt tokens so far"
    return (
        hits >= server.block_tokens,
        f"{hits} tokens of a repeated prompt were not computed{shown}",
    )
