"""The slotted model computes what transformers computes, or refuses to load."""

import math
import threading
from pathlib import Path
from platform import machine

import pytest
import torch
from marks import long, needs_int4
from safetensors.torch import load_file, save_file
from tiny import VOCAB, write_tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rookery.errors import ModelError
from rookery.slots import CausalAttend, FixedText, Segment, SlotRows, SlottedModel, load_model
from rookery.slots.attention import PositionProbe, agree
from rookery.slots.linear import FLOAT32, PackedProduct, Packing, drop_pages, int4_packing
from rookery.slots.loading import weight_shapes
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter

CPU = torch.device("cpu")

ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3": {"head_dim": 8, "sliding_window": 6},
    "Phi": {},
    "Phi3": {"sliding_window": 6},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_sequences_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / kind, kind, **ARCHITECTURES[kind])
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = load_model(folder)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 24, 1)]
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    attend = CausalAttend(lengths, device=torch.device("cpu"))
    with torch.inference_mode():
        hidden = model.layers(model.embed(torch.cat(sequences)), positions, attend=attend)
        logits = model.logits(hidden)
        expected = torch.cat([reference(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


FUSED = {"Llama", "Qwen2", "Qwen3", "Mistral"}
PACKED = ("Llama", "Qwen3", "Gemma2", "Phi3")
"""One of each way to be packed; the others are like them."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in PACKED else long) for kind in ARCHITECTURES]
)
def test_packing_keeps_the_logits_of_base_and_adapters(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / kind, kind, **ARCHITECTURES[kind])
    plain, packed = load_model(folder), load_model(folder)
    packed.pack()
    assert packed.is_fused == (kind in FUSED)
    targets = [name for name in plain.linears if "layers.1." in name]
    adapter = random_adapter(plain, targets)
    rows = SlotRows([Segment(slot=1, rows=range(5, 15), block=4)], num_rows=20, device=CPU)
    logits = []
    for model in (plain, packed):
        model.bank.put(1, adapter)
        attend = CausalAttend([20], device=CPU)
        with torch.inference_mode():
            hidden = model.layers(
                model.embed(torch.arange(20)), torch.arange(20), attend=attend, rows=rows
            )
            logits.append(model.logits(hidden, rows=rows))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def random_adapter(model: SlottedModel, targets: list[str]) -> Adapter:
    generator = torch.Generator().manual_seed(2)
    factors = {
        name: LoraFactors(
            a=torch.randn(3, model.linears[name].in_features, generator=generator),
            b=torch.randn(model.linears[name].out_features, 3, generator=generator),
            scale=0.5,
        )
        for name in targets
    }
    return make_adapter("random", base="", factors=factors)


@needs_int4
def test_a_head_beside_weights_of_four_bits_is_near_that_of_float32(tmp_path: Path) -> None:
    """The head is packed on its own: on x86 it has 16 bit."""
    folder = write_tiny_model(tmp_path / "even", hidden_size=64, intermediate_size=128)
    packing = int4_packing()
    logits, heads = [], []

    def head(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProduct:
        heads.append(tuple(weight.shape))
        return PackedProduct(weight, bias)

    for choice in (FLOAT32, Packing(FLOAT32.layers, head), packing._replace(layers=PackedProduct)):
        model = load_model(folder)
        model.pack(choice)
        logits.append(model.logits(torch.randn(9, 64, generator=torch.manual_seed(1))))
    assert heads == [(VOCAB, 64)] and torch.equal(logits[0], logits[1])
    least = 2e-3 if machine() == "x86_64" else 0.3
    torch.testing.assert_close(logits[2], logits[0], atol=least, rtol=least)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_packed_model_leaves_the_file_of_its_weights(tmp_path: Path) -> None:
    """Plain weights are pages of that file; one that stays would keep all of them in memory."""
    folder = write_tiny_model(tmp_path / "tiny")

    def is_mapped() -> bool:
        return str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()

    model = load_model(folder)
    assert is_mapped(), "transformers does not map files any more: is this still needed?"
    model.pack()
    assert not is_mapped()


def test_weights_whose_pages_were_dropped_are_read_again(tmp_path: Path) -> None:
    """Those in a mapped file, which is as it was; others stay where they are."""
    wide = write_tiny_model(tmp_path / "wide", hidden_size=128, intermediate_size=512)
    mapped = list(load_model(wide).weights.values())
    plain = [weight.clone() for weight in mapped]
    drop_pages([*mapped, *plain])
    assert all(torch.equal(x, y) for x, y in zip(mapped, plain, strict=True))


def test_layers_that_only_look_like_llamas_are_not_fused(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are known, what is computed with them is not: the norm's weight is off by one."""
    model = load_model(tiny_folder)
    plain = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: plain(self, x) * 1.1)
    model.pack()
    assert not model.is_fused


def test_an_architecture_that_does_more_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "granite", "Granite", embedding_multiplier=3.0)
    with pytest.raises(ModelError, match="probe logits differ"):
        load_model(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_nan_weights_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_model(folder)


def test_a_mixture_of_experts_is_told_and_not_promised_to_be_exact(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = write_tiny_model(tmp_path / "moe", "Mixtral", **experts)
    assert load_model(folder).has_experts
    with pytest.raises(ModelError, match=r"mixture of experts.*share: false"):
        load_model(folder, is_exact=True)
    assert not load_model(write_tiny_model(tmp_path / "plain"), is_exact=True).has_experts


# Models that are built in several threads at a time.


def test_a_model_is_whole_while_another_thread_describes_one(tiny_folder: Path) -> None:
    is_over = threading.Event()

    def describe() -> None:
        while not is_over.is_set():
            weight_shapes(tiny_folder)

    thread = threading.Thread(target=describe)
    thread.start()
    try:
        for _ in range(3):
            weights = load_model(tiny_folder).weights
            assert not any(weight.is_meta for weight in weights.values())
    finally:
        is_over.set()
        thread.join()


# What two passes of a model may differ by.


VOCABULARY = 64


def logits() -> torch.Tensor:
    rows = 2 * PositionProbe(VOCABULARY, 128, device=torch.device("cpu")).lengths[0]
    return 30 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_single_positions_may_be_far_off(dtype: torch.dtype) -> None:
    """As SmolLM2 in bfloat16 after special tokens: by 10 of 36, and by 40 on other machines."""
    expected = logits()
    got = expected.clone()
    got[3] += 40
    got[20] += 40
    assert agree(got, expected, dtype=dtype)
    assert not agree(got, expected, dtype=torch.float32)


@pytest.mark.parametrize("rows", [slice(0, 12), slice(12, 24)])
def test_one_sequence_that_is_off_is_enough(rows: slice) -> None:
    expected = logits()
    got = expected.clone()
    got[rows] += 40
    assert not agree(got, expected, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_agrees_with_nothing(dtype: torch.dtype) -> None:
    expected = logits()
    assert not agree(torch.full_like(expected, math.nan), expected, dtype=dtype)


def test_the_tokens_are_spread_over_the_vocabulary() -> None:
    probe = PositionProbe(49152, 8192, device=torch.device("cpu"))
    own = set(probe.tokens[0].tolist())
    assert len(own) == len(probe.tokens[0]) and max(own) > 0.8 * 49152


# What is read after a text follows the weights as they change in place.


TOKENS, IDS = (1, 5, 2, 7), (3, 1, 4)


def test_readings_are_those_of_transformers_before_and_after_a_change(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_model(folder)
    text = FixedText(model, tokens=TOKENS, ids=IDS)
    name = "model.layers.1.mlp.down_proj.weight"
    found = []
    for factor in (1.0, 3.0):
        with torch.no_grad():
            model.weights[name].mul_(factor)
            reference.get_parameter(name).mul_(factor)
            row = torch.log_softmax(reference(torch.tensor([TOKENS])).logits[0, -1], dim=-1)
        found.append(text.logprobs())
        assert found[-1] == pytest.approx(row[list(IDS)].tolist(), abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_an_adapter_reads_as_its_product_added_to_the_weights(tmp_path: Path) -> None:
    """Also one of other layers and another rank, also the output layer, also none again."""
    folder = write_tiny_model(tmp_path / "model", "Qwen2")
    model = load_model(folder)
    text = FixedText(model, tokens=TOKENS, ids=IDS)
    first = make_factors(model, ["model.layers.0.self_attn.q_proj"], rank=2, seed=0)
    others = ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj", "lm_head"]
    found = []
    for factors in (first, make_factors(model, others, rank=3, seed=1), {}, first):
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach().clone())
        with torch.no_grad():
            for layer, lora in factors.items():
                reference.get_parameter(f"{layer}.weight").add_(lora.scale * lora.b @ lora.a)
            row = torch.log_softmax(reference(torch.tensor([TOKENS])).logits[0, -1], dim=-1)
        found.append(text.logprobs(factors))
        assert found[-1] == pytest.approx(row[list(IDS)].tolist(), abs=1e-5)
    assert found[0] == found[3] and found[0] != pytest.approx(found[2], abs=1e-3)


def make_factors(
    model: SlottedModel, layers: list[str], *, rank: int, seed: int
) -> dict[str, LoraFactors]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        layer: LoraFactors(
            a=random(rank, model.linears[layer].in_features),
            b=random(model.linears[layer].out_features, rank),
            scale=0.7,
        )
        for layer in layers
    }
