"""Several tenants in one call: each gets the bits that it gets alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import long
from tiny import write_tiny_model
from tiny_training import make_batch

from rookery.errors import TrainError
from rookery.slots import ModelShape, SlottedModel, load_model
from rookery.train import (
    LoraConfig,
    LoraTrainer,
    TrainerConfig,
    initial_adapter,
    lora_trainer,
    stacks,
)
from rookery.train.packing import PackedPass, check_data, input_tokens, pack
from rookery.train.running_request import MixedRows
from rookery.types import (
    Adapter,
    Datum,
    Json,
    KeptTokens,
    LoraFactors,
    OptimStep,
    TrainOutput,
    TrainRequest,
)

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
    model: SlottedModel, tenants: tuple[Tenant, ...], *, steps: int, **config: Any
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
    """Ranks 1 to 32, unequal layers, lengths, losses and optimizer values."""
    together = await trained(model, TENANTS, steps=1, pass_tokens=pass_tokens)
    for tenant in TENANTS:
        alone = (await trained(model, (tenant,), steps=1, pass_tokens=pass_tokens))[tenant.name]
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


def groups_of_answers() -> tuple[Datum, ...]:
    """Two groups that begin with a prompt each, of which one begins the other, and one alone."""
    prompts = {(3, 4, 5, 6, 7): (9, 4, 1), (3, 4): (6, 6), (8, 8, 8): (5,)}
    generator = torch.Generator().manual_seed(0)
    data = []
    for prompt, lengths in prompts.items():
        for length in lengths:
            answer = torch.randint(10, 60, (length,), generator=generator).tolist()
            tokens = (*prompt, *answer)
            positions = tuple(range(len(prompt) - 1, len(tokens) - 1))
            targets = tuple(answer)
            weights = (0.5 + length / 4,) * length
            data.append(Datum(tokens=tokens, positions=positions, targets=targets, weights=weights))
    return tuple(data)


@pytest.mark.parametrize("pass_tokens", [20, 1024])
async def test_a_prompt_that_answers_share_is_computed_once_and_changes_nothing(
    model: SlottedModel, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, equal up to rounding; a prompt is in each pass that has answers to it."""
    tenants, data = TENANTS[:2], groups_of_answers()
    trainer = LoraTrainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
    for tenant in tenants:
        trainer.add(tenant.name, tenant.start(model))
    requests = [TrainRequest(trainee=tenant.name, data=data) for tenant in tenants]

    async def gradients() -> list[tuple[TrainOutput, list[torch.Tensor]]]:
        outputs = await trainer.forward_backward(requests)
        return [
            (output, [x.clone() for x in trainer.trainee(tenant.name).gradients or ()])
            for tenant, output in zip(tenants, outputs, strict=True)
        ]

    whole = await gradients()
    for tenant in tenants:
        await trainer.optim_step([replace(tenant.step(), learning_rate=0.0)])
    monkeypatch.setattr(LoraTrainer, "shares_prompts", lambda *_: True)
    shared = await gradients()
    for (output, got), (expected, wanted) in zip(shared, whole, strict=True):
        assert not output.error and len(got) == len(wanted) > 0
        for row, wanted_row in zip(output.logprobs, expected.logprobs, strict=True):
            assert row == pytest.approx(wanted_row, abs=1e-5)
        for gradient, wanted_gradient in zip(got, wanted, strict=True):
            assert wanted_gradient.any()
            bound = 1e-5 * wanted_gradient.abs().max().item()
            torch.testing.assert_close(gradient, wanted_gradient, atol=bound, rtol=0)


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


# Packing.


SHAPE = ModelShape(
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=8,
    vocab_size=50,
    context_tokens=12,
    eos_tokens=(),
)


@st.composite
def data(draw: st.DrawFn) -> Datum:
    """Any number of targets per position, none at all too."""
    tokens = draw(st.lists(st.integers(0, 49), min_size=1, max_size=9))
    positions = sorted(draw(st.lists(st.integers(0, len(tokens) - 1), max_size=9)))
    num = len(positions)
    targets = draw(st.lists(st.integers(0, 49), min_size=num, max_size=num))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=num, max_size=num))
    return Datum(
        tokens=tuple(tokens),
        positions=tuple(positions),
        targets=tuple(targets),
        weights=tuple(weights),
        temperature=draw(st.sampled_from([1.0, 0.5])),
    )


@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_every_target_is_predicted_once_from_what_is_before_it(
    batch: list[Datum], pass_tokens: int
) -> None:
    check_data(batch, shape=SHAPE)
    got: dict[int, list[tuple[tuple[int, ...], int, float, float]]] = {}
    for packed in pack(batch, pass_tokens=pass_tokens):
        starts = [sum(packed.lengths[:i]) for i in range(len(packed.lengths))]
        assert packed.num_tokens == sum(packed.lengths)
        assert packed.num_tokens <= pass_tokens or len(packed.sequences) == 1
        assert packed.predicting == sorted(set(packed.predicting))
        assert packed.target_rows == sorted(packed.target_rows)
        for row, token, weight, number in zip(
            packed.target_rows, packed.targets, packed.weights, packed.datum, strict=True
        ):
            place = packed.predicting[row] - starts[number]
            assert 0 <= place < packed.lengths[number]
            read = packed.sequences[number][: place + 1]
            target = (read, token, weight, packed.temperatures[row])
            got.setdefault(packed.places[number], []).append(target)
    assert got == {
        place: [
            (datum.tokens[: position + 1], target, weight, datum.temperature)
            for position, target, weight in zip(
                datum.positions, datum.targets, datum.weights, strict=True
            )
        ]
        for place, datum in enumerate(batch)
        if datum.targets
    }


@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_passes_are_filled_and_equal_lengths_lie_together(
    batch: list[Datum], pass_tokens: int
) -> None:
    passes = pack(batch, pass_tokens=pass_tokens)
    for one, following in pairwise(passes):
        assert one.num_tokens + following.lengths[0] > pass_tokens
    lengths = [length for packed in passes for length in packed.lengths]
    assert lengths == sorted(lengths) and 0 not in lengths
    assert Counter(lengths) == Counter(len(input_tokens(d)) for d in batch if d.targets)


@given(batch=st.lists(data(), max_size=8), pass_tokens=st.integers(1, 20))
def test_what_reads_a_shared_prompt_reads_what_it_read_alone(
    batch: list[Datum], pass_tokens: int
) -> None:
    """Each prompt once in a pass, and no more tokens than without."""
    alone = {
        place: sequence
        for packed in pack(batch, pass_tokens=pass_tokens)
        for place, sequence in zip(packed.places, packed.sequences, strict=True)
    }
    passes = pack(batch, pass_tokens=pass_tokens, shares_prompts=True)
    for packed in passes:
        assert len(set(packed.prompts)) == len(packed.prompts) and () not in packed.prompts
        assert set(packed.after.values()) == set(range(len(packed.prompts)))
        assert packed.num_tokens == sum(map(len, [*packed.prompts, *packed.sequences]))
        assert packed.num_tokens <= pass_tokens or len(packed.sequences) == 1
        starts = [sum(packed.lengths[:i]) for i in range(len(packed.lengths))]
        predicted = [packed.predicting[row] for row in packed.target_rows]
        for row, number in zip(predicted, packed.datum, strict=True):
            assert starts[number] <= row < starts[number] + packed.lengths[number]
    whole = {
        place: (packed.prompts[packed.after[number]] if number in packed.after else ()) + sequence
        for packed in passes
        for number, (place, sequence) in enumerate(
            zip(packed.places, packed.sequences, strict=True)
        )
    }
    assert whole == alone


def test_the_prompt_of_a_group_is_laid_once() -> None:
    first = Datum(tokens=(5, 6, 7, 8), positions=(2, 3), targets=(8, 1), weights=(1.0, 1.0))
    group = [first, replace(first, tokens=(5, 6, 7, 9), targets=(9, 1))]
    [packed] = pack(group, pass_tokens=20, shares_prompts=True)
    assert packed.prompts == [(5, 6)] and packed.after == {0: 0, 1: 0}
    assert packed.sequences == [(7, 8), (7, 9)] and packed.num_tokens == 6
    assert packed.predicting == [0, 1, 2, 3] and packed.targets == [8, 1, 9, 1]
    rows = MixedRows([packed, packed], room=100)
    assert rows.sequences == [(5, 6), (5, 6), (7, 8), (7, 9), (7, 8), (7, 9)]
    assert rows.follows == [None, None, 0, 0, 1, 1]
    assert rows.unpadded == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert rows.spans == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]


def test_the_worked_example() -> None:
    batch = [
        Datum(tokens=(5, 6, 7), positions=(1, 2), targets=(7, 8), weights=(1.0, 1.0)),
        Datum(tokens=(5, 9), positions=(0, 0), targets=(9, 4), weights=(2.0, 0.0)),
        Datum(tokens=(5, 9), positions=(), targets=(), weights=()),
    ]
    [packed] = pack(batch, pass_tokens=4)
    assert packed.places == [1, 0]
    assert packed.sequences == [(5,), (5, 6, 7)]
    assert packed.predicting == [0, 2, 3]
    assert packed.target_rows == [0, 0, 1, 2]
    assert packed.targets == [9, 4, 7, 8]
    assert packed.weights == [2.0, 0.0, 1.0, 1.0]
    assert packed.datum == [0, 0, 1, 1]
    assert packed.columns == {}
    assert input_tokens(batch[2]) == ()
    assert len(pack(batch, pass_tokens=3)) == 2


def test_data_that_cannot_be_trained_on_are_refused() -> None:
    good = Datum(tokens=(5, 6), positions=(0, 1), targets=(6, 7), weights=(1.0, 1.0))
    cases = {
        "2 targets and 1 weights": replace(good, weights=(1.0,)),
        "2 targets and 3 positions": replace(good, positions=(0, 1, 1)),
        "weights that are NaN or infinite": replace(good, weights=(1.0, float("nan"))),
        "positions that fall": replace(good, positions=(1, 0)),
        "positions 0 to 2; with 2 tokens they are 0 to 1": replace(good, positions=(0, 2)),
        "positions -1 to 1": replace(good, positions=(-1, 1)),
        "has 13 tokens to read; this model reads at most 12": Datum(
            tokens=(1,) * 13, positions=(12,), targets=(1,), weights=(1.0,)
        ),
        "has the token 50": replace(good, tokens=(5, 50)),
        "has the token -1": replace(good, targets=(-1, 7)),
        "temperature 0; it is a number above 0": replace(good, temperature=0.0),
        "2 targets and 1 kept": replace(good, kept=((6,),)),
        "target 7, which is not among the tokens kept": replace(good, kept=((6, 9), (6, 9))),
        "kept for it": replace(good, kept=((), (9,))),
        "the token 9 twice among those kept": replace(good, kept=((6, 9, 4, 9), ())),
    }
    cases |= {
        f"{message}(?# stored)": replace(datum, kept=KeptTokens.of(datum.kept))
        for message, datum in cases.items()
        if datum.kept
    }
    for message, datum in cases.items():
        with pytest.raises(TrainError, match=f"Datum 1 of the batch .*{message}"):
            check_data([good, datum], shape=SHAPE)
    short = replace(good, sampled_logprobs=(0.0,))
    with pytest.raises(TrainError, match="2 targets and 1 sampled_logprobs"):
        check_data([short], shape=SHAPE)
    with pytest.raises(TrainError, match=r"Datum 0 .*2 targets and 0 advantages"):
        check_data([good, replace(good, advantages=(0.0, 1.0))], shape=SHAPE)
    with pytest.raises(TrainError, match=r"Datum 0 .*2 targets and 0 advantages"):
        check_data([good], shape=SHAPE, needs=("advantages",))
    check_data([], shape=SHAPE)
    long = Datum(tokens=(1,) * 14, positions=(11,), targets=(1,), weights=(0.0,))
    check_data([good, long, replace(good, kept=((), (7, 9)))], shape=SHAPE)


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": (0.0, 1.0)},
        {"tokens": (5.0, 6.5)},
        {"targets": "67"},
        {"weights": (None, 1.0)},
        {"weights": (1.0, 10**400)},
        {"temperature": None},
        {"kept": (None, (7,))},
    ],
)
def test_values_of_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    good = Datum(tokens=(5, 6), positions=(0, 1), targets=(6, 7), weights=(1.0, 1.0))
    with pytest.raises(TrainError, match="Datum 1 of the batch has a value of a wrong type: "):
        check_data([good, replace(good, **fields)], shape=SHAPE)
