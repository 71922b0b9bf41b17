"""The tables of tokens' adapters, against a stand-in of vLLM's that is written the same way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rookery.fleet.vllm_plugin.token_index import TokenIndex, install_token_index

SLOTS, TOKENS = 3, 8
CPU = torch.device("cpu")


class Meta:
    """A part of the tables with tensors of its own, one of which stays in ordinary memory."""

    def __init__(self) -> None:
        self.sorted = torch.zeros(TOKENS, dtype=torch.int32)
        self.counts = torch.zeros(SLOTS + 1, dtype=torch.int32)


class Table:
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._indices = torch.zeros(2, TOKENS, dtype=torch.long)
        self.meta = Meta()
        self.lengths: list[int | None] = [None]
        self.is_prefill = False
        self.config = SimpleNamespace(max_loras=SLOTS)
        self.fault = 0

    def update_metadata(
        self, mapping: Any, slots: list[int | None], max_loras: int, vocab_size: int
    ) -> None:
        found = [slots.index(i) if i else -1 for i in mapping.index_mapping]
        rows = torch.tensor([found, [vocab_size * f for f in found]], device=self.device)
        self._indices[:, : len(found)].copy_(rows)
        self.meta.counts.zero_()
        order = torch.sort(rows[0], stable=True).indices
        self.meta.sorted[: len(found)].copy_(order)
        values, counts = torch.unique(rows[0], return_counts=True)
        self.meta.counts[: len(values)].copy_(counts + self.fault)
        self.lengths[:] = [len(found)]
        self.is_prefill = mapping.is_prefill
        assert max_loras == SLOTS + 1


def manager(*tables: Table) -> SimpleNamespace:
    return SimpleNamespace(
        lora_slots=SLOTS,
        vocab_size=100,
        punica_wrapper_mapping=dict(enumerate(tables)),
        _last_mapping="a batch",
    )


def mapping(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(index_mapping=ids, prompt_mapping=ids[:1], is_prefill=True)


def test_the_tables_hold_what_vllm_writes_itself() -> None:
    table, stock = Table(), Table()
    index = TokenIndex(table, CPU)
    places = [tensor.data_ptr() for tensor in (table._indices, table.meta.sorted)]
    for ids in ((7, 0, 7, 9), (9, 9), (0, 0, 0)):
        index.update(mapping(*ids), [9, 7, None], SLOTS + 1, 100)
        stock.update_metadata(mapping(*ids), [9, 7, None], SLOTS + 1, 100)
        assert torch.equal(table._indices, stock._indices)
        assert torch.equal(table.meta.sorted, stock.meta.sorted)
        assert torch.equal(table.meta.counts, stock.meta.counts)
        assert table.lengths == stock.lengths and table.is_prefill
    # Captured graphs read the tensors where they were.
    assert places == [tensor.data_ptr() for tensor in (table._indices, table.meta.sorted)]


def test_a_twin_is_used_only_when_it_gives_the_same_numbers() -> None:
    table = Table()
    index = TokenIndex(table, CPU)
    assert index.agrees(manager(table))
    index._twin.fault = 1
    assert not index.agrees(manager(table))


def test_only_devices_with_memory_of_their_own_have_a_twin() -> None:
    table = Table()
    inner = manager(table)
    assert not install_token_index(inner, CPU)
    assert "update_metadata" not in vars(table) and inner._last_mapping == "a batch"


def test_what_another_version_keeps_there_stays(caplog: pytest.LogCaptureFixture) -> None:
    odd = SimpleNamespace(update_metadata=None)
    inner = manager(odd)  # type: ignore[arg-type]
    assert not install_token_index(inner, torch.device("cuda:0"))
    assert odd.update_metadata is None and inner._last_mapping is None
    assert "stay on the device" in caplog.text
