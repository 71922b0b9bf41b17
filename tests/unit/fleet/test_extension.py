"""The worker extension against stand-ins of the vLLM classes that it meets."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from fleet.adapters import K, Q, make_small
from fleet.stub import Stub, serve

from rookery.errors import FleetError
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.fleet.perturbed import StepPopulation
from rookery.fleet.routing.replica import Replica
from rookery.fleet.servers.settings import FleetConfig, LaunchConfig
from rookery.fleet.staging import open_staging
from rookery.fleet.vllm_plugin.extension import WorkerExtension, install_output_layer
from rookery.fleet.vllm_plugin.population import CENTRE
from rookery.fleet.vllm_plugin.shared_memory import BUFFER, MANIFEST
from rookery.fleet.vllm_plugin.whole_graphs import agree_on_queries
from rookery.types import Adapter, LoraFactors, ModelRef

NUM_SLOTS, RANK = 2, 4
Value = TypeVar("Value")


class Linear:
    """A layer with slots that writes them as vLLM's does, factor by factor."""

    def __init__(self, sizes_out: tuple[int, ...], size_in: int) -> None:
        self.n_slices, self.tp_size = len(sizes_out), 1
        self.lora_a_stacked = tuple(
            torch.full((NUM_SLOTS, 1, RANK, size_in), 9.0) for _ in sizes_out
        )
        self.lora_b_stacked = tuple(torch.full((NUM_SLOTS, 1, n, RANK), 9.0) for n in sizes_out)

    def reset_lora(self, index: int) -> None:
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.reset_lora(index)
        for i in range(self.n_slices):
            for stacked, factors in ((self.lora_a_stacked, lora_a), (self.lora_b_stacked, lora_b)):
                factor = factors[i] if isinstance(factors, list) else factors
                if factor is not None:
                    stacked[i][index, 0, : factor.shape[0], : factor.shape[1]] = factor


class Merged(Linear):
    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        super().set_lora(index, lora_a, lora_b)


class Mapper:
    """Stacks q and k unless it is asked for renames alone, under one of two names."""

    def __init__(self, method: str) -> None:
        if method:
            setattr(self, method, lambda: None)


class LayerWeights:
    def __init__(
        self, name: str, rank: int, alpha: int, a: object, b: object, *, scaling: float
    ) -> None:
        self.module_name, self.rank, self.lora_a, self.lora_b = name, rank, a, b
        assert scaling == 1.0


def parse_name(name: str, mapper: Mapper | None) -> tuple[str, bool]:
    own = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    return (own if mapper is None else own.replace("q_proj", "qk").replace("k_proj", "qk")), True


class Used(dict[int, Value]):
    """vLLM's cache, in the order of use."""

    def touch(self, key: int) -> None:
        self[key] = self.pop(key)


class Inner:
    """The inner of a worker's two managers: a packed layer `qk` of q and k, and a layer `o`."""

    def __init__(self, mapper: Mapper | None, *, tp_size: int) -> None:
        parent = Q.rpartition(".")[0]
        self.packed = f"{parent}.qk"
        self.model = SimpleNamespace(hf_to_vllm_mapper=mapper)
        self.supported_lora_modules = ["qk", "o_proj"]
        self.packed_modules_mapping = {"qk": ["q_proj", "k_proj"]}
        self.modules = {self.packed: Merged((32, 16), 32), f"{parent}.o_proj": Linear((32,), 32)}
        for module in self.modules.values():
            module.tp_size = tp_size
        self._registered_adapters: Used[Any] = Used()
        self._active_adapters: Used[None] = Used()
        self.slots: list[int | None] = [None] * NUM_SLOTS

    def _create_merged_loras_inplace(self, model: Any) -> None:
        next(iter(model.loras.values()))  # vLLM takes it for granted that there is one
        parts = [model.loras.pop(name, None) for name in (Q, K)]
        model.loras[self.packed] = SimpleNamespace(
            lora_a=[part and part.lora_a for part in parts],
            lora_b=[part and part.lora_b for part in parts],
        )

    def activate_adapter(self, lora_id: int) -> bool:
        if lora_id in self._active_adapters:
            return False
        if None not in self.slots:
            self.deactivate_adapter(next(iter(self._active_adapters)))
        index = self.slots.index(None)
        self.slots[index] = lora_id
        self._active_adapters[lora_id] = None
        for name, module in self.modules.items():
            layer = self._registered_adapters[lora_id].loras.get(name)
            if layer is None:
                module.reset_lora(index)
            else:
                module.set_lora(index, layer.lora_a, layer.lora_b)
        return True

    def deactivate_adapter(self, lora_id: int) -> None:
        if lora_id in self._active_adapters:
            del self._active_adapters[lora_id]
            self.slots[self.slots.index(lora_id)] = None

    def remove_adapter(self, lora_id: int) -> None:
        self.deactivate_adapter(lora_id)
        self._registered_adapters.pop(lora_id, None)


class Manager:
    """One worker's adapter manager."""

    def __init__(self, mapper: Mapper | None = None, *, tp_size: int = 1) -> None:
        self.lora_config = SimpleNamespace(max_lora_rank=RANK, lora_dtype=torch.float32)
        self._adapter_manager = Inner(mapper, tp_size=tp_size)

    def _load_adapter(self, request: Any) -> Any:
        """A PEFT folder, in which this stand-in finds an adapter as it is."""
        factors = request.adapter.factors
        return SimpleNamespace(
            loras={
                name: SimpleNamespace(lora_a=lora.a, lora_b=lora.b * lora.scale)
                for name, lora in factors.items()
            }
        )

    def add_adapter(self, request: Any) -> bool:
        inner = self._adapter_manager
        if request.lora_int_id not in inner._registered_adapters:
            model = self._load_adapter(request)
            inner._create_merged_loras_inplace(model)
            inner._registered_adapters[request.lora_int_id] = model
        return inner.activate_adapter(request.lora_int_id)

    def _apply_adapters(self, requests: tuple[Any, ...]) -> None:
        for one in requests:
            self.add_adapter(one)

    def set_active_adapters(self, *requests: Any) -> None:
        """Before every step."""
        self._apply_adapters(requests)

    def slot(self, lora_id: int) -> list[torch.Tensor]:
        inner = self._adapter_manager
        index = inner.slots.index(lora_id)
        return [
            stacked[index]
            for module in inner.modules.values()
            for stacked in (*module.lora_a_stacked, *module.lora_b_stacked)
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.lora": {},
        "vllm.lora.layers": {},
        "vllm.lora.layers.base_linear": {"BaseLinearLayerWithLoRA": Linear},
        "vllm.lora.layers.column_parallel_linear": {"MergedColumnParallelLinearWithLoRA": Merged},
        "vllm.lora.utils": {"parse_fine_tuned_lora_name": parse_name},
        "vllm.lora.lora_weights": {"LoRALayerWeights": LayerWeights},
        "vllm.lora.lora_model": {
            "LoRAModel": lambda _id, rank, loras: SimpleNamespace(rank=rank, loras=loras)
        },
    }
    for name, content in found.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def attached(mapper: Mapper | None = None, *, tp_size: int = 1) -> Manager:
    manager = Manager(mapper, tp_size=tp_size)
    worker = WorkerExtension()
    worker.device = torch.device("cpu")
    worker.model_runner = SimpleNamespace(lora_manager=manager)
    worker.rookery_report = dict  # type: ignore[method-assign]
    worker.rookery_attach()
    worker.rookery_attach()
    return manager


def with_first(manifest: dict[str, Any], field: int, value: object) -> None:
    layers = json.loads(manifest["layers"])
    layers[0][field] = value
    manifest["layers"] = json.dumps(layers)


def request(number: int, path: Path | str, adapter: Adapter | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        lora_int_id=number, lora_path=str(path), lora_name=f"a{number}", adapter=adapter
    )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_layers_keep_their_own_names_whatever_the_mapper_calls_it(
    tmp_path: Path, method: str
) -> None:
    manager = attached(Mapper(method))
    adapter = make_small("a", seed=3, rank=RANK)
    with open_staging(tmp_path) as staging:
        folder = staging.buffer_folder(ModelRef(name="a", version="1"), adapter, dtype="float32")
        manager.add_adapter(request(1, folder))
    packed = manager._adapter_manager.modules[manager._adapter_manager.packed]
    for i, name in enumerate((Q, K)):
        assert torch.equal(packed.lora_a_stacked[i][0, 0], adapter.factors[name].a)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_slots_hold_what_the_stock_way_writes_also_after_they_were_taken(
    tmp_path: Path, tp_size: int
) -> None:
    """Whole layers are written at once, others (here: split over GPUs) by vLLM, layer by layer."""
    manager, stock = attached(tp_size=tp_size), Manager()
    adapters = [
        make_small(f"a{number}", seed=number, rank=rank, scale=scale)
        for number, rank, scale in ((1, RANK, 1.5), (2, 2, 1.0), (3, 1, 1.5))
    ]
    with open_staging(tmp_path) as staging:
        folders = [
            staging.buffer_folder(ModelRef(name=a.name, version="1"), a, dtype="float32")
            for a in adapters
        ]
        for number in (1, 2, 3, 1, 2, 3, 3):
            manager.add_adapter(request(number, folders[number - 1]))
            stock.add_adapter(request(number, tmp_path / "peft", adapters[number - 1]))
            assert manager._adapter_manager.slots == stock._adapter_manager.slots
            pairs = zip(manager.slot(number), stock.slot(number), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.usefixtures("vllm")
def test_other_folders_are_loaded_the_stock_way_beside_buffers(tmp_path: Path) -> None:
    manager = attached()
    adapter = make_small("a", rank=2)
    with open_staging(tmp_path) as staging:
        folder = staging.buffer_folder(ModelRef(name="a", version="1"), adapter, dtype="float32")
        manager.add_adapter(request(1, folder))
        manager.add_adapter(request(2, tmp_path / "peft", adapter))
    pairs = zip(manager.slot(1), manager.slot(2), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.usefixtures("vllm")
def test_a_buffer_outlives_its_folder_and_one_cut_short_leaves_no_slot(tmp_path: Path) -> None:
    manager = attached()
    adapter = make_small("a", rank=2)
    with open_staging(tmp_path) as staging:
        ref = ModelRef(name="a", version="1")
        folder = staging.buffer_folder(ref, adapter, dtype="float32")
        manager.add_adapter(request(1, folder))
        before = [slot.clone() for slot in manager.slot(1)]
        inner = manager._adapter_manager
        inner.deactivate_adapter(1)
        buffer = folder / BUFFER
        held = buffer.open("r+b")
        staging.remove(ref)
        manager.add_adapter(request(1, folder))
        assert all(torch.equal(a, b) for a, b in zip(before, manager.slot(1), strict=True))
        inner.deactivate_adapter(1)
        held.truncate(8)
        with pytest.raises(ValueError, match="a buffer ends after 8 bytes"):
            manager.add_adapter(request(1, folder))
        assert inner.slots == [None] * NUM_SLOTS and not inner._registered_adapters
        held.close()


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.update(format=1), "buffer format 1, this worker reads 2"),
        (lambda m: with_first(m, 1, 8), "has rank 8, at most 4"),
        (lambda m: with_first(m, 0, "model.gate"), "adapts model.gate; known are"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    manager = attached()
    with open_staging(tmp_path) as staging:
        ref = ModelRef(name="a", version="1")
        folder = staging.buffer_folder(ref, make_small("a", rank=2), dtype="float32")
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=sentence):
            manager.add_adapter(request(1, folder))
        # A request that is on its way already must not end the worker.
        manager.add_adapter(request(1, folder))
        assert not any(slot.any() for slot in manager.slot(1))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("tp_size", "dtype", "rank"),
    [(1, torch.float32, 1), (1, torch.bfloat16, 2), (2, torch.bfloat16, 1), (2, torch.float32, 2)],
)
def test_slots_filled_from_seeds_hold_what_the_members_as_adapters_would(
    tmp_path: Path, tp_size: int, dtype: torch.dtype, rank: int
) -> None:
    """Of rank 1 a member is made in one piece, of rank 2 layer by layer."""
    manager, stock = attached(tp_size=tp_size), Manager()
    centre = make_small("centre", seed=5, rank=rank, scale=1.3)
    like = {
        layer: LoraFactors(a=lora.a.to(dtype), b=lora.b.to(dtype), scale=lora.scale)
        for layer, lora in centre.factors.items()
    }
    population = StepPopulation.around(centre, like=replace(centre, factors=like), rank=1)
    members = {
        number: population.member(f"m{number}", seed=1000 + number, amount=amount)
        for number, amount in ((2, 0.1), (3, -0.1), (4, 0.3))
    }
    wide = make_small("wide", seed=9, rank=RANK)
    with open_staging(tmp_path) as staging:
        first = request(1, tmp_path / "peft", wide)
        requests = {
            number: request(
                number,
                staging.member_text(ModelRef(name=member.name, version=member.version), member),
                member,
            )
            for number, member in members.items()
        }
        # A wide adapter, members that come together, one more, and the wide one in its place.
        for numbers in ((1,), (2, 3), (2, 3), (3, 4), (4, 1), (1, 2)):
            wanted = [{1: first, **requests}[number] for number in numbers]
            for one in wanted:
                manager.add_adapter(one)
            manager.set_active_adapters(*wanted)
            for number in numbers:
                stock.add_adapter(request(number, "peft", {1: wide, **members}[number]))
                pairs = zip(manager.slot(number), stock.slot(number), strict=True)
                assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.usefixtures("vllm")
def test_a_centre_goes_with_its_last_member_and_one_that_is_gone_is_refused(
    tmp_path: Path,
) -> None:
    manager = attached()
    centre = make_small("centre", rank=2)
    population = StepPopulation.around(centre, like=centre, rank=1)
    members = [population.member(f"m{seed}", seed=seed, amount=0.1) for seed in (1, 2)]
    refs = [ModelRef(name=member.name, version=member.version) for member in members]
    with open_staging(tmp_path) as staging:
        texts = [
            staging.member_text(ref, member) for ref, member in zip(refs, members, strict=True)
        ]
        [folder] = {Path(json.loads(text)["centre"]) for text in texts}
        assert staging.served_path(refs[0], dtype="float32") == texts[0]
        staging.remove(refs[0])
        assert folder.is_dir()
        staging.remove(refs[1])
        assert not folder.exists()
        with pytest.raises(FileNotFoundError):
            manager.add_adapter(request(1, texts[0]))
        manager.set_active_adapters(request(1, texts[0]))
        assert not any(slot.any() for slot in manager.slot(1))
        staging.member_text(refs[0], members[0])
        manifest = json.loads((folder / CENTRE).read_text())
        (folder / CENTRE).write_text(json.dumps({**manifest, "format": 9}))
        with pytest.raises(ValueError, match="centre format 9, this worker reads 1"):
            manager.add_adapter(request(2, texts[0]))


# Adapted output layers on the CPU, on a stand-in for vLLM's table of adapters.


class Table:
    """Computes logits as vLLM's CPU code does: slot -1 is the last one."""

    def __init__(self, *slots: int) -> None:
        self.sampler_indices = torch.tensor(slots)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        chosen = self.sampler_indices
        hidden = torch.einsum("bi,bri->br", x, a[chosen]) * scale
        y += torch.einsum("br,bvr->bv", hidden, b[chosen])


def test_tokens_without_an_adapter_keep_their_logits() -> None:
    x, a, b = torch.randn(3, 4), torch.randn(2, 2, 4), torch.randn(2, 5, 2)
    stock, mended = torch.zeros(3, 5), torch.zeros(3, 5)
    table = Table(0, -1, 1)
    table.add_lora_logits(stock, x, a, b, 1.0)
    inner = SimpleNamespace(punica_wrapper_mapping={"language": table})
    assert install_output_layer(inner, torch.device("cpu"))
    table.add_lora_logits(mended, x, a, b, 1.0)
    assert torch.equal(mended[[0, 2]], stock[[0, 2]])
    assert stock[1].any() and not mended[1].any()


def test_gpu_kernels_skip_such_tokens_themselves() -> None:
    table = Table(0)
    inner = SimpleNamespace(punica_wrapper_mapping={"language": table})
    assert install_output_layer(inner, torch.device("cuda:0"))
    assert "add_lora_logits" not in vars(table)


def test_what_another_version_keeps_there_is_not_taken_for_mended() -> None:
    assert not install_output_layer(SimpleNamespace(), torch.device("cpu"))
    odd = SimpleNamespace(punica_wrapper_mapping={"language": SimpleNamespace()})
    assert not install_output_layer(odd, torch.device("cpu"))


# CUDA graphs of whole steps.


CONFIG = FleetConfig(urls=("http://127.0.0.1:1",))
NONE, FULL, DECODE = "none", "full", "full for single tokens"


def make_batch(num_tokens: int, *, num_sequences: int, room: int) -> Any:
    """Tokens of equally many per sequence, in a graph that has room for more."""
    return SimpleNamespace(
        num_tokens_after_padding=room,
        num_scheduled_tokens=np.full(num_sequences, num_tokens // num_sequences, np.int32),
    )


class Old:
    """Prepares attention for the longest of the sequences: vLLM 0.26."""

    def prepare_attn(self, batch: Any, mode: str, *, for_capture: bool = False) -> int:
        assert batch.num_scheduled_tokens.ndim == 1
        return int(batch.num_scheduled_tokens.max())


class New(Old):
    """For what the batch says, else for the longest: vLLM 0.32."""

    def prepare_attn(self, batch: Any, mode: str, *, for_capture: bool = False) -> int:
        said = getattr(batch, "max_query_len", None)
        return said or super().prepare_attn(batch, mode, for_capture=for_capture)


class GraphManager:
    """Stands in for vLLM's: 24 tokens are captured as 24 sequences of one."""

    def __init__(self, mode: str) -> None:
        self.cudagraph_mode = mode

    def capture(self, model: str, model_state: Old, *, has_lora: bool) -> int:
        assert (model, has_lora) == ("model", True)
        batch = make_batch(24, num_sequences=24, room=24)
        longest = model_state.prepare_attn(batch, NONE, for_capture=True)
        assert batch.num_scheduled_tokens.max() == 1, "the batch itself is left alone"
        return longest


@pytest.mark.parametrize("kind", [Old, New])
def test_whole_steps_are_captured_and_run_for_a_prompt_as_long_as_the_graph(kind: type) -> None:
    class Own(GraphManager):
        pass

    modes = SimpleNamespace(FULL=FULL)
    agree_on_queries(SimpleNamespace(ModelCudaGraphManager=Own, CUDAGraphMode=modes))
    state = kind()
    assert Own(FULL).capture("model", state, has_lora=True) == 24
    answers = make_batch(20, num_sequences=20, room=24)
    prompts = make_batch(24, num_sequences=2, room=24)
    assert state.prepare_attn(answers, FULL) == state.prepare_attn(prompts, FULL) == 24
    assert state.prepare_attn(prompts, NONE) == 12, "what no graph holds is left alone"
    state = kind()
    assert Own(DECODE).capture("model", state, has_lora=True) == 1
    assert state.prepare_attn(answers, FULL) == 1


@pytest.mark.parametrize(
    ("stub", "apart"),
    [
        (Stub(), None),
        (Stub(prompts_off=1.5), r"1\.50"),
        (Stub(together_off=1.5), r"1\.50"),
        (Stub(together_off=None), "inf"),
    ],
    ids=["right", "prompts", "answers together", "no numbers"],
)
async def test_a_server_with_whole_graphs_shows_that_it_computes_right(
    stub: Stub, apart: str | None, tmp_path: Path
) -> None:
    local: Any = SimpleNamespace(
        config=LaunchConfig(model="tiny", device="cuda", cuda_graphs="full")
    )
    async with serve(stub), open_session() as session:
        client = Client(stub.url, session=session, config=ClientConfig())
        with open_staging(tmp_path) as staging:
            replica = Replica(client, config=CONFIG, staging=staging, local=local)
            if apart is None:
                await replica.connect()
                assert replica.load.is_open
                return
            with pytest.raises(FleetError, match=rf"is {apart} nats from.*cuda_graphs: auto"):
                await replica.connect()
            assert not replica.load.is_open
