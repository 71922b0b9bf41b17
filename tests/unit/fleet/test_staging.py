"""Adapters on their way to the servers: folders, buffers, names, and what fits."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet.adapters import K, Q, make_small, write_model
from safetensors.numpy import save_file

from rookery.errors import AdapterError
from rookery.fleet.http.capabilities import Fit, check_fit, read_head, read_shapes
from rookery.fleet.perturbed import StepPopulation
from rookery.fleet.residency import claim_folder
from rookery.fleet.staging import BufferFile, Staging, buffer_layout, open_staging
from rookery.fleet.vllm_plugin.population import CENTRE, NUMBERS
from rookery.fleet.vllm_plugin.shared_memory import MANIFEST, factor_view, open_buffer
from rookery.types import LoraFactors, ModelRef
from rookery.weights import make_adapter, read_adapter

REF = ModelRef(name="gen 3/child*7", version="3fa9")


def test_names_are_fit_for_paths_and_nobody_else_s(tmp_path: Path) -> None:
    poet = ModelRef(name="poet", version="3fa9")
    with open_staging(tmp_path) as one, open_staging(tmp_path) as two:
        assert one.wire_name(poet) == f"poet@3fa9~{one.owner.token}"
        refs = (REF, replace(REF, version="3fb"))
        names = [staging.wire_name(ref) for staging in (one, two) for ref in refs]
    assert len(set(names)) == 4 and not any("/" in name for name in names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_both_ways_carry_the_same_numbers(tmp_path: Path, dtype: str, own: torch.dtype) -> None:
    """What a server reads from the PEFT folder and casts is what it finds in the buffer."""
    made = make_small("a", seed=3, rank=3, scale=1.7)
    factors = {
        n: LoraFactors(a=f.a.to(own), b=f.b.to(own), scale=f.scale) for n, f in made.factors.items()
    }
    adapter = make_adapter("a", base="x", factors=factors)
    with open_staging(tmp_path / "shared") as staging:
        folder = staging.peft_folder(REF, adapter, base="server/model")
        buffer = staging.buffer_folder(REF, adapter, dtype=dtype)
        assert staging.peft_folder(REF, adapter, base="server/model") == folder
        assert staging.buffer_folder(REF, adapter, dtype=dtype) == buffer
        read = read_adapter(folder)
        assert read.base == "server/model"
        manifest = json.loads((buffer / MANIFEST).read_text())
        memory = open_buffer(buffer, manifest, ()).on(torch.device("cpu"))
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    for name, rank, size_in, size_out, at_a, at_b in json.loads(manifest["layers"]):
        lora = read.factors[name]
        assert lora.scale == 1 and (at_a % 256, at_b % 256) == (0, 0)
        a = factor_view(memory, at_a, (rank, size_in))
        b = factor_view(memory, at_b, (size_out, rank))
        assert torch.equal(a, lora.a.to(kind)) and torch.equal(b, lora.b.to(kind))
        exact = adapter.factors[name].b.float() * 1.7
        assert torch.allclose(b.float(), exact, rtol=1e-2)


def test_servers_that_need_an_adapter_at_the_same_time_get_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, together = make_small("a"), threading.Barrier(4)
    writes: list[Path] = []
    write = Staging.write_buffer

    def count(self: Staging, temporary: Path, *rest: Any) -> None:
        writes.append(temporary)
        write(self, temporary, *rest)

    monkeypatch.setattr(Staging, "write_buffer", count)

    def ask(staging: Staging) -> tuple[Path, Path]:
        together.wait(30)
        buffer = staging.buffer_folder(REF, adapter, dtype="float32")
        together.wait(30)
        return buffer, staging.peft_folder(REF, adapter, base="x")

    with open_staging(tmp_path) as staging, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert len(set(pool.map(ask, [staging] * 4))) == 1
            staging.remove(REF)
    assert len(writes) == 5


def test_removing_removes_one_adapter_alone(tmp_path: Path) -> None:
    other = replace(REF, version="3fa9.float32.buffers")
    with open_staging(tmp_path) as staging:
        for ref in (REF, other):
            staging.peft_folder(ref, make_small("a"), base="")
            staging.buffer_folder(ref, make_small("a"), dtype="float32")
        staging.remove(REF)
        left = [path.name for path in staging.root.iterdir() if path.is_dir()]
        assert len(left) == 2
        assert all(name.startswith(staging.wire_name(other)) for name in left)


def test_folders_that_a_server_may_know_of_or_that_others_judge_stay(tmp_path: Path) -> None:
    known = leave_behind(tmp_path, servers=("http://127.0.0.1:9",))
    elsewhere = leave_behind(tmp_path, servers=())
    (elsewhere / ".owner").write_text("another machine\n")
    unfinished = leave_behind(tmp_path, servers=())
    (unfinished / ".owner").write_text("")
    with open_staging(tmp_path):
        pass
    assert set(tmp_path.iterdir()) == {known, elsewhere, unfinished}


def leave_behind(parent: Path, *, servers: tuple[str, ...]) -> Path:
    """What a killed process leaves: its folder, with a record that nobody holds."""
    with claim_folder(parent) as owner:
        for url in servers:
            owner.note_server(url)
        record = (owner.folder / ".owner").read_text()
    owner.folder.mkdir(exist_ok=True)
    (owner.folder / ".owner").write_text(record)
    return owner.folder


def test_unknown_dtypes_and_places_are_refused(tmp_path: Path) -> None:
    with open_staging(tmp_path) as staging, pytest.raises(AdapterError, match="float8"):
        staging.buffer_folder(REF, make_small("a"), dtype="float8")
    elsewhere = make_small("a")
    factors = {
        layer: replace(lora, a=lora.a.to("meta"), b=lora.b.to("meta"))
        for layer, lora in elsewhere.factors.items()
    }
    refused = pytest.raises(AdapterError, match=r"on meta.*in_place: false")
    with open_staging(tmp_path, in_place=True) as staging, refused:
        staging.buffer_folder(REF, replace(elsewhere, factors=factors), dtype="float32")


def test_shapes_are_read_from_the_headers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    assert read_shapes(folder) == {Q: (32, 32), K: (32, 16)}
    (folder / "config.json").write_text('{"quantization_config": {}}')
    assert read_shapes(folder) == {}
    assert read_shapes(tmp_path / "nowhere") == {}
    (folder / "config.json").write_text("{}")
    (folder / "more.safetensors").write_bytes(b"\xff" * 20)
    assert read_shapes(folder) == {}


def test_the_output_layer_of_a_tied_model_has_the_embeddings_shape(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    assert read_head(folder) == {"lm_head": (32, 97)}
    save_file({"lm_head.weight": np.zeros((97, 32), np.float32)}, folder / "head.safetensors")
    assert read_head(folder) == {} and read_shapes(folder)["lm_head"] == (32, 97)
    assert read_head(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("size", [97, 98])
def test_an_adapted_output_layer_fits_by_the_vocabulary(size: int) -> None:
    fit = Fit(base_names=frozenset(), max_rank=8, shapes={Q: (32, 32)}, head={"lm_head": (32, 97)})
    head = LoraFactors(a=torch.zeros(2, 32), b=torch.zeros(size, 2), scale=1.0)
    adapter = make_adapter("a", base="", factors={"lm_head": head})
    if size == 97:
        assert check_fit(adapter, fit) is adapter
    else:
        with pytest.raises(AdapterError, match="maps 32 to 98; this model's maps 32 to 97"):
            check_fit(adapter, fit)
    assert check_fit(adapter, replace(fit, head=None)) is adapter, "left to the servers"
    with pytest.raises(AdapterError, match="vLLM on the CPU applies an adapted output layer to"):
        check_fit(adapter, replace(fit, has_wrong_head=True))


@pytest.mark.parametrize(
    ("given", "of_files"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.vision_tower.encoder.fc1", "vision_tower.vision_model.encoder.fc1"),
        ("lm_head", "language_model.lm_head"),
    ],
)
def test_layers_are_sent_by_the_names_of_the_weight_files(given: str, of_files: str) -> None:
    """As transformers 5 and older ones, and weight files, name the layers of multimodal models."""
    shapes = {of_files: (32, 16), Q: (32, 32)}
    fit = Fit(base_names=frozenset(), max_rank=8, shapes=shapes, head={})
    factors = LoraFactors(a=torch.zeros(2, 32), b=torch.zeros(16, 2), scale=1.0)
    adapter = make_adapter("a", base="", factors={given: factors})
    fitted = check_fit(adapter, fit)
    assert list(fitted.factors) == [of_files] and fitted.version == adapter.version
    with pytest.raises(AdapterError, match=r"adapts .* twice"):
        check_fit(make_adapter("a", base="", factors={given: factors, of_files: factors}), fit)
    two = {of_files: (32, 16), f"model.{of_files}": (32, 16)}
    adapter = make_adapter("a", base="", factors={f"model.model.{of_files}": factors})
    with pytest.raises(AdapterError, match="not a linear layer here"):
        check_fit(adapter, replace(fit, shapes=two))


def test_layers_that_the_servers_do_not_adapt_are_refused() -> None:
    fit = Fit(base_names=frozenset({"tiny"}), max_rank=8, shapes={}, targets=("q_proj", "k_proj"))
    adapter = replace(make_small("a"), base="tiny")
    check_fit(adapter, fit)
    with pytest.raises(AdapterError, match=r"adapt only q_proj: add its kind"):
        check_fit(adapter, replace(fit, targets=("q_proj",)))


def test_many_adapters_of_a_size_are_each_written_whole(tmp_path: Path) -> None:
    with open_staging(tmp_path) as staging:
        for seed in range(5):
            ref = replace(REF, version=str(seed))
            adapter = make_small("a", seed=seed, rank=2 + seed // 3, scale=1.0)
            folder = staging.buffer_folder(ref, adapter, dtype="float32")
            manifest = json.loads((folder / MANIFEST).read_text())
            memory = open_buffer(folder, manifest, ()).on(torch.device("cpu"))
            name, rank, size_in, _, at_a, _ = json.loads(manifest["layers"])[0]
            assert torch.equal(factor_view(memory, at_a, (rank, size_in)), adapter.factors[name].a)
        names = {path.name for path in staging.root.iterdir() if not path.is_dir()}
        assert names == {".owner"}, "nothing is left beside the folders"


@pytest.mark.parametrize(
    ("own", "rank", "scales"),
    [
        (torch.float32, 3, (1.7, 1.7)),
        (torch.bfloat16, 64, (1.7, 1.7)),
        (torch.bfloat16, 3, (1.7, 0.3)),
    ],
    ids=["padded", "without padding", "two scales"],
)
def test_a_gpu_s_buffer_holds_the_numbers_of_a_file(
    own: torch.dtype, rank: int, scales: tuple[float, float]
) -> None:
    made = make_small("a", seed=3, rank=rank)
    adapter = replace(
        made,
        factors={
            name: LoraFactors(a=lora.a.to(own), b=lora.b.to(own), scale=scale)
            for (name, lora), scale in zip(made.factors.items(), scales, strict=True)
        },
    )
    on_gpu = buffer_layout(adapter, "bfloat16", is_on_host=False)
    memory = torch.zeros(on_gpu.num_bytes, dtype=torch.uint8)
    on_gpu.fill_scaled(memory)
    numbers = memory.view(torch.bfloat16)
    for name, own_rank, size_in, size_out, at_a, at_b in on_gpu.layers:
        lora = adapter.factors[name]
        a = factor_view(numbers, at_a, (own_rank, size_in))
        b = factor_view(numbers, at_b, (size_out, own_rank))
        assert torch.equal(a, lora.a.to(torch.bfloat16))
        assert torch.equal(b, (lora.b * lora.scale).to(torch.bfloat16))


def test_files_without_unnamed_ones_get_a_name_and_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError("not here")
        return opened(path, flags, mode)

    opened = os.open
    monkeypatch.setattr("rookery.fleet.staging.os.open", refuse)
    file = BufferFile(tmp_path, 4096)
    file.memory.fill_(7)
    file.name(tmp_path / "a.bin")
    other = BufferFile(tmp_path, 4096)
    assert len(list(tmp_path.iterdir())) == 2
    del file, other
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"\7" * 4096]


def test_the_last_member_of_a_centre_goes_while_others_come(
    tmp_path: Path,
) -> None:
    centre = make_small("a", seed=3)
    population = StepPopulation.around(centre, like=centre, rank=1)

    def come_and_go(seed: int) -> None:
        member = population.member(f"m{seed}", seed=seed, amount=0.1)
        ref = ModelRef(name=member.name, version=member.version)
        for _ in range(8):
            folder = Path(json.loads(staging.member_text(ref, member))["centre"])
            assert sorted(path.name for path in folder.iterdir()) == [NUMBERS, CENTRE]
            staging.remove(ref)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with open_staging(tmp_path) as staging, ThreadPoolExecutor(8) as pool:
            list(pool.map(come_and_go, range(8)))
            assert [path.name for path in staging.root.iterdir()] == [".owner"]
    finally:
        sys.setswitchinterval(before)
