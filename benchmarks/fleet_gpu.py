"""The fleet on a GPU: adapters to first token, a population together, tokens per second.

    python benchmarks/fleet_gpu.py --tokenizer FOLDER [--python PYTHON] [--parts adapters]

Needs vLLM (`--python` names its interpreter) and a folder with a tokenizer. The model has the shape
of Qwen2.5-7B and weights that the server makes up. One H200: five minutes, mostly the start.

Adapters: rank 16 of q, k, v, o, from tensors in memory to the first token of an answer: by stock
`load_lora_adapter` and `/v1/completions`, by the worker extension and the route for tokens, and so
in place from this process's GPU memory. Population: 16 adapters x 16 prompts, together and one
after another. Tokens: the best of several plain clients, and `fleet.sample`; with `--api-servers
4`, of a server of four API processes, which takes no adapters (`--parts throughput`).
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rookery.fleet import Client, Fleet, FleetConfig, LaunchConfig, LaunchProgress, open_fleet
from rookery.fleet.http.wire import Fields, encode_body
from rookery.fleet.routing.replica import Replica
from rookery.types import Adapter, LoraFactors, ModelRef, SampleRequest, SamplingParams
from rookery.weights import make_adapter

HIDDEN, KEYS, LAYERS, VOCAB = 3584, 512, 28, 152_064
SHAPE_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN,
    "intermediate_size": 18944, "num_hidden_layers": LAYERS, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 28, "attention_dropout": 0.0,
    "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NEW_TOKENS = 128
NUM_PROMPTS = 256
NUM_ADAPTERS = 16
ROUTES = ("http", "extension", "in place")
TIMED = {
    "write": "writing the folder",
    "load": "load call alone",
    "first token": "tensors to first token",
}


def write_shape(folder: Path, tokenizer: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE_7B))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, folder)


def make_random(name: str, seed: int, *, device: str, rank: int = 16) -> Adapter:
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = dict(zip(TARGETS, (HIDDEN, KEYS, KEYS, HIDDEN), strict=True))

    def draw(rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=generator, device=device)
        return (made * 0.02).to(torch.bfloat16)

    factors = {
        f"model.layers.{layer}.self_attn.{leaf}": LoraFactors(
            a=draw(rank, HIDDEN), b=draw(size_out, rank), scale=2.0
        )
        for layer in range(LAYERS)
        for leaf, size_out in sizes.items()
    }
    return make_adapter(name, base="", factors=factors)


def prompts(num: int, length: int = 64) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 13 * k) % 30_000 + 10 for k in range(length)) for i in range(num)]


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def show_times(name: str, seconds: Sequence[float]) -> float:
    median = statistics.median(seconds)
    print(
        f"{name:46}{median * 1e3:9.1f} ms median "
        f"({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"
    )
    return median


async def first_token(fleet: Fleet, ref: ModelRef, prompt: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    await fleet.sample([SampleRequest(model=ref, prompt=prompt, params=params)])


async def adapter_times(fleet: Fleet, *, num: int = 14) -> dict[str, float]:
    """Writing, load call, and tensors to first token, by each route; without the warm-up."""
    found = {"one token": show_times("one token, adapter loaded", await loaded_times(fleet))}
    routes = ROUTES if torch.cuda.is_available() else ROUTES[:2]
    # Make adapters before timing, because random numbers keep all cores busy.
    pairs = [{name: make_pair(name, i) for name in routes} for i in range(num)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    # In turns, so that a slow host affects all of them.
    rounds = [
        {name: await route_times(fleet, name, *own[name]) for name in routes} for own in pairs
    ]
    for name in routes:
        times = zip(*(one[name] for one in rounds[2:]), strict=True)
        for part, seconds in zip(("write", "load", "first token"), times, strict=True):
            found[f"{name} {part}"] = show_times(f"{name}: {TIMED[part]}", seconds)
    stock = found["http first token"]
    print("tensors to first token: " + ", ".join(
        f"{name} {found[f'{name} first token'] * 1e3:.1f} ms "
        f"({stock / found[f'{name} first token']:.1f}x)" for name in routes
    ))  # fmt: skip
    return found


def make_pair(route: str, i: int) -> tuple[Adapter, Adapter]:
    """Two adapters on the device that the route reads from."""
    device = "cuda" if route == "in place" else "cpu"
    return (
        make_random(f"{route[0]}{i}", i, device=device),
        make_random(f"x{route[0]}{i}", 99 + i, device=device),
    )


async def route_times(
    fleet: Fleet, name: str, adapter: Adapter, other: Adapter
) -> tuple[float, float, float]:
    """Seconds to write the folder of `other`, to load it, and from `adapter` to the first token."""
    [replica] = fleet.pool.replicas
    replica.route = "http" if name == "http" else "extension"
    replica.has_token_route = name != "http"
    replica.staging.in_place = name == "in place"
    began = time.perf_counter()
    ref = await fleet.load(adapter)
    await first_token(fleet, ref, prompts(1)[0])
    first = time.perf_counter() - began
    write, load = await load_alone(replica, other)
    replica.staging.in_place, replica.has_token_route = False, True
    return write, load, first


async def loaded_times(fleet: Fleet) -> list[float]:
    ref = await fleet.load(make_random("warm", 1000, device="cpu"))
    await first_token(fleet, ref, prompts(1)[0])
    return [await timed(lambda: first_token(fleet, ref, prompts(1)[0])) for _ in range(10)]


async def load_alone(replica: Replica, adapter: Adapter) -> tuple[float, float]:
    """Seconds to write an adapter's folder, and to load it with `load_lora_adapter`."""
    ref = ModelRef(name=adapter.name, version=adapter.version)
    staging = replica.staging
    began = time.perf_counter()
    if replica.route == "extension":
        dtype = replica.capabilities.lora_dtype or "bfloat16"
        folder = staging.buffer_folder(ref, adapter, dtype=dtype)
    else:
        folder = staging.peft_folder(ref, adapter, base=replica.capabilities.root)
    write = time.perf_counter() - began
    name = staging.wire_name(ref)
    load = await timed(lambda: replica.client.load_adapter(name, path=str(folder)))
    await replica.client.unload_adapter(name)
    return write, load


async def population(fleet: Fleet) -> dict[str, float]:
    """16 adapters x 16 prompts through our client: together, and one adapter after another."""
    refs = [
        await fleet.load(make_random(f"p{i}", 500 + i, device="cpu")) for i in range(NUM_ADAPTERS)
    ]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    by_ref = [
        [SampleRequest(model=ref, prompt=p, params=params) for p in prompts(16)] for ref in refs
    ]
    everything = [request for group in by_ref for request in group]
    await fleet.sample(everything)
    rounds = [await timed(lambda: fleet.sample(everything)) for _ in range(3)]
    together = statistics.median(rounds)

    async def one_after_another() -> None:
        for group in by_ref:
            await fleet.sample(group)

    apart = await timed(one_after_another)
    tokens = len(everything) * NEW_TOKENS
    print(f"16 adapters x 16 prompts: together {tokens / together:,.0f} tok/s, one after another "
          f"{tokens / apart:,.0f} tok/s: {apart / together:.1f}x")  # fmt: skip
    return {"population together over apart": apart / together}


async def raw_tokens(client: Client, model: str, per_call: int) -> float:
    """Tokens per second of plain calls of `per_call` prompts, all in flight together."""
    wanted = prompts(NUM_PROMPTS)
    fields = Fields(max_tokens=NEW_TOKENS, ignore_eos=True)
    bodies = [
        encode_body(model, fields, wanted[first : first + per_call])
        for first in range(0, NUM_PROMPTS, per_call)
    ]
    seconds = await timed(lambda: asyncio.gather(*(client.complete(body) for body in bodies)))
    return NUM_PROMPTS * NEW_TOKENS / seconds


async def token_route(client: Client, model: str) -> float:
    """Tokens per second through `/inference/v1/generate`, one request per prompt."""
    sampling = {
        "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "detokenize": False,
    }  # fmt: skip
    bodies = [
        json.dumps({"model": model, "token_ids": p, "sampling_params": sampling}).encode()
        for p in prompts(NUM_PROMPTS)
    ]
    seconds = await timed(
        lambda: asyncio.gather(
            *(client.post("/inference/v1/generate", body, limit_s=600) for body in bodies)
        )
    )
    return NUM_PROMPTS * NEW_TOKENS / seconds


async def throughput(fleet: Fleet, *, rounds: int = 5) -> dict[str, float]:
    """Median rates of clients that take turns, because rounds differ by about 10 %."""
    [replica] = fleet.pool.replicas
    client, model = replica.client, replica.capabilities.model
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    wanted = [
        SampleRequest(model=fleet.base, prompt=p, params=params) for p in prompts(NUM_PROMPTS)
    ]
    await fleet.sample(wanted)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for per_call in (32, 128, 256):
            name = f"{NUM_PROMPTS // per_call} calls of {per_call}"
            found.setdefault(name, []).append(await raw_tokens(client, model, per_call))
        if "/inference/v1/generate" in replica.capabilities.routes:
            found.setdefault("token route", []).append(await token_route(client, model))
        for has_token_route in (False, True) if replica.has_token_route else (False,):
            replica.has_token_route = has_token_route
            name = "fleet.sample" if has_token_route else "fleet.sample by completions"
            seconds = await timed(lambda: fleet.sample(wanted))
            found.setdefault(name, []).append(NUM_PROMPTS * NEW_TOKENS / seconds)
    rates = {name: statistics.median(values) for name, values in found.items()}
    best = max(rates.values())
    for name, rate in rates.items():
        least, most = min(found[name]), max(found[name])
        print(
            f"{name:30}{rate:12,.0f} tok/s median ({least:,.0f} to {most:,.0f}){rate / best:8.1%}"
        )
    return {"fleet over best client": rates["fleet.sample"] / best}


def show(progress: LaunchProgress) -> None:
    if progress.is_ready or int(progress.seconds * 2) % 40 == 0:
        print(f"[{progress.seconds:5.0f} s] {progress.line[-100:]}", file=sys.stderr)


def server_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser for the options of `open_7b`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cuda-graphs", default="auto", choices=("auto", "full"))
    return parser


@asynccontextmanager
async def open_7b(options: argparse.Namespace, **own: Any) -> AsyncIterator[Fleet]:
    """Start one server of the 7B shape; `own` has further launch settings."""
    with tempfile.TemporaryDirectory() as scratch:
        write_shape(Path(scratch), options.tokenizer)
        settings: dict[str, Any] = {
            "max_lora_rank": 16,
            "lora_targets": TARGETS,
            "args": ("--load-format", "dummy"),
            **own,
        }
        launch = LaunchConfig(
            model=scratch,
            python=options.python,
            replicas=1,
            device=options.device,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=256,
            cuda_graphs=options.cuda_graphs,
            env={"HF_HUB_OFFLINE": "1"},
            **settings,
        )
        async with open_fleet(FleetConfig(launch=launch), progress=show) as fleet:
            yield fleet


async def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--parts", default="adapters,population,throughput")
    parser.add_argument("--args", default="", help="further flags of vLLM, in one string")
    parser.add_argument("--rounds", type=int, default=5, help="of the throughput")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--api-servers", type=int, default=1)
    options = parser.parse_args()
    parts: dict[str, Callable[[Fleet], Awaitable[dict[str, float]]]] = {
        "adapters": adapter_times,
        "population": population,
        "throughput": partial(throughput, rounds=options.rounds),
    }
    found: dict[str, Any] = {}
    async with open_7b(
        options,
        api_servers=options.api_servers,
        max_loras=NUM_ADAPTERS if options.api_servers == 1 else 0,
        max_cpu_loras=128,
        enforce_eager=options.eager,
        args=("--load-format", "dummy", *options.args.split()),
    ) as fleet:
        for part in options.parts.split(","):
            found |= await parts[part](fleet)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    asyncio.run(main())
