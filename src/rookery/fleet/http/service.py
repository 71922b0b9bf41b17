"""A Rookery service where a vLLM server is expected: what `rookery.vllm_backend` asks of one.

    if await is_service(client):
        server = await ServiceServer.connect(client)
        await server.register("poet", folder)
        answers = await server.generate(["Once upon a time"], "poet", params)

Adapters are uploaded, as the service reads no paths of others, and belong to the tenant of the key:
other programs of that tenant may name them too.
"""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.errors import AdapterError, FleetError
from rookery.fleet.http.client import Client, ServerLost, ServerRefusal
from rookery.types import SamplingParams

__all__ = ["ServiceServer", "is_service"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


async def is_service(client: Client) -> bool:
    """Whether a Rookery service answers there, and not vLLM."""
    try:
        answer = await client.get("/version")
    except (ServerLost, ServerRefusal):
        return False
    return isinstance(answer, dict) and answer.get("server") == "rookery"


class ServiceServer:
    """The service at the other end of a client."""

    def __init__(self, client: Client, info: Mapping[str, Any]) -> None:
        self._client = client
        self.info = info
        """What it is, as `get_client_info` of vllm_backend tells it."""

    @classmethod
    async def connect(cls, client: Client) -> "ServiceServer":
        """With what its first base model can do; ServerRefusal when the key is not known there."""
        engines = await client.get("/api/v1/engines")
        name, facts = next(iter(engines.items()))
        info = {
            "is_up": True,
            "model": name,
            "version": "rookery",
            "max_model_len": facts["context_tokens"],
            "enable_lora": True,
            "max_loras": None,
            "max_lora_rank": facts["max_rank"],
            "adapters": [],
            "communicator": False,
        }
        return cls(client, info)

    async def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        adapter_id: str | None,
        params: SamplingParams,
    ) -> list[tuple[str, list[int], list[float], str]]:
        """Text, tokens, log-probabilities and the reason of the end, `params.n` per prompt."""
        body = {
            "prompts": [p if isinstance(p, str) else list(p) for p in prompts],
            "model_id": adapter_id,
            "sampling_params": {
                "n": params.n,
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": params.min_p,
                "stop": list(params.stop),
                "seed": params.seed,
            },
        }
        data = json.dumps(body).encode()
        limit_s = self._client.config.request_s
        answer = await self._client.post("/api/v1/sample", data, limit_s=limit_s)
        rows = zip(answer["completions"], answer["sequences"], strict=True)
        return [(text, one["tokens"], one["logprobs"], one["stop_reason"]) for text, one in rows]

    async def register(self, adapter_id: str, folder: Path) -> None:
        """Upload a PEFT folder with safetensors; AdapterError when the service cannot use it."""
        config, weights = await asyncio.to_thread(_read, folder)
        body = {
            "adapter_id": adapter_id,
            "adapter_config": config,
            "adapter_model": base64.b64encode(weights).decode(),
        }
        try:
            await self._client.post_json("/api/v1/adapters", body)
        except ServerRefusal as refusal:
            raise AdapterError(
                f"The adapter {adapter_id} cannot be registered: {refusal}"
            ) from refusal

    async def unregister(self, adapter_id: str) -> bool:
        """False when there was none."""
        try:
            body = json.dumps({"lora_name": adapter_id}).encode()
            await self._client.post("/v1/unload_lora_adapter", body)
        except ServerRefusal as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    async def adapters(self) -> list[dict[str, str]]:
        """Those of the tenant."""
        adapters = await self._client.get("/api/v1/adapters")
        return [{key: row[key] for key in ("adapter_id", "lora_path")} for row in adapters]

    def refuse_update(self) -> FleetError:
        return FleetError(
            f"{self._client.url} is a Rookery service, whose base weights are not replaced: train "
            "an adapter there, or connect to a vLLM server."
        )


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        return json.loads((folder / _CONFIG).read_text()), (folder / _WEIGHTS).read_bytes()
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} is no PEFT folder: {error}") from error
