"""New base weights for running servers: from a transformers model, checked afterwards.

    await update_weights(fleet, model)

The model is saved in shared memory, every server loads it in place, prefix caches are reset. Then
the log-probabilities of a few tokens are compared with the model's own, as a server can answer
"done" and still compute with old weights.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rookery.errors import FleetError
from rookery.fleet.fleet import Fleet
from rookery.fleet.replica import Replica
from rookery.fleet.wire import Fields, encode_body, read_choices, read_reading

if TYPE_CHECKING:
    import torch

__all__ = ["CANARY_NATS", "Model", "require_torch", "require_updates", "update_weights"]

Model: TypeAlias = "torch.nn.Module"
"""A transformers model, with `save_pretrained`."""
INSTALL = "pip install 'rookery[vllm]'"
CANARY = (1, 5, 9, 2, 7, 3)
"""Tokens that every vocabulary has."""
CANARY_NATS = 0.1
"""Half-precision servers differ from a float32 model by less, old weights by more."""


async def update_weights(fleet: Fleet, model: Model) -> float:
    """Give all servers the weights; the largest difference seen afterwards, in nats."""
    require_updates(fleet)
    expected = await asyncio.to_thread(_logprobs, model)
    folder = await asyncio.to_thread(_save, model)
    try:
        for replica in fleet.pool.replicas:
            await replica.client.call_workers("reload_weights", weights_path=str(folder))
        await fleet.reset_prefix_cache()
        worst = [await _difference(replica, expected) for replica in fleet.pool.replicas]
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    if max(worst) > CANARY_NATS:
        raise FleetError(
            "A server took the new weights but computes with others: log-probabilities are off by "
            f"{max(worst):.2f} nats. Restart it; vLLM on the CPU keeps the old output layer of "
            "models with tied embeddings."
        )
    return max(worst)


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


def _save(model: Model) -> Path:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="rookery-weights-", dir=parent))
    folder.chmod(0o755)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def _logprobs(model: Model) -> list[float]:
    """The model's own log-probabilities of the canary's tokens."""
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        logits = model(torch.tensor([CANARY], device=device)).logits[0].float()
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
