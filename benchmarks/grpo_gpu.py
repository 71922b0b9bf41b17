"""Time until a vLLM on the trainer's GPU serves new weights, and the memory of both.

    python benchmarks/grpo_gpu.py --tokenizer FOLDER [--python PYTHON] [--parts alias slot]
    python benchmarks/grpo_gpu.py --parts learn --model FOLDER          # reward of three seeds

The model of `alias` and `slot` has the shape of Qwen2.5-7B and weights that the server makes up;
the trainer's model is views of them. One H200: about six minutes each, mostly the start.

alias: masters in float32 are cast into the memory of the server, with CUDA graphs on. *Sync* lasts
from before the cast, which ends an optimizer step, until the server provably computes with the new
weights and accepts requests; *stall* is its pause. The unit is a copy of all weights on the device,
measured in the same run.
slot: an optimizer step of a rank-16 adapter of q, k, v, o, then *sync* until the server provably
computes with it, and the loss of speed for another adapter's requests meanwhile.
learn: all weights of a small model by alias, rewarded for digits; reward of the first and the last
steps, and the share of a step spent on publishing.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fleet_gpu import write_shape
from publication_watch import Watch

import rookery
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.bridges.adapter import AdapterBridge
from rookery.fleet.bridges.alias import AliasBridge, SharedBase, share_base
from rookery.fleet.bridges.update import Canary
from rookery.slots import FixedText, SlottedModel
from rookery.slots.loading import attach_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.full import FullTrainee
from rookery.types import (
    Adapter,
    Datum,
    ModelRef,
    OptimStep,
    SampleRequest,
    SamplingParams,
    TrainRequest,
)

NUM_PUBLISHED = 12
"""Publications, of which the first two warm up."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_NEW = 40
"""Adapters loaded while another one answers."""
LEARNED_STEPS = 30


def launch_config(options: argparse.Namespace, folder: Path, **changes: Any) -> LaunchConfig:
    is_cpu = options.device == "cpu"
    values: dict[str, Any] = {
        "model": str(folder), "python": options.python, "replicas": 1, "device": options.device,
        "dtype": "float32" if is_cpu else "bfloat16", "max_model_len": 512, "cpu_cache_gib": 1,
        "gpu_memory_utilization": options.gpu_share or 0.35, "enforce_eager": is_cpu,
        "live_weights": is_cpu, "args": ("--load-format", "dummy", *options.server_args.split()),
        "env": {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}, **changes,
    }  # fmt: skip
    return LaunchConfig(**values)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def copy_seconds(weights: Sequence[torch.Tensor]) -> float:
    """Median seconds of ten copies of all weights on their device; also prints them."""
    device = weights[0].device
    others = [torch.empty_like(weight) for weight in weights]
    found = []
    for _ in range(10):
        synchronise(device)
        began = time.perf_counter()
        torch._foreach_copy_(others, list(weights))
        synchronise(device)
        found.append(time.perf_counter() - began)
    median = statistics.median(found)
    print(f"one copy on the device: {1e3 * median:.1f} ms")
    return median


def show(name: str, seconds: Sequence[float], unit_s: float) -> None:
    median = statistics.median(seconds)
    print(
        f"{name:44}{1e3 * median:9.1f} ms median ({1e3 * min(seconds):.1f} to "
        f"{1e3 * max(seconds):.1f}), {median / unit_s:.1f} copies"
    )


def canary_of(fleet: Fleet, model: SlottedModel) -> Canary:
    return Canary.of(
        fleet.capabilities,
        is_float32=model.dtype == torch.float32,
        vocab_size=model.shape.vocab_size,
    )


class SharedModel:
    """The trainer's model in the memory of a server, and the trainer's additional memory."""

    def __init__(self, base: SharedBase, model: SlottedModel) -> None:
        self.base = base
        self.model = model
        self.weights = [weight.data for weight in model.weights.values()]
        self.num_bytes = sum(weight.nbytes for weight in self.weights)
        self.device = model.device

    @classmethod
    async def of(cls, fleet: Fleet, folder: Path) -> "SharedModel":
        before = held_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        began = time.perf_counter()
        base = await share_base(fleet)
        model = await asyncio.to_thread(attach_model, folder, base.find)
        took_s = time.perf_counter() - began
        added = held_bytes(model.device) - before
        found = cls(base, model)
        total = 1 + added / found.num_bytes
        print(f"attached {found.num_bytes / 2**30:.2f} GiB in {took_s:.2f} s")
        print(f"weights of both: {total:.3f}x (the trainer's own: {added / 2**20:.1f} MiB)")
        return found

    def logprobs(self, canary: Canary) -> Callable[[Canary], Awaitable[Sequence[float]]]:
        text = FixedText(self.model, tokens=canary.tokens, ids=canary.ids)
        return lambda _: asyncio.to_thread(text.logprobs)


async def measure_alias(options: argparse.Namespace, folder: Path) -> None:
    config = FleetConfig(launch=launch_config(options, folder, max_loras=0))
    async with open_fleet(config) as fleet:
        shared = await SharedModel.of(fleet, folder)
        trainee = FullTrainee(shared.model.weights, optimizer="adamw")
        canary = canary_of(fleet, shared.model)
        watch = Watch(fleet)
        logprobs = watch.logprobs(shared.logprobs(canary))
        bridge = AliasBridge(fleet, shared.base, canary=canary, logprobs=logprobs)
        await one_token(fleet, fleet.base)
        pauses, casts, syncs, stalls = [], [], [], []
        for number in range(NUM_PUBLISHED):
            with torch.no_grad():
                for master in trainee.parameters:
                    master.mul_(1.0 - 1e-3)
            synchronise(shared.device)
            watch.begin()
            began = time.perf_counter()
            async with bridge.changing_base() as rename:
                paused = time.perf_counter()
                trainee.write_leaves()
                synchronise(shared.device)
                cast = time.perf_counter()
                rename(ModelRef(name="policy", version=f"step-{number}"))
            done = time.perf_counter()
            pauses.append(paused - began)
            casts.append(cast - paused)
            syncs.append(done - paused)
            stalls.append(done - began)
        answer = await one_token(fleet, fleet.base)
        unit_s = copy_seconds(shared.weights)
        for name, seconds in (
            ("pause", pauses), ("cast into the shared memory", casts),
            ("sync: cast, resume, proof", syncs), ("stall: pause and sync", stalls),
        ):  # fmt: skip
            show(name, seconds[2:], unit_s)
        print("the last one, from the pause on:")
        watch.show()
        print(f"one request on the new weights: {1e3 * answer:.1f} ms")


async def one_token(fleet: Fleet, ref: ModelRef) -> float:
    params = SamplingParams(max_tokens=1, temperature=0)
    began = time.perf_counter()
    await fleet.sample([SampleRequest(model=ref, prompt=tuple(range(10, 74)), params=params)])
    return time.perf_counter() - began


async def measure_slot(options: argparse.Namespace, folder: Path) -> None:
    launch = launch_config(options, folder, max_loras=8, max_lora_rank=16)
    config = FleetConfig(launch=launch, in_place=options.device != "cpu")
    async with open_fleet(config) as fleet:
        shared = await SharedModel.of(fleet, folder)
        trainer = LoraTrainer(shared.model, config=TrainerConfig(pass_tokens=512))
        if options.device != "cpu":
            trainer.publish_in_place()
        lora = LoraConfig(rank=16, targets=TARGETS)
        trainer.add("policy", initial_adapter(shared.model, lora, name="policy", base="", seed=0))

        canary = canary_of(fleet, shared.model)
        text = FixedText(shared.model, tokens=canary.tokens, ids=canary.ids)

        async def logprobs(_canary: Canary) -> Sequence[float]:
            return await trainer.read_text("policy", text)

        watch = Watch(fleet)
        bridge = AdapterBridge(fleet, canary=canary, logprobs=watch.logprobs(logprobs))
        trainer.publish_to(bridge)
        syncs, answers = [], []
        for _ in range(NUM_PUBLISHED):
            await lora_step(trainer)
            synchronise(shared.device)
            watch.begin()
            began = time.perf_counter()
            ref = await trainer.publish("policy")
            syncs.append(time.perf_counter() - began)
            if len(syncs) == NUM_PUBLISHED:
                print("the last publication:")
                watch.show()
            answers.append(await one_token(fleet, ref))
        unit_s = copy_seconds(shared.weights)
        show("sync: to the slot, proof", syncs[2:], unit_s)
        show("one request on the new weights", answers[2:], unit_s)
        await measure_loss(fleet, shared.model, lora)


async def lora_step(trainer: LoraTrainer) -> None:
    tokens = tuple(range(20, 84))
    datum = Datum(
        tokens=tokens[:-1], positions=tuple(range(63)), targets=tokens[1:], weights=(1.0,) * 63
    )
    [output] = await trainer.forward_backward([TrainRequest(trainee="policy", data=(datum,))])
    assert not output.error, output.error
    await trainer.optim_step([OptimStep(trainee="policy", learning_rate=1e-3)])


async def measure_loss(fleet: Fleet, model: SlottedModel, lora: LoraConfig) -> None:
    """Tokens per second of one adapter, alone and while others are put into slots. The trainer is
    idle."""
    made = [
        on_device(initial_adapter(model, lora, name=f"new{n}", base="", seed=n), model.device)
        for n in range(NUM_NEW)
    ]
    ref = await fleet.load(initial_adapter(model, lora, name="other", base="", seed=1000))
    await answer_many(fleet, ref)
    plain_s = [await answer_many(fleet, ref) for _ in range(3)]
    is_over = asyncio.Event()
    num_published = 0

    async def keep_publishing() -> None:
        nonlocal num_published
        for adapter in made:
            new = await fleet.load(adapter)
            await one_token(fleet, new)
            await fleet.unload(new)
            num_published += 1
            await asyncio.sleep(0.2)
            if is_over.is_set():
                return

    publishing = asyncio.create_task(keep_publishing())
    busy_s = [await answer_many(fleet, ref) for _ in range(3)]
    is_over.set()
    await publishing
    lost = 1 - statistics.median(plain_s) / statistics.median(busy_s)
    print(
        f"another adapter, 64 answers: {statistics.median(plain_s):.2f} s alone, "
        f"{statistics.median(busy_s):.2f} s while {num_published} others came: "
        f"{100 * lost:.1f} % lost"
    )


def on_device(adapter: Adapter, device: torch.device) -> Adapter:
    factors = {
        layer: replace(lora, a=lora.a.to(device), b=lora.b.to(device))
        for layer, lora in adapter.factors.items()
    }
    return replace(adapter, factors=factors)


async def answer_many(fleet: Fleet, ref: ModelRef) -> float:
    began = time.perf_counter()
    await fleet.sample(
        [
            SampleRequest(
                model=ref,
                prompt=tuple(range(10 + place, 74 + place)),
                params=SamplingParams(max_tokens=128, seed=place, ignore_eos=True),
            )
            for place in range(64)
        ]
    )
    return time.perf_counter() - began


def measure_learning(options: argparse.Namespace, scratch: Path) -> None:
    tasks = scratch / "tasks.jsonl"
    rows = [{"prompt": f"Write the number {n} and count on.", "reference": ""} for n in range(400)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scorer = scratch / "digits.py"
    scorer.write_text(
        "def score(task, completion):\n"
        "    text = completion.text\n"
        "    return sum(c.isdigit() for c in text) / max(1, len(text))\n"
    )
    launch = launch_config(
        options, Path(options.model), args=tuple(options.server_args.split())
    ).model_dump(
        exclude_unset=True, exclude=set() if options.gpu_share else {"gpu_memory_utilization"}
    )
    for seed in options.seeds:
        report = rookery.run_grpo(
            {
                "engine": {"type": "fleet", "launch": launch},
                "tasksets": [
                    {
                        "type": "jsonl", "path": str(tasks),
                        "scorer": {"type": "python", "function": f"{scorer}:score"},
                        "splits": {"search": 0.8, "select": 0.1, "report": 0.1},
                    }
                ],
                "full": True, "bridge": "alias", "steps": LEARNED_STEPS, "groups_per_step": 8,
                "group_size": 8, "drawing": {"max_tokens": 24}, "learning_rate": 2e-5,
                "save_every": LEARNED_STEPS, "seed": seed,
            },
            runs_dir=scratch / "runs", name=f"seed{seed}", progress=False,
        ).report  # fmt: skip
        show_learning(seed, [step.metrics for step in report.steps])


def show_learning(seed: int, steps: Sequence[Any]) -> None:
    rewards = [float(step["reward/mean"]) for step in steps]
    spent = {
        kind: sum(float(step.get(f"time/{kind}_s", 0.0)) for step in steps)
        for kind in ("draw", "train", "publish")
    }
    gaps = [float(step["grpo/logprob_gap"]) for step in steps if step.get("grpo/logprob_gap")]
    print(
        f"seed {seed}: reward {statistics.fmean(rewards[:3]):.3f} to "
        f"{statistics.fmean(rewards[-3:]):.3f}; publishing {spent['publish']:.2f} s of "
        f"{sum(spent.values()):.2f} s; gap of engine and trainer {max(gaps, default=0):.3f} nats"
    )


async def measure(options: argparse.Namespace, folder: Path) -> None:
    if "alias" in options.parts:
        await measure_alias(options, folder)
    if "slot" in options.parts:
        await measure_slot(options, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--model", default="", help="a model folder, in place of the 7B shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--server-args",
        default="",
        help="for vLLM, as --server-args='--enforce-eager'",
    )
    parser.add_argument(
        "--gpu-share", type=float, help="of the server; by default 0.35, to learn as planned"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("alias", "slot", "learn"), default=["alias", "slot"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="to learn with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        folder = scratch / "model"
        if options.model:
            shutil.copytree(options.model, folder)
        else:
            folder.mkdir()
            write_shape(folder, options.tokenizer)
        asyncio.run(measure(options, folder))
        if "learn" in options.parts:
            measure_learning(options, scratch)


if __name__ == "__main__":
    main()
