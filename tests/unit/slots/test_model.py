"""The slotted model computes what transformers computes, or refuses to load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, write_tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rookery.errors import ModelError
from rookery.slots import CausalAttend, Segment, SlotRows, SlottedModel, load_model
from rookery.slots.linear import drop_pages
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


@pytest.mark.parametrize("kind", ARCHITECTURES)
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
