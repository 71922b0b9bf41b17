"""The service: several tenants in one pass of the trainer, its queue, and a model behind it.

    python benchmarks/tink.py                        # all three, on the CPU; about 15 minutes
    python benchmarks/tink.py --part passes          # SmolLM2 in float32, 8 tenants, 16 tokens each
    python benchmarks/tink.py --part passes --tokens 64 --device cuda --tenants 32

`--part queue` is tink_queue.py, `--part served` is tink_served.py.

Tenants differ in rank, layers, loss, lengths and optimizer values. First all together are compared
with each alone: on the CPU, gradients and weights after a step are bitwise equal. Then both take
turns in one process on an otherwise idle machine, and the median of several rounds counts. About
four minutes on two cores.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tink_queue
import tink_served
import torch

from rookery.embedded import resolve_model
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.types import Adapter, Datum, LoraFactors, OptimStep, TrainRequest
from rookery.weights import make_adapter

RANKS = (1, 2, 4, 8, 16, 32, 8, 32)
LOSSES = (
    "cross_entropy", "importance_sampling", "ppo", "cispo",
    "dro", "gspo", "cross_entropy", "importance_sampling",
)  # fmt: skip
STRETCH = (1.0, 0.5, 1.5, 0.75, 1.25, 1.0, 0.625, 1.375)
"""Sequence length of each tenant relative to the mean."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ((*ATTENTION, *MLP), ATTENTION, (*ATTENTION, *MLP, "lm_head"), MLP)
MOST_GAP = 1e-5
"""Largest accepted gap of gradients on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The repeated request of one tenant."""

    start: Adapter
    request: TrainRequest
    step: OptimStep

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.request.data)


def make_tenant(model: SlottedModel, number: int, *, tokens: int) -> Tenant:
    kind = number % len(RANKS)
    name, rank, loss = f"tenant{number}", RANKS[kind], LOSSES[kind]
    config = LoraConfig(rank=rank, alpha=32.0, targets=TARGETS[kind % len(TARGETS)])
    zero = initial_adapter(model, config, name=name, base="", seed=number)
    generator = torch.Generator().manual_seed(number)
    # Scale deltas to one size for all ranks: at rank 1, a scale of 32 would swamp the model.
    factors = {
        layer: LoraFactors(
            a=lora.a,
            b=torch.randn(lora.b.shape, generator=generator) * (0.02 / lora.scale),
            scale=lora.scale,
        )
        for layer, lora in zero.factors.items()
    }
    length = max(2, round(tokens * STRETCH[kind]))
    ids = torch.randint(model.shape.vocab_size, (length + 1,), generator=generator).tolist()
    is_policy = loss != "cross_entropy"
    datum = Datum(
        tokens=tuple(ids[:-1]),
        positions=tuple(range(length)),
        targets=tuple(ids[1:]),
        weights=(1.0,) * length,
        sampled_logprobs=(-11.0,) * length if is_policy else (),
        advantages=tuple(1.0 - 0.5 * (i % 4) for i in range(length)) if is_policy else (),
    )
    return Tenant(
        start=make_adapter(name, base="", factors=factors),
        request=TrainRequest(trainee=name, data=(datum,), loss=loss),
        step=OptimStep(trainee=name, learning_rate=1e-4 * (1 + kind), max_grad_norm=float(kind)),
    )


def open_trainer(model: SlottedModel, tenants: Sequence[Tenant], pass_tokens: int) -> LoraTrainer:
    trainer = LoraTrainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
    for tenant in tenants:
        trainer.add(tenant.request.trainee, tenant.start)
    return trainer


async def step_all(trainer: LoraTrainer, groups: Sequence[Sequence[Tenant]]) -> None:
    """Compute gradients and a step of every tenant, one group after another."""
    for group in groups:
        outputs = await trainer.forward_backward([tenant.request for tenant in group])
        stepped = await trainer.optim_step([tenant.step for tenant in group])
        errors = [*(one.error for one in outputs), *(one.error for one in stepped)]
        assert not any(errors), errors


async def compare(model: SlottedModel, tenants: Sequence[Tenant], pass_tokens: int) -> float:
    """Largest relative difference of a tenant's results together and alone; 0 is bitwise equal.

    On the CPU it covers gradients and weights after a step, on a GPU only gradients before any
    step: AdamW's first step is as large for a gradient of pure rounding error as for any other.
    """
    has_steps = model.device.type == "cpu"
    together = open_trainer(model, tenants, pass_tokens)
    if has_steps:
        await step_all(together, [tenants])
    await together.forward_backward([tenant.request for tenant in tenants])
    worst = 0.0
    for tenant in tenants:
        name = tenant.request.trainee
        alone = open_trainer(model, [tenant], pass_tokens)
        if has_steps:
            await step_all(alone, [[tenant]])
        await alone.forward_backward([tenant.request])
        both = [trainer.trainee(name) for trainer in (together, alone)]
        one, other = (
            [*(trainee.parameters if has_steps else ()), *(trainee.gradients or ())]
            for trainee in both
        )
        worst = max(worst, far(one, other))
    return worst


async def show_rounding(model: SlottedModel, tenants: Sequence[Tenant], pass_tokens: int) -> None:
    """Print how far gradients move if the last bit of the model's weights changes. Reordered sums
    cannot be expected to stay closer."""
    exact = [await gradients_alone(model, tenant, pass_tokens) for tenant in tenants]
    kept = {name: weight.clone() for name, weight in model.weights.items()}
    with torch.no_grad():
        for weight in model.weights.values():
            up = torch.rand_like(weight) < 0.5
            weight.mul_(torch.where(up, 1 + 2**-23, 1 - 2**-23))
    for number, (tenant, before) in enumerate(zip(tenants, exact, strict=True)):
        gap = far(await gradients_alone(model, tenant, pass_tokens), before)
        print(f"tenant {number}, weights rounded anew  {gap:.1e}", flush=True)
    with torch.no_grad():
        for name, weight in model.weights.items():
            weight.copy_(kept[name])


async def gradients_alone(
    model: SlottedModel, tenant: Tenant, pass_tokens: int
) -> list[torch.Tensor]:
    trainer = open_trainer(model, [tenant], pass_tokens)
    await trainer.forward_backward([tenant.request])
    found = trainer.trainee(tenant.request.trainee).gradients
    assert found is not None
    return found


def far(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Norm of the difference relative to the norm of `other`."""
    return length(torch._foreach_sub(list(one), list(other))) / length(other)


def length(tensors: Sequence[torch.Tensor]) -> float:
    """Norm of all tensors as one vector."""
    found: float = torch.stack(torch._foreach_norm(list(tensors))).norm().item()
    return found


async def measure(
    model: SlottedModel, tenants: Sequence[Tenant], *, pass_tokens: int, rounds: int
) -> tuple[float, float]:
    """Tokens per second of all tenants together, and of one after another."""
    trainer = open_trainer(model, tenants, pass_tokens)
    plans: dict[str, list[Sequence[Tenant]]] = {
        "together": [tenants],
        "apart": [[tenant] for tenant in tenants],
    }
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds + 1):
        for name, groups in plans.items():
            started = time.perf_counter()
            await step_all(trainer, groups)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    num_tokens = sum(tenant.num_tokens for tenant in tenants)
    rates = {name: num_tokens / statistics.median(own[1:]) for name, own in seconds.items()}
    return rates["together"], rates["apart"]


async def main() -> bool:
    options = read_options()
    is_fine = True
    if options.part in ("all", "passes"):
        is_fine &= await measure_passes(options)
    if options.part in ("all", "queue"):
        is_fine &= await tink_queue.main()
    if options.part in ("all", "served"):
        is_fine &= await tink_served.main()
    return is_fine


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", choices=("all", "passes", "queue", "served"), default="all")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="mean of each tenant")
    parser.add_argument("--pass-tokens", type=int, help="of a pass at most; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rounding",
        action="store_true",
        help="also how far gradients go when weights are rounded anew",
    )
    return parser.parse_args()


async def measure_passes(options: argparse.Namespace) -> bool:
    """Compare and time all tenants in one pass beside one after another."""
    folder: Path = resolve_model(options.model).path
    model = load_model(folder, device=options.device, dtype="float32")
    pass_tokens = options.pass_tokens or max(1024, 2 * options.tenants * options.tokens)
    tenants = [make_tenant(model, i, tokens=options.tokens) for i in range(options.tenants)]
    gap = await compare(model, tenants, pass_tokens)
    if options.rounding:
        await show_rounding(model, tenants, pass_tokens)
    together, apart = await measure(model, tenants, pass_tokens=pass_tokens, rounds=options.rounds)
    is_fine = gap == 0.0 if options.device == "cpu" else gap <= MOST_GAP
    print(f"{options.tenants} tenants, {options.tokens} tokens each, {options.device}")
    print(f"gap to each alone     {gap:.1e}   {'ok' if is_fine else 'TOO LARGE'}")
    print(f"tokens/s together     {together:8.1f}")
    print(f"tokens/s apart        {apart:8.1f}")
    print(f"ratio                 {together / apart:8.2f}")
    return is_fine


if __name__ == "__main__":
    raise SystemExit(not asyncio.run(main()))
