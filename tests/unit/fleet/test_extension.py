"""The worker extension against stand-ins of the vLLM classes that it meets."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fleet.adapters import K, Q, make_small

from rookery.fleet.extension import MANIFEST, WorkerExtension, _SlotWriter
from rookery.fleet.staging import open_staging
from rookery.types import ModelRef

NUM_SLOTS, RANK = 2, 4


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


class Manager:
    """One worker's adapter manager over a packed layer `qk` of q and k, and a layer `o`."""

    def __init__(self, mapper: Mapper | None) -> None:
        self.lora_config = SimpleNamespace(max_lora_rank=RANK)
        parent = Q.rpartition(".")[0]
        self.names = (Q, K)
        self.packed = f"{parent}.qk"
        self._adapter_manager = SimpleNamespace(
            model=SimpleNamespace(hf_to_vllm_mapper=mapper),
            supported_lora_modules=["qk", "o_proj"],
            packed_modules_mapping={"qk": ["q_proj", "k_proj"]},
            modules={self.packed: Merged((32, 16), 32), f"{parent}.o_proj": Linear((32,), 32)},
            list_adapters=lambda: self.registered,
        )
        self.registered: dict[int, Any] = {}
        self.slots: list[int | None] = [None] * NUM_SLOTS

    def _load_adapter(self, request: Any) -> Any:
        raise AssertionError("a PEFT folder")

    def add_adapter(self, request: Any) -> bool:
        if request.lora_int_id not in self.registered:
            model = self._load_adapter(request)
            parts = [model.loras.pop(name, None) for name in self.names]
            model.loras[self.packed] = SimpleNamespace(
                lora_a=[part and part.lora_a for part in parts],
                lora_b=[part and part.lora_b for part in parts],
            )
            self.registered[request.lora_int_id] = model
        self.activate(request.lora_int_id)
        return True

    def activate(self, lora_id: int) -> None:
        if lora_id in self.slots:
            return
        index = self.slots.index(None) if None in self.slots else 0
        self.slots[index] = lora_id
        for name, module in self._adapter_manager.modules.items():
            layer = self.registered[lora_id].loras.get(name)
            if layer is None:
                module.reset_lora(index)
            else:
                module.set_lora(index, layer.lora_a, layer.lora_b)


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


def attached(mapper: Mapper | None = None) -> Manager:
    manager = Manager(mapper)
    worker = WorkerExtension()
    worker.device = torch.device("cpu")
    worker.model_runner = SimpleNamespace(lora_manager=manager)
    worker.rookery_report = dict  # type: ignore[method-assign]
    worker.rookery_attach()
    worker.rookery_attach()
    return manager


def request(number: int, path: Path) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), lora_name=f"a{number}")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_layers_keep_their_own_names_whatever_the_mapper_calls_it(
    tmp_path: Path, method: str
) -> None:
    manager = attached(Mapper(method))
    adapter = make_small("a", seed=3, rank=RANK)
    with open_staging(tmp_path) as staging:
        folder = staging.arena_folder(ModelRef(name="a", version="1"), adapter, dtype="float32")
        manager.add_adapter(request(1, folder))
    packed = manager._adapter_manager.modules[manager.packed]
    for i, name in enumerate((Q, K)):
        assert torch.equal(packed.lora_a_stacked[i][0, 0], adapter.factors[name].a)


@pytest.mark.usefixtures("vllm")
def test_slots_hold_what_the_stock_way_writes_also_after_they_were_taken(tmp_path: Path) -> None:
    manager, stock = attached(), Manager(None)
    with open_staging(tmp_path) as staging:
        folders: list[Path] = []
        for number, rank in ((1, RANK), (2, 2), (3, 1)):
            adapter = make_small(f"a{number}", seed=number, rank=rank, scale=1.5)
            ref = ModelRef(name=adapter.name, version="1")
            folders.append(staging.arena_folder(ref, adapter, dtype="float32"))
        for number in (1, 2, 3, 1, 2, 3, 3):
            manager.add_adapter(request(number, folders[number - 1]))
            stock.registered = manager.registered
            stock.activate(number)
            assert manager.slots == stock.slots
            modules = zip(
                manager._adapter_manager.modules.values(),
                stock._adapter_manager.modules.values(),
                strict=True,
            )
            for ours, theirs in modules:
                for one, two in (
                    (ours.lora_a_stacked, theirs.lora_a_stacked),
                    (ours.lora_b_stacked, theirs.lora_b_stacked),
                ):
                    index = manager.slots.index(number)
                    assert all(
                        torch.equal(a[index], b[index]) for a, b in zip(one, two, strict=True)
                    )


@pytest.mark.usefixtures("vllm")
def test_a_slot_is_left_alone_when_adding_fails() -> None:
    layer = Linear((32,), 32)
    writer = _SlotWriter(torch.device("cpu"))
    writer.attach(layer)

    def fail() -> None:
        with writer.together():
            layer.reset_lora(0)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert layer.lora_a_stacked[0].min() == 9
    layer.reset_lora(0)
    assert layer.lora_a_stacked[0][0].abs().max() == 0, "outside the block at once"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.update(format=2), "arena format 2, this worker reads 1"),
        (lambda m: m["layers"][0].__setitem__(1, 8), "has rank 8, at most 4"),
        (lambda m: m["layers"][0].__setitem__(0, "model.gate"), "adapts model.gate; known are"),
    ],
)
def test_arenas_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    manager = attached()
    with open_staging(tmp_path) as staging:
        ref = ModelRef(name="a", version="1")
        folder = staging.arena_folder(ref, make_small("a", rank=2), dtype="float32")
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=sentence):
            manager.add_adapter(request(1, folder))
