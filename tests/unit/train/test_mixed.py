"""Several tenants in one call: each gets the bits that it gets alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from tiny import write_tiny_model
from tiny_training import make_batch

from rookery.slots import SlottedModel, load_model
from rookery.train import (
    LoraConfig,
    LoraTrainer,
    TrainerConfig,
    initial_adapter,
    lora_trainer,
    stacks,
)
from rookery.train.mixed import MixedRows
from rookery.train.packing import PackedPass
from rookery.types import Adapter, Datum, Json, LoraFactors, OptimStep, TrainOutput, TrainRequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
HEAD = (*ALL, "lm_head")


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A trainee, its data, its loss and its optimizer values."""

    name: str
    rank: int
    lengths: tuple[int, ...]
    targets: tuple[str, ...] = ALL
    layers: int = 2
    loss: str = "cross_entropy"
    options: Mapping[str, Json] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0

    def start(self, model: SlottedModel) -> Adapter:
        config = LoraConfig(rank=self.rank, targets=self.targets, layers=self.layers)
        zero = initial_adapter(model, config, name=self.name, base="", seed=self.rank)
        generator = torch.Generator().manual_seed(self.rank)
        factors = {
            layer: LoraFactors(
                a=lora.a, b=torch.randn(lora.b.shape, generator=generator) * 0.05, scale=lora.scale
            )
            for layer, lora in zero.factors.items()
        }
        return replace(zero, factors=factors)

    def data(self) -> tuple[Datum, ...]:
        rows = make_batch(self.lengths, seed=self.rank + sum(self.lengths))
        if self.loss != "cross_entropy":
            rows = [
                replace(
                    row,
                    sampled_logprobs=tuple(-4.0 - 0.1 * (i % 5) for i in range(len(row.targets))),
                    advantages=tuple(1.0 - 0.5 * (i % 4) for i in range(len(row.targets))),
                )
                for row in rows
            ]
        return tuple(replace(row, temperature=self.temperature) for row in rows)

    def request(self) -> TrainRequest:
        return TrainRequest(
            trainee=self.name, data=self.data(), loss=self.loss, loss_options=self.options
        )

    def step(self) -> OptimStep:
        values: Any = {"learning_rate": 1e-2, **self.values}
        return OptimStep(trainee=self.name, **values)


WIDE = {"clip_low": 1.0, "clip_high": 1e3}
TENANTS = (
    Tenant(name="one", rank=1, lengths=(3, 9), values={"max_grad_norm": 0.1}),
    Tenant(name="two", rank=2, lengths=(30, 4, 4), loss="importance_sampling", targets=HEAD),
    Tenant(name="three", rank=3, lengths=(17,), targets=ATTENTION, loss="ppo", options=WIDE),
    Tenant(name="four", rank=4, lengths=(2,), targets=MLP, values={"beta2": 0.5}),
    Tenant(name="big", rank=32, lengths=(40, 33), loss="cispo", targets=HEAD, temperature=0.7),
    Tenant(name="upper", rank=16, lengths=(12, 12), layers=1, loss="gspo", options=WIDE),
    Tenant(name="long", rank=8, lengths=(100, 99, 98), values={"weight_decay": 0.1}),
    Tenant(name="dro", rank=5, lengths=(9, 9), loss="dro", options={"beta": 0.1}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SlottedModel:
    """As wide as needed for products whose bits depend on their number of rows, where they do."""
    folder: Path = tmp_path_factory.mktemp("wide") / "model"
    write_tiny_model(
        folder, hidden_size=64, intermediate_size=1600, num_hidden_layers=2, head_dim=16
    )
    return load_model(folder)


async def trained(
    model: SlottedModel, tenants: tuple[Tenant, ...], *, steps: int = 2, **config: Any
) -> dict[str, tuple[list[TrainOutput], list[torch.Tensor], Adapter]]:
    """By name: the outputs of all calls, the gradients of the last, and the weights at the end."""
    trainer = LoraTrainer(model, config=TrainerConfig(**config))
    for tenant in tenants:
        trainer.add(tenant.name, tenant.start(model))
    outputs: dict[str, list[TrainOutput]] = {tenant.name: [] for tenant in tenants}
    requests = [tenant.request() for tenant in tenants]
    for _ in range(steps):
        for tenant, output in zip(tenants, await trainer.forward_backward(requests), strict=True):
            assert not output.error
            outputs[tenant.name].append(output)
        for stepped in await trainer.optim_step([tenant.step() for tenant in tenants]):
            assert not stepped.error
    for tenant, output in zip(tenants, await trainer.forward_backward(requests), strict=True):
        outputs[tenant.name].append(output)
    return {
        name: (
            outputs[name],
            list(trainer.trainee(name).gradients or ()),
            trainer.adapter(name),
        )
        for name in outputs
    }


@pytest.mark.parametrize("pass_tokens", [64, 1024, pytest.param(350, marks=long)])
async def test_bits_do_not_depend_on_the_company(model: SlottedModel, pass_tokens: int) -> None:
    """Ranks 1 to 32, unequal layers, lengths, losses and optimizer values; three steps."""
    together = await trained(model, TENANTS, pass_tokens=pass_tokens)
    for tenant in TENANTS:
        alone = (await trained(model, (tenant,), pass_tokens=pass_tokens))[tenant.name]
        outputs, gradients, adapter = together[tenant.name]
        assert outputs == alone[0], tenant.name
        assert any(gradient.any() for gradient in gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, alone[1], strict=True)), tenant.name
        for layer, lora in alone[2].factors.items():
            assert torch.equal(lora.a, adapter.factors[layer].a), (tenant.name, layer)
            assert torch.equal(lora.b, adapter.factors[layer].b), (tenant.name, layer)


@pytest.mark.parametrize("pass_tokens", [512, 2048])
async def test_padded_to_the_company_gradients_are_those_of_each_alone(
    model: SlottedModel, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one rank and one size of blocks for all, equal up to rounding. Only the larger
    pass has room for sequences of one length."""
    for module in (stacks, lora_trainer):
        monkeypatch.setattr(module, "pads_alone", lambda _device: False)
    together = await trained(model, TENANTS, steps=0, pass_tokens=pass_tokens)
    monkeypatch.undo()
    for tenant in TENANTS:
        alone = await trained(model, (tenant,), steps=0)
        for got, wanted in zip(together[tenant.name][1], alone[tenant.name][1], strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)


def mixed(*passes: list[int], room: int) -> MixedRows:
    packed = [PackedPass(sequences=[(5,) * length for length in own]) for own in passes]
    return MixedRows(packed, room=room)


@pytest.mark.parametrize(
    ("lengths", "room", "padded"),
    [
        ([3, 9, 5], 27, [9, 9, 9]),
        ([3, 9, 5], 26, [3, 5, 9]),  # more than a pass may have
        ([2000, 2100], 8192, [2100, 2100]),
        ([1000, 2000, 5000], 2**20, [1000, 2000, 5000]),  # much work for nothing
    ],
)
def test_sequences_are_padded_where_there_is_room_for_little_more(
    lengths: list[int], room: int, padded: list[int]
) -> None:
    assert mixed(lengths, room=room).lengths == padded


def test_blocks_are_few() -> None:
    assert mixed([4, 6, 5], room=100).block == 18, "one pass is one product"
    assert mixed([4, 6], [3, 3], room=100).block == 12
    assert mixed([4, 6], [3], room=100).block == 6
    assert mixed([4] * 20, [3], room=100).block is None
    assert mixed([4, 6], [3], room=0).block is None
