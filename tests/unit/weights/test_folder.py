"""PEFT folders: exact round trips, real peft as the judge, refusals that are sentences."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM, EvaConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraGAConfig, preprocess_loraga
from safetensors.torch import load_file, save_file
from tiny import tiny_adapter, write_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from rookery.errors import AdapterError
from rookery.types import Adapter, LoraFactors
from rookery.weights import adapter_version, make_adapter, read_adapter, write_adapter
from rookery.weights.folder import write_merged

Q0, V1, UP1 = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.1.mlp.up_proj",
)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def factors(rank: int, num_in: int, num_out: int, *, scale: float, seed: int = 0) -> LoraFactors:
    rng = torch.Generator().manual_seed(seed)
    return LoraFactors(
        a=torch.randn(rank, num_in, generator=rng),
        b=torch.randn(num_out, rank, generator=rng),
        scale=scale,
    )


def uneven_adapter() -> Adapter:
    """Another rank, scale and target set per layer: q of layer 0 only, v and up of layer 1 only."""
    return make_adapter(
        "uneven",
        base="tiny",
        factors={
            Q0: factors(2, 16, 16, scale=0.5, seed=1),
            V1: factors(3, 16, 8, scale=1 / 7, seed=2),
            UP1: factors(2, 16, 24, scale=2.0, seed=3),
        },
    )


def trained_folder(path: Path, **options: object) -> Path:
    """A folder as peft saves it, with B filled so that the delta is not zero."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]} | options)
    model = get_peft_model(tiny_llama(), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(path))
    return path


def edit_config(folder: Path, **changes: object) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    file = folder / "adapter_model.safetensors"
    merged = load_file(file) | changes
    save_file({k: v for k, v in merged.items() if v is not None}, file)
    return folder


def assert_same(left: Adapter, right: Adapter) -> None:
    assert list(left.factors) == list(right.factors)
    assert left.version == right.version
    for layer, lora in left.factors.items():
        other = right.factors[layer]
        assert torch.equal(lora.a, other.a) and torch.equal(lora.b, other.b)
        assert lora.a.dtype == other.a.dtype and lora.scale == other.scale


def test_round_trip_is_bit_equal_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    adapter = uneven_adapter()
    folder = write_adapter(adapter, tmp_path / "deep" / "uneven")
    assert_same(read_adapter(folder), adapter)
    assert read_adapter(folder).name == "uneven" and read_adapter(folder).base == "tiny"
    assert read_adapter(folder, name="poet").name == "poet"
    assert os.listdir(folder.parent) == ["uneven"]


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    """Also in their metadata: scales, a base of rookery's own name, a format."""
    adapter = replace(uneven_adapter(), base="smollm2")
    folders = [write_adapter(adapter, tmp_path / str(number)) for number in range(20)]
    assert len({(own / "adapter_model.safetensors").read_bytes() for own in folders}) == 1
    assert read_adapter(folders[0]).base == "smollm2"
    assert_same(read_adapter(folders[0]), adapter)


def hub_cache(path: Path, model: str) -> Path:
    """A Hugging Face cache that holds the tiny model under a hub id."""
    folder = path / f"models--{model.replace('/', '--')}"
    tiny_llama().save_pretrained(folder / "snapshots" / "0a1b")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0a1b")
    return path


def test_peft_finds_the_base_of_rookerys_own_name_and_the_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapter = replace(uneven_adapter(), base="smollm2")
    folder = write_adapter(adapter, tmp_path / "uneven")
    cache = hub_cache(tmp_path / "cache", "HuggingFaceTB/SmolLM2-135M-Instruct")
    model = AutoPeftModelForCausalLM.from_pretrained(
        str(folder), cache_dir=str(cache), local_files_only=True
    )
    assert model.peft_config["default"].r == 3
    assert read_adapter(folder).base == "smollm2"
    assert read_adapter(edit_config(folder, base_model_name_or_path="mine")).base == "mine"
    again = write_adapter(replace(adapter, base="Qwen/Qwen3-8B"), tmp_path / "other")
    assert json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "Qwen/Qwen3-8B"
    )


@given(
    scale=st.floats(1e-4, 1e4),
    rank=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_scale_rank_and_dtype_round_trips(
    tmp_path_factory: pytest.TempPathFactory, scale: float, rank: int, dtype: torch.dtype
) -> None:
    lora = factors(rank, 5, 4, scale=scale)
    lora = LoraFactors(a=lora.a.to(dtype), b=lora.b.to(dtype), scale=scale)
    adapter = make_adapter(
        "x", base="", factors={"layer": lora, "other": factors(2, 3, 3, scale=1)}
    )
    folder = tmp_path_factory.mktemp("round") / "x"
    assert_same(read_adapter(write_adapter(adapter, folder)), adapter)


def test_peft_loads_what_is_written_and_hits_exactly_those_layers(tmp_path: Path) -> None:
    adapter = uneven_adapter()
    folder = write_adapter(adapter, tmp_path / "uneven")
    base = {k: v.clone() for k, v in tiny_llama().state_dict().items()}
    merged = PeftModel.from_pretrained(tiny_llama(), str(folder)).merge_and_unload().state_dict()
    for key, weight in merged.items():
        layer = key.removesuffix(".weight")
        delta = weight - base[key]
        if layer in adapter.factors:
            lora = adapter.factors[layer]
            assert torch.allclose(delta, lora.scale * lora.b @ lora.a, atol=1e-5)
        else:
            assert not delta.any(), key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}},
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.v_proj": 2},
            "alpha_pattern": {"q_proj": 3},
        },
    ],
)
def test_what_peft_saves_has_the_delta_that_peft_applies(
    tmp_path: Path, options: dict[str, object]
) -> None:
    adapter = read_adapter(trained_folder(tmp_path / "saved", **options))
    base = {k: v.clone() for k, v in tiny_llama().state_dict().items()}
    model = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "saved"))
    merged = model.merge_and_unload().state_dict()
    changed = {k.removesuffix(".weight") for k, v in merged.items() if not torch.equal(v, base[k])}
    assert changed == set(adapter.factors)
    for layer, lora in adapter.factors.items():
        delta = merged[f"{layer}.weight"] - base[f"{layer}.weight"]
        assert torch.allclose(delta, lora.scale * lora.b @ lora.a, atol=1e-5)
    assert_same(read_adapter(write_adapter(adapter, tmp_path / "again")), adapter)


def test_keys_that_carry_the_adapter_name_are_read(tmp_path: Path) -> None:
    folder = write_adapter(uneven_adapter(), tmp_path / "x")
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {k.replace(".weight", ".default.weight"): v for k, v in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    assert set(read_adapter(folder).factors) == {Q0, V1, UP1}


def test_one_scale_for_all_layers_needs_no_pattern_to_be_right(tmp_path: Path) -> None:
    adapter = make_adapter(
        "x", base="", factors={"p": factors(2, 4, 4, scale=2.0), "q": factors(4, 4, 4, scale=2.0)}
    )
    config = json.loads(
        (write_adapter(adapter, tmp_path / "x") / "adapter_config.json").read_text()
    )
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert isinstance(config["lora_alpha"], int)


def test_an_edited_alpha_wins_over_the_recorded_scale(tmp_path: Path) -> None:
    adapter = make_adapter("x", base="", factors={"p": factors(3, 4, 4, scale=0.1234567)})
    folder = edit_config(write_adapter(adapter, tmp_path / "x"), lora_alpha=30)
    assert read_adapter(folder).factors["p"].scale == 10.0


def test_files_are_readable_by_others_and_a_folder_is_replaced(tmp_path: Path) -> None:
    folder = write_adapter(uneven_adapter(), tmp_path / "x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o644}
    other = make_adapter("x", base="", factors={"p": factors(1, 4, 4, scale=1.0)})
    assert_same(read_adapter(write_adapter(other, folder)), other)
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AdapterError, match="is not an adapter folder"):
        write_adapter(uneven_adapter(), tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = write_adapter(uneven_adapter(), tmp_path / "x")
    broken = make_adapter("y", base="", factors={"p": factors(1, 2, 2, scale=float("nan"))})
    with pytest.raises(AdapterError, match="scale of p is nan"):
        write_adapter(broken, folder)
    assert_same(read_adapter(folder), uneven_adapter())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is true"),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save holds \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "loftq"}, "is 'loftq', which .* init_lora_weights=True"),
        ({"init_lora_weights": "corda"}, "is 'corda', which .* path_initial_model"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, r"for rank 5 .* they must be \[5, in\] and \[out, 5\]"),
        ({"rank_pattern": {"q_proj[": 2}}, r"'q_proj\[' is not a regular expression"),
        ({"alpha_pattern": {"(": 2}}, r"'\(' is not a regular expression"),
    ],
)
def test_configs_that_are_not_plain_lora_are_refused(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    folder = edit_config(write_adapter(uneven_adapter(), tmp_path / "x"), **changes)
    with pytest.raises(AdapterError, match=sentence):
        read_adapter(folder)


INITS: dict[bool | str, dict[str, object]] = {
    "gaussian": {},
    "eva": {"eva_config": EvaConfig()},
    "orthogonal": {},
    "mica": {},
    "pissa_niter_2": {},
    "olora": {},
    "lora_ga": {"lora_ga_config": LoraGAConfig()},
}


@pytest.mark.filterwarnings("ignore")  # of peft: what a start asks of its user
@pytest.mark.parametrize("init", INITS)
def test_a_start_is_refused_iff_it_changes_the_base_weights(
    tmp_path: Path, init: bool | str
) -> None:
    config = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=init, **INITS[init])
    base = tiny_llama()
    before = base.get_parameter(f"{V1}.weight").clone()
    tokens = torch.tensor([[1, 2, 3]])
    if init == "lora_ga":
        preprocess_loraga(base, config, lambda: base(tokens, labels=tokens).loss.backward())
    model = get_peft_model(base, config)
    is_changed = not torch.equal(base.get_parameter(f"{V1}.base_layer.weight"), before)
    model.save_pretrained(str(tmp_path / "start"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1
    model.save_pretrained(str(tmp_path / "trained"))
    if not is_changed:
        read_adapter(tmp_path / "trained")
        return
    with pytest.raises(AdapterError, match=f"init_lora_weights is '{init}', which changes"):
        read_adapter(tmp_path / "trained")
    wanted = model(tokens).logits
    start = str(tmp_path / "start")
    model.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=start)
    folder = write_adapter(read_adapter(tmp_path / "plain"), tmp_path / "written")
    torch.testing.assert_close(
        PeftModel.from_pretrained(tiny_llama(), str(folder))(tokens).logits, wanted
    )


@pytest.mark.parametrize("text", ["[1]", "null", '{"p": "x"}', "{"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_adapter(uneven_adapter(), tmp_path / "x")
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"rookery_scales": text})
    with pytest.raises(AdapterError, match="is not a readable safetensors file"):
        read_adapter(folder)


A_KEY, B_KEY = f"base_model.model.{Q0}.lora_A.weight", f"base_model.model.{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({A_KEY: None}, f"{Q0} has no lora_A.weight"),
        ({B_KEY: None}, f"{Q0} has no lora_B.weight"),
        ({A_KEY: torch.zeros(2, 16, 1)}, r"lora_A \[2, 16, 1\]"),
        ({B_KEY: torch.zeros(16, 3)}, r"lora_B \[16, 3\]"),
        ({A_KEY: torch.full((2, 16), torch.nan)}, f"lora_A of {Q0} holds NaN"),
        ({B_KEY: torch.full((16, 2), torch.inf)}, f"lora_B of {Q0} holds NaN or inf"),
        ({A_KEY: torch.zeros(2, 16, dtype=torch.int8)}, "is torch.int8"),
        ({f"base_model.model.{Q0}.lora_magnitude_vector": torch.zeros(1)}, "This is DoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(1)}, "embeddings"),
        ({f"base_model.model.{Q0}.lora_B.bias": torch.zeros(1)}, "Biases"),
        ({"base_model.model.model.embed_tokens.weight": torch.zeros(1)}, "save_embedding_layers"),
        ({"base_model.model.lm_head.weight": torch.zeros(1)}, "save_embedding_layers"),
        ({f"base_model.model.{Q0}.lora_A.default.weight": torch.zeros(2, 16)}, "is repeated"),
    ],
)
def test_tensors_that_are_not_plain_lora_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], sentence: str
) -> None:
    folder = edit_tensors(write_adapter(uneven_adapter(), tmp_path / "x"), changes)
    with pytest.raises(AdapterError, match=sentence):
        read_adapter(folder)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapted_output_layer_is_read_as_peft_saves_it(tmp_path: Path) -> None:
    """peft adds the base model's own output layer to the file, which is no part of the adapter."""
    folder = trained_folder(tmp_path / "head", target_modules=["q_proj", "lm_head"])
    copied = "base_model.model.lm_head.base_layer.weight"
    assert copied in load_file(folder / "adapter_model.safetensors")
    adapter = read_adapter(folder)
    assert {layer.rpartition(".")[2] for layer in adapter.factors} == {"q_proj", "lm_head"}
    again = write_adapter(adapter, tmp_path / "again")
    tokens = torch.tensor([[1, 2, 3]])
    saved, written = (
        PeftModel.from_pretrained(tiny_llama(), str(path))(tokens).logits
        for path in (folder, again)
    )
    assert torch.equal(saved, written)
    assert not torch.equal(saved, tiny_llama()(tokens).logits)


def test_missing_and_unreadable_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config.json; an adapter is a folder"):
        read_adapter(tmp_path / "nowhere")
    folder = write_adapter(uneven_adapter(), tmp_path / "x")
    (folder / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(AdapterError, match="is not a readable safetensors file"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="does not parse"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="holds list"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model.safetensors"):
        read_adapter(folder)


def test_an_adapter_without_layers_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has no layers"):
        write_adapter(make_adapter("x", base="", factors={}), tmp_path / "x")


def test_version_depends_on_content_alone() -> None:
    lora = factors(2, 4, 6, scale=1.0)
    version = adapter_version({"p": lora, "q": lora})
    assert len(version) == 16 and int(version, 16) >= 0
    strided = LoraFactors(a=lora.a.T.contiguous().T, b=lora.b, scale=1.0)
    assert adapter_version({"q": lora, "p": strided}) == version
    nudged = lora.a.clone()
    nudged[0, 0] = torch.nextafter(nudged[0, 0], torch.tensor(9.0))
    others = [
        {"p": lora, "r": lora},
        {"p": lora},
        {"p": lora, "q": LoraFactors(a=lora.a, b=lora.b, scale=1.5)},
        {"p": lora, "q": LoraFactors(a=nudged, b=lora.b, scale=1.0)},
        {"p": lora, "q": LoraFactors(a=lora.a.half(), b=lora.b, scale=1.0)},
        {"p": lora, "q": LoraFactors(a=lora.a.reshape(4, 2), b=lora.b, scale=1.0)},
    ]
    assert version not in {adapter_version(other) for other in others}


# Adapters merged into model folders.


def test_every_file_of_a_model_is_merged(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    split = tmp_path / "split"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(
        split, max_shard_size="40KB"
    )
    adapter = tiny_adapter("poet")
    write_merged(split, adapter, tmp_path / "merged")
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        assert (tmp_path / "merged" / file).stat().st_mode & 0o777 == 0o644
        before, after = load_file(split / file), load_file(tmp_path / "merged" / file)
        assert before.keys() == after.keys()
        for name, weight in before.items():
            own = adapter.factors.get(name.removesuffix(".weight"))
            delta = 0.0 if own is None else own.scale * (own.b @ own.a)
            assert torch.allclose(after[name], weight + delta, atol=1e-6), name


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    adapter = tiny_adapter("poet", layers=range(5))
    with pytest.raises(AdapterError, match=r"adapts model\.layers\.4"):
        write_merged(folder, adapter, tmp_path / "merged")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({}))
    with pytest.raises(AdapterError, match=r"no \.safetensors"):
        write_merged(tmp_path / "empty", adapter, tmp_path / "other")


def _move_output_layer(folder: Path) -> None:
    """Into a file behind that of the embeddings, as large models have it."""
    weights = load_file(folder / "model.safetensors")
    parts = {"model-1.safetensors": weights, "model-2.safetensors": {}}
    for name in [name for name in weights if name.startswith(("lm_head", "model.norm"))]:
        parts["model-2.safetensors"][name] = weights.pop(name)
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = {name: file for file, tensors in parts.items() for name in tensors}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
def test_an_output_layer_in_any_file_is_merged(tmp_path: Path, is_tied: bool) -> None:
    """Whether it has weights of its own, which are in another file than the embeddings, or those of
    the embeddings: the merged model answers as the model with the adapter does."""
    folder = write_tiny_model(tmp_path / "tiny", tie_word_embeddings=is_tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    split = shutil.copytree(folder, tmp_path / "split")
    _move_output_layer(split)
    own = LoraFactors(a=torch.randn(2, 32), b=torch.randn(97, 2), scale=0.5)
    adapter = make_adapter("poet", base="tiny", factors={"lm_head": own})
    write_merged(split, adapter, tmp_path / "merged")
    tokens = torch.arange(4, 40)[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        expected = model(tokens).logits + own.scale * hidden @ own.a.T @ own.b.T
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(tokens).logits, expected, atol=1e-4)
