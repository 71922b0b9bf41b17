"""New base weights for running servers: from a transformers model, checked afterwards.

    await update_weights(fleet, model)
    fleet.base                      # ModelRef("base", "Qwen/Qwen3-8B+9c1f03ab77e2d415")

The model is saved in shared memory, or in `adapter_folder` where there is one; every server loads
it in place, prefix caches are reset. Then the log-probabilities of a few tokens are compared with
the model's own, as a server can answer "done" and still compute with old weights. A server takes
requests again only after that; one that failed, or is started again later, takes none until an
update succeeds there.
"""

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from rookery.errors import FleetError, RookeryError
from rookery.fleet.adapters.owner import claim_folder
from rookery.fleet.adapters.staging import memory_folder
from rookery.fleet.fleet import Fleet
from rookery.fleet.http.wire import Fields, encode_body, read_choices, read_reading
from rookery.fleet.routing.replica import Replica

if TYPE_CHECKING:
    import torch

__all__ = ["CANARY_NATS", "Model", "require_torch", "require_updates", "update_weights"]

logger = logging.getLogger(__name__)
Params = ParamSpec("Params")
Result = TypeVar("Result")
Model: TypeAlias = "torch.nn.Module"
"""A transformers model, with `save_pretrained`."""
INSTALL = "pip install 'rookery[vllm]'"
CANARY = (1, 5, 9, 2, 7, 3)
"""Tokens that every vocabulary has."""
CANARY_NATS = 0.1
"""Half-precision servers differ from a float32 model by less, old weights by more."""


async def update_weights(fleet: Fleet, model: Model) -> float:
    """Give all servers the weights; the largest difference seen afterwards, in nats.

    Requests in flight are waited for, those that come meanwhile wait. `fleet.base` is a new version
    then, and requests that name the old one are refused. FleetError when a server failed that took
    requests before: the others go on with the new weights.
    """
    require_updates(fleet)
    expected = await asyncio.to_thread(_logprobs, model)
    with claim_folder(fleet.config.adapter_folder or memory_folder()) as owner:
        folder = owner.folder / "weights"
        try:
            digest = await _to_its_end(_save, model, folder)
            async with fleet.updating():
                return await _update_all(fleet, folder, expected, digest)
        finally:
            await _to_its_end(shutil.rmtree, folder, ignore_errors=True)


async def _to_its_end(
    work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs
) -> Result:
    """Run it in a thread; a caller that is cancelled waits for its end all the same."""
    running = asyncio.create_task(asyncio.to_thread(work, *args, **options))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()


async def _update_all(fleet: Fleet, folder: Path, expected: Sequence[float], digest: str) -> float:
    replicas = fleet.pool.replicas
    were_open = [replica.load.is_open for replica in replicas]
    outcomes = await asyncio.gather(*(_update(r, folder, expected) for r in replicas))
    succeeded = [outcome for outcome in outcomes if isinstance(outcome, float)]
    if succeeded:
        fleet.rename_base(digest)
    failed = [
        outcome
        for outcome, was_open in zip(outcomes, were_open, strict=True)
        if isinstance(outcome, RookeryError) and (was_open or not succeeded)
    ]
    if failed:
        others = "the others go on with them" if succeeded else "no server takes requests"
        raise FleetError(
            f"{len(failed)} of {len(replicas)} servers did not get the new weights, {others}: "
            f"{failed[0]}"
        )
    return max(succeeded)


async def _update(
    replica: Replica, folder: Path, expected: Sequence[float]
) -> float | RookeryError:
    """How far one server is off afterwards, or why it takes no requests any more."""
    replica.exclude(f"{replica.url} was given new weights, and did not confirm them.")
    try:
        await replica.client.call_workers("reload_weights", weights_path=str(folder))
        await replica.client.reset_prefix_cache()
        apart = await _difference(replica, expected)
        if not apart <= CANARY_NATS:
            raise FleetError(
                f"{replica.url} took the new weights but computes with others: log-probabilities "
                f"are off by {apart:.2f} nats. Restart it; vLLM on the CPU keeps the old output "
                "layer of models with tied embeddings."
            )
        await replica.include()
    except RookeryError as error:
        replica.exclude(str(error))
        logger.warning("%s takes no requests: %s", replica.url, error)
        return error
    return apart


def require_updates(fleet: Fleet) -> None:
    """FleetError unless every server takes new weights."""
    for replica in fleet.pool.replicas:
        if not replica.capabilities.has_worker_calls:
            raise FleetError(
                f"{replica.url} takes no weight updates: start it with VLLM_SERVER_DEV_MODE=1, on "
                "loopback only."
            )


def require_torch(device: str) -> None:
    """ImportError unless weights can be made here, RuntimeError unless the device is here."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"vLLM is not available: {INSTALL}") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(f"device is {device}, but torch sees no GPU here: write cpu.")


def _save(model: Model, folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o755)
    model.save_pretrained(folder)  # type: ignore[operator]
    return _digest(folder)


def _digest(folder: Path) -> str:
    """16 hex characters over the weight files."""
    files = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_file_digest, files)
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "blake2b").digest()


def _logprobs(model: Model) -> list[float]:
    """The model's own log-probabilities of the canary's tokens, without dropout as on a server."""
    import torch

    device = next(model.parameters()).device
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([CANARY], device=device)).logits[0].float()
    finally:
        for module in training:
            module.training = True
    rows = torch.log_softmax(logits, dim=-1)
    return [float(rows[i, token]) for i, token in enumerate(CANARY[1:])]


async def _difference(replica: Replica, expected: Sequence[float]) -> float:
    tail = CANARY[1:]
    prompts = [CANARY[:end] for end in range(1, len(CANARY))]
    body = encode_body(replica.capabilities.model, Fields(ids=tuple(sorted(tail))), prompts)
    choices = read_choices(await replica.client.complete(body), num_prompts=len(prompts), n=1)
    rows = [read_reading(choice).after for [choice] in choices]
    found = [row.get(token, float("inf")) for row, token in zip(rows, tail, strict=True)]
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
