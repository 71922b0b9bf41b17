"""Stub servers for the fleet benchmark: vLLM's routes, a fixed latency, almost no cost.

    python benchmarks/fleet_stub.py '[{"latency_s": 0.05, "capacity": 4}, ...]'

Prints the ports it listens on as a JSON list, then serves until its input closes. `GET /stats`
has a server's counts.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

OPENAPI = json.dumps(
    {
        "paths": {"/v1/load_lora_adapter": {}, "/v1/completions": {}, "/server_info": {}},
        "components": {
            "schemas": {
                "CompletionRequest": {
                    "properties": {"logprob_token_ids": {}, "prompt_logprobs": {}}
                }
            }
        },
    }
).encode()
METRICS = b'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'
NUM_TOKENS = 16
"""Tokens per answer, about 1.8 kB of JSON."""


@dataclass
class Server:
    """Settings of one server, and counts of its requests."""

    latency_s: float = 0.0
    capacity: int = 1_000_000
    load_s: float = 0.0
    max_loras: int = 8
    root: str = "stub"
    adapters: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    active: Counter[str] = field(default_factory=Counter)
    most_adapters: int = 0
    num_served: int = 0

    def __post_init__(self) -> None:
        self.gate = asyncio.Semaphore(self.capacity)

    async def answer(self, path: str, body: bytes) -> tuple[bytes, str]:
        json_type = "application/json"
        if path == "/v1/completions":
            return await self.complete(json.loads(body)), json_type
        if path == "/v1/load_lora_adapter":
            name = json.loads(body)["lora_name"]
            await asyncio.sleep(self.load_s)
            self.adapters.add(name)
            self.loads[name] += 1
            return b"ok", "text/plain"
        if path == "/v1/unload_lora_adapter":
            self.adapters.discard(json.loads(body)["lora_name"])
            return b"ok", "text/plain"
        if path == "/openapi.json":
            return OPENAPI, json_type
        if path == "/metrics":
            return METRICS, "text/plain"
        if path == "/stats":
            told = {"loads": self.loads, "most": self.most_adapters, "served": self.num_served}
            return json.dumps(told).encode(), json_type
        if path.startswith("/server_info"):
            lora = {"max_loras": self.max_loras, "max_cpu_loras": 256, "max_lora_rank": 64}
            config = {"lora_config": lora, "scheduler_config": {"max_num_seqs": 256}}
            return json.dumps({"vllm_config": config}).encode(), json_type
        if path == "/v1/models":
            model = {"id": "stub", "root": self.root, "parent": None, "max_model_len": 8192}
            return json.dumps({"data": [model]}).encode(), json_type
        return b"{}", json_type

    async def complete(self, body: dict[str, Any]) -> bytes:
        name = body["model"]
        self.active[name] += name != "stub"
        self.most_adapters = max(self.most_adapters, sum(map(bool, self.active.values())))
        async with self.gate:
            await asyncio.sleep(self.latency_s if body["max_tokens"] > 1 else 0)
        self.active[name] -= name != "stub"
        self.num_served += 1
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        value = -1.0 / body.get("temperature", 1.0) if body.get("temperature") else -1.0
        choices = ",".join(_choice(i, body["max_tokens"], value) for i in range(len(prompts)))
        return f'{{"id":"x","object":"text_completion","created":1,"model":"stub",' \
               f'"choices":[{choices}],"usage":{{"prompt_tokens":1,"total_tokens":1,' \
               f'"completion_tokens":0}}}}'.encode()  # fmt: skip


def _choice(index: int, max_tokens: int, value: float) -> str:
    num = min(max_tokens, NUM_TOKENS)
    tokens = ",".join(f'"token_id:{1000 + i}"' for i in range(num))
    values = ",".join(f"{value - 0.0123456789 * i}" for i in range(num))
    tops = ",".join(f'{{"token_id:{1000 + i}":{value},"token_id:7":-9.5}}' for i in range(num))
    return (
        f'{{"index":{index},"text":"{"word " * num}","finish_reason":"length",'
        f'"logprobs":{{"tokens":[{tokens}],"token_logprobs":[{values}],"top_logprobs":[{tops}],'
        f'"text_offset":[{",".join("0" * num)}]}}}}'
    )


async def _serve(
    server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            at = head.lower().find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            body = await reader.readexactly(size) if size else b""
            content, kind = await server.answer(path, body)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
                % (kind.encode(), len(content), content)
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    ports = []
    for settings in json.loads(sys.argv[1]):
        server = Server(**settings)
        listener = await asyncio.start_server(partial(_serve, server), "127.0.0.1", 0, limit=2**24)
        ports.append(listener.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    # Exit at once: cancelling each open connection would log an error.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
