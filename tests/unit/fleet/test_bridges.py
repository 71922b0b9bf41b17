"""Weights published to stub servers: proved, or the fault is named."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from fleet.sharing import (
    PACKED,
    ROUTES,
    SHAPES,
    SharingStub,
    ask,
    expected,
    first_weights,
    fleet_of,
    said_of,
    training,
)
from fleet.stub import logprobs_after, serve
from marks import long
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.errors import FleetError
from rookery.fleet import open_fleet
from rookery.fleet.bridges import alias
from rookery.fleet.bridges.adapter import CopyBridge
from rookery.fleet.bridges.alias import MergeBridge, SharedBase, alias_weights, share_base
from rookery.fleet.bridges.update import Canary
from rookery.fleet.routing.paused import VERSION
from rookery.slots import CausalAttend, SlottedModel, load_model
from rookery.slots.loading import attach_model, weight_shapes
from rookery.types import Adapter, LoraFactors, ModelRef, ModelWeights


async def test_all_servers_compute_with_the_memory_of_the_trainer() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet, training(fleet) as trainer:
        for _ in range(5):
            ref = await trainer.step()
            assert fleet.base == ref
            assert {stub.version_name for stub in stubs} == {ref.version}
            row = logprobs_after("tiny" + said_of(trainer.weights), (1, 2))
            assert await ask(fleet, ref) == row.index(max(row))
        sums = {said_of(stub.tensors) for stub in stubs}
        assert sums == {said_of(trainer.weights)} != {said_of(first_weights())}
        assert all(stub.num_pauses == 5 for stub in stubs)


async def test_what_is_in_flight_is_kept_while_weights_change() -> None:
    stub = SharingStub(latency_s=0.05)
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        first = await trainer.step()
        asked = asyncio.create_task(ask(fleet, first))
        await stub.wait_in_flight(1)
        await trainer.step()
        await asked
        with pytest.raises(FleetError, match="step-1 is not loaded"):
            await ask(fleet, first)


FAULTS = {
    "keys and values cached for older weights": {"keeps_prefixes": True},
    "keeps the old output layer": {"packed_copy": "lm_head.weight"},
}


@pytest.mark.parametrize("said", FAULTS)
async def test_the_canary_stops_a_server_that_computes_with_older_weights(said: str) -> None:
    stub = SharingStub(**FAULTS[said])  # type: ignore[arg-type]
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        with pytest.raises(FleetError, match=said) as raised:
            for _ in range(2):
                await trainer.step()
        assert stub.url in str(raised.value)
        assert not fleet.pool.replicas[0].load.is_open


async def test_a_weight_that_is_no_alias_is_named() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        await trainer.step()
        stub.tensors["lm_head.weight"] = stub.tensors["lm_head.weight"].clone()
        with pytest.raises(FleetError, match=r"first weight that differs is lm_head\.weight"):
            await trainer.step()


async def test_a_publication_that_is_cancelled_twice_leaves_no_server_paused() -> None:
    """As by a second Ctrl-C, while the server is told to go on."""
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet, training(fleet) as trainer:
        is_changing = asyncio.Event()

        async def publish() -> None:
            async with trainer.bridge.changing_base():
                is_changing.set()
                await asyncio.Event().wait()

        publishing = asyncio.create_task(publish())
        await is_changing.wait()
        for _ in range(2):
            publishing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert not stub.is_paused


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (SharingStub(refusal="its weights are quantised (fp8)"), "quantised .*bridge: copy"),
        (SharingStub(routes=("/v1/completions",)), "does not share its weights"),
    ],
)
async def test_servers_that_cannot_share_say_why(stub: SharingStub, said: str) -> None:
    if "/collective_rpc" not in stub.routes:
        stub.refusal = "no extension"
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet:
        with pytest.raises(FleetError, match=said):
            await share_base(fleet)


async def test_weights_are_copied_to_servers_and_proved() -> None:
    stubs = [SharingStub(), SharingStub()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet:
        bridge = CopyBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))
        for step in range(3):
            tensors = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}

            async def logprobs(
                canary: Canary, tensors: dict[str, torch.Tensor] = tensors
            ) -> Sequence[float]:
                return expected(tensors, canary)

            weights = ModelWeights(name="policy", tensors=tensors, version=str(step))
            ref = await bridge.replace_base(weights, logprobs)
            assert ref == fleet.base == ModelRef(name="policy", version=str(step))
            assert {said_of(stub.tensors) for stub in stubs} == {said_of(tensors)}
        stubs[0].ignores_loads = True
        tensors["lm_head.weight"] += 1
        weights = ModelWeights(name="policy", tensors=tensors, version="last")
        with pytest.raises(FleetError, match=rf"1 of 2 servers .*{stubs[0].url}"):
            await bridge.replace_base(weights, logprobs)


async def test_prefixes_are_forgotten_while_others_have_requests_in_flight() -> None:
    """They are not waited for, and a server forgets nothing that runs unless it is told to."""
    stub = SharingStub(routes=tuple(route for route in ROUTES if route != VERSION))
    async with (
        serve(stub),
        open_fleet(fleet_of(stub)) as fleet,
        aiohttp.ClientSession(stub.url) as session,
    ):
        bridge = CopyBridge(fleet, canary=Canary.of(fleet.capabilities, is_float32=True))

        async def publish(value: float) -> None:
            tensors = {name: torch.full(shape, value) for name, shape in SHAPES.items()}

            async def logprobs(canary: Canary) -> Sequence[float]:
                return expected(tensors, canary)

            weights = ModelWeights(name="policy", tensors=tensors, version=str(value))
            await bridge.replace_base(weights, logprobs)

        await publish(1.0)
        stub.latency_s = 60.0
        asking = asyncio.create_task(session.post("/v1/completions", json={"model": "tiny"}))
        await stub.wait_in_flight(1)
        stub.latency_s = 0.0
        await publish(2.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def test_the_memory_of_a_server_that_died_is_not_opened() -> None:
    gone = {"packed": {}, "path": "/proc/4194305/fd/3", "bytes": 256, "tensors": {}}
    with pytest.raises(FleetError, match=r"weights cannot be opened here.*bridge: copy"):
        SharedBase(gone)


LAYERS = [name.removesuffix(".weight") for name in SHAPES if name != "lm_head.weight"]


def merging_adapter(version: str, *layers: str) -> Adapter:
    factors = {
        layer: LoraFactors(a=torch.full((1, 3), 2.0), b=torch.full((2, 1), 0.25), scale=0.5)
        for layer in layers
    }
    return Adapter(name="policy", base="", factors=factors, version=version)


async def test_an_adapter_is_added_to_the_weights_of_the_servers() -> None:
    stub = SharingStub()
    async with serve(stub), open_fleet(fleet_of(stub)) as fleet:
        shared = await share_base(fleet)
        served = {layer: shared.find(SHAPES)[f"{layer}.weight"] for layer in LAYERS}
        base = {layer: weight.clone() for layer, weight in served.items()}
        canary = Canary.of(fleet.capabilities, is_float32=True)
        wrong: list[float] = []

        async def logprobs(adapter: Adapter) -> Sequence[float]:
            merged = {
                f"{layer}.weight": weight + 0.25 * (layer in adapter.factors)
                for layer, weight in base.items()
            }
            whole = merged | {"lm_head.weight": torch.ones(3)}
            return wrong or expected(whole, canary)

        bridge = MergeBridge(fleet, shared, base=base, canary=canary, logprobs=logprobs)
        served[LAYERS[0]] += 1  # of a run that was killed
        for layers in ([LAYERS[1]], LAYERS[:2], []):
            adapter = merging_adapter(f"step-{len(layers)}", *layers)
            ref = await bridge.publish(adapter)
            assert fleet.base == ref == ModelRef(name="policy", version=adapter.version)
            for layer in LAYERS:
                assert torch.equal(served[layer], base[layer] + 0.25 * (layer in layers))
            await ask(fleet, ref)
        wrong[:] = [-1.0] * len(canary.ids)
        with pytest.raises(FleetError, match="took the new weights but computes with others"):
            await bridge.publish(merging_adapter("step-9", *LAYERS))


class _OnGpu(SharingStub):
    """Has memory of its own, which no file names."""

    def _share(self, source: str) -> dict[str, Any]:
        return {"packed": PACKED, "owner": self.url}


async def test_an_adapter_is_added_to_each_of_several_servers_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stubs = [_OnGpu(), _OnGpu()]
    async with serve(*stubs), open_fleet(fleet_of(*stubs)) as fleet:
        memory = {stub.url: stub.tensors for stub in stubs}
        monkeypatch.setattr(alias, "open_tensors", lambda manifest: memory[manifest["owner"]])
        with pytest.raises(FleetError, match="one server on a GPU, and the fleet has 2"):
            await share_base(fleet)
        shared = await share_base(fleet, may_copy=True)
        views = shared.find(SHAPES)
        base = {layer: views[f"{layer}.weight"].clone() for layer in LAYERS}

        async def logprobs(_: Adapter) -> Sequence[float]:
            return expected(views, canary)

        canary = Canary.of(fleet.capabilities, is_float32=True)
        bridge = MergeBridge(fleet, shared, base=base, canary=canary, logprobs=logprobs)
        await bridge.publish(merging_adapter("step-1", LAYERS[1]))
        first, second = (stub.tensors["layers.0.qkv_proj.weight"] for stub in stubs)
        assert torch.equal(first, second)
        assert not torch.equal(first, first_weights()["layers.0.qkv_proj.weight"])
        second += 1
        with pytest.raises(FleetError, match="1 of 2 servers did not get the new weights"):
            stubs[1].tensors = {name: t.clone() for name, t in stubs[1].tensors.items()}
            await bridge.publish(merging_adapter("step-2", LAYERS[0]))


# A model over weights in a server's layout.


QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
LLAMA = {**QKV, "gate_up_proj": ["gate_proj", "up_proj"]}
FAMILIES = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "Mistral": LLAMA,
    "Gemma": LLAMA,
    "Gemma2": LLAMA,
    "Starcoder2": QKV,
    "Phi3": {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_up_proj"]},
    "Phi": QKV,
}
EXTRA: dict[str, dict[str, Any]] = {
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
}
"""The families of models that can be aliased, with what vLLM fuses of them."""


def served_weights(folder: Path, packed: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """As vLLM lays them out: fused, the vocabulary padded, tied weights under both names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    served: dict[str, torch.Tensor] = {}
    for name, tensor in plain.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        fused = next((f for f, parts in packed.items() if leaf in parts and f != leaf), None)
        if fused is None:
            served[name] = tensor
        elif leaf == packed[fused][0]:
            parts = [plain[f"{parent}.{part}.{kind}"] for part in packed[fused]]
            served[f"{parent}.{fused}.{kind}"] = torch.cat(parts)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in served:
            served[name] = torch.cat([served[name], torch.zeros(31, served[name].shape[1])])
    served.setdefault("lm_head.weight", served["model.embed_tokens.weight"])
    return served


def logits(model: SlottedModel) -> torch.Tensor:
    tokens = torch.arange(4, 24)
    with torch.no_grad():
        hidden = model.layers(
            model.embed(tokens), torch.arange(20), attend=CausalAttend([20], device=model.device)
        )
        return model.logits(hidden)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("Gemma2", "Phi3") else long) for kind in FAMILIES],
)
def test_a_model_over_a_servers_weights_is_the_model_of_the_folder(
    kind: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / kind, kind, **EXTRA.get(kind, {}))
    served = served_weights(folder, FAMILIES[kind])
    attached = attach_model(folder, lambda shapes: alias_weights(served, FAMILIES[kind], shapes))
    loaded = load_model(folder)
    assert torch.equal(logits(attached), logits(loaded))
    assert attached.weights.keys() == loaded.weights.keys()
    inside = {
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in served.values()
    }
    for name, weight in attached.weights.items():
        begin = weight.data_ptr()
        assert any(start <= begin < start + size for start, size in inside), f"{name} is a copy"
    for tensor in served.values():
        tensor.mul_(0.5)
    assert not torch.equal(logits(attached), logits(loaded)), "it sees what the server's become"


def test_tied_weights_are_asked_for_once(tmp_path: Path) -> None:
    """vLLM's Gemma 2 has no output layer by name: it computes with its embeddings."""
    tied = write_tiny_model(tmp_path / "tied", "Gemma2", head_dim=8)
    assert weight_shapes(tied).keys() == load_model(tied).weights.keys()
    assert "lm_head.weight" not in weight_shapes(tied)
    apart = write_tiny_model(tmp_path / "apart", "Gemma2", head_dim=8, tie_word_embeddings=False)
    assert "lm_head.weight" in weight_shapes(apart)


def test_a_weight_without_a_view_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    served = served_weights(folder, LLAMA)
    shapes = {n: tuple(p.shape) for n, p in load_model(folder).weights.items()}
    missing = {n: t for n, t in served.items() if n != "model.layers.1.self_attn.qkv_proj.weight"}
    with pytest.raises(FleetError, match=r"no weight that is model\.layers\.1\.self_attn\.q_proj"):
        alias_weights(missing, LLAMA, shapes)
    more = served | {"model.layers.0.self_attn.W_UK": torch.ones(3)}
    with pytest.raises(FleetError, match=r"W_UK \(3,\) is not in the model's folder"):
        alias_weights(more, LLAMA, shapes)
    narrow = served | {"model.norm.weight": torch.ones(7)}
    with pytest.raises(FleetError, match=r"model\.norm\.weight is \(32,\) .* and \(7,\)"):
        alias_weights(narrow, LLAMA, shapes)
    short = served | {"model.layers.0.mlp.gate_up_proj.weight": torch.ones(100, 32)}
    with pytest.raises(FleetError, match=r"gate_up_proj\.weight has 100 rows, and .* have 128"):
        alias_weights(short, LLAMA, shapes)
