"""Loads new base weights into running servers from a transformers model, and checks them.

    await update_weights(fleet, model)
    fleet.base                      # ModelRef("base", "Qwen/Qwen3-8B+9c1f03ab77e2d415")

The model is saved in shared memory, or in `adapter_folder` if set. Every server loads it in place
and resets its prefix cache. Then the log-probabilities of a few tokens are compared with the
model's own, as a server can answer "done" and still compute with old weights. A server takes
requests again only after that. If it failed or restarts later, it takes none until an update
succeeds there.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rookery.errors import FleetError, install_extra
from rookery.fleet.bridges.update import SMALLEST_VOCABULARY, BaseUpdate, Canary, Give
from rookery.fleet.fleet import Fleet
from rookery.fleet.http.client import is_local
from rookery.fleet.residency import claim_folder
from rookery.fleet.routing.replica import Replica
from rookery.fleet.staging import memory_folder
from rookery.runtime.concurrency import run_in_thread

if TYPE_CHECKING:
    import torch

__all__ = [
    "Model",
    "reload_from",
    "require_own_servers",
    "require_torch",
    "require_updates",
    "restart_on",
    "sees_folder",
    "update_weights",
]

# The `restart` bridge: restarts our own servers on a folder. Slowest, but always possible.


def require_own_servers(fleet: Fleet) -> None:
    """FleetError unless this process started all servers."""
    if any(replica.local is None for replica in fleet.pool.replicas):
        raise FleetError(
            "restart is for servers that are started here, and the fleet has some by URL: write "
            "bridge: reload, or a launch section."
        )


def restart_on(folder: Path) -> Give:
    """Return a `Give` that restarts a server on the model in a folder, under its old name."""

    async def give(replica: Replica) -> None:
        assert replica.local is not None, "require_own_servers was called"
        await replica.local.serve_model(str(folder), name=replica.capabilities.model)
        await replica.reattach()

    return give


Model: TypeAlias = "torch.nn.Module"
"""A transformers model, with `save_pretrained`."""


def reload_from(folder: Path) -> Give:
    """Return a `Give` that makes a server load the weights in a folder."""

    async def give(replica: Replica) -> None:
        await replica.client.call_workers("reload_weights", weights_path=str(folder))
        await replica.client.reset_prefix_cache()

    return give


async def update_weights(
    fleet: Fleet, model: Model, *, give_from: Callable[[Path], Give] = reload_from
) -> float:
    """Give all servers the weights; return the largest difference seen afterwards, in nats.

    `give_from` brings the weights in a folder to a server; by default the server reads it. The
    update waits for requests in flight, and new requests wait for its end. Then `fleet.base` is a
    new version, and requests for the old one are refused. FleetError if a server failed that took
    requests before; the others go on with the new weights.
    """
    if give_from is reload_from:
        require_updates(fleet)
        require_seen_folder(fleet)
    canary = Canary.of(
        fleet.capabilities,
        is_float32=fleet.capabilities.is_float32 and _is_float32(model),
        vocab_size=_vocab_size(model),
    )
    expected = await asyncio.to_thread(_logprobs, model, canary)

    async def logprobs(_: Canary) -> list[float]:
        return expected

    with claim_folder(fleet.config.adapter_folder or memory_folder()) as owner:
        folder = owner.folder / "weights"
        try:
            digest = await run_in_thread(_save, model, folder)
            first = fleet.first_base
            ref = replace(first, version=f"{first.version}+{digest}")
            update = BaseUpdate(fleet, canary, can_renew=False)  # the folder is removed
            async with fleet.updating(), update.lock:
                gap = await update.publish(give_from(folder), logprobs, ref, again=_refuse)
                assert gap is not None, "a server that is lost is an error here"
                return gap
        finally:
            await run_in_thread(shutil.rmtree, folder, ignore_errors=True)


async def _refuse(replica: Replica) -> None:
    raise FleetError(
        f"{replica.url} was started again, or does not tell: it may have the weights it began "
        "with. Call update_weights again."
    )


def require_updates(fleet: Fleet) -> None:
    """FleetError unless every server accepts new weights."""
    for replica in fleet.pool.replicas:
        if not replica.capabilities.has_worker_calls:
            raise FleetError(
                f"{replica.url} takes no weight updates: start it with VLLM_SERVER_DEV_MODE=1, on "
                "loopback only."
            )


def sees_folder(fleet: Fleet, replica: Replica) -> bool:
    """True if a server sees the files that `update_weights` writes."""
    return fleet.config.adapter_folder is not None or is_local(replica.url)


def require_seen_folder(fleet: Fleet) -> None:
    """FleetError unless every server sees the files that `update_weights` writes."""
    for replica in fleet.pool.replicas:
        if not sees_folder(fleet, replica):
            raise FleetError(
                f"{replica.url} is on another machine, which takes weights from a folder that both "
                "machines see: set adapter_folder (VLLM_ADAPTER_FOLDER) to one."
            )


def require_torch(device: str) -> None:
    """ImportError without torch, RuntimeError if the device is not available."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"vLLM is not available: {install_extra('vllm')}") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(f"device is {device}, but torch sees no GPU here: write cpu.")


def _save(model: Model, folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o755)
    model.save_pretrained(folder)  # type: ignore[operator]
    return _digest(folder)


def _digest(folder: Path) -> str:
    """Return 16 hex characters over the weight files."""
    files = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_file_digest, files)
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "blake2b").digest()


def _is_float32(model: Model) -> bool:
    import torch

    return all(parameter.dtype == torch.float32 for parameter in model.parameters())


def _vocab_size(model: Model) -> int:
    """Return the size in the model's config, else the smallest that every vocabulary has."""
    size: int = getattr(getattr(model, "config", None), "vocab_size", SMALLEST_VOCABULARY)
    return size


def _logprobs(model: Model, canary: Canary) -> list[float]:
    """Return the model's log-probabilities of the canary, without dropout as on a server."""
    import torch

    device = next(model.parameters()).device
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([canary.tokens], device=device)).logits[0].float()
    finally:
        for module in training:
            module.training = True
    row: list[float] = torch.log_softmax(logits[-1], dim=-1)[list(canary.ids)].tolist()
    return row
