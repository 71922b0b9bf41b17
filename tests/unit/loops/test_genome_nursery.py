"""Where candidates are made, and what is said when they cannot be."""

from dataclasses import replace

import pytest
import torch
from weights.made import made

from rookery.errors import AdapterError
from rookery.loops.genome import nursery as nursery_module
from rookery.loops.genome.nursery import Drift, Nursery, rebuild
from rookery.search.candidate import ChildPlan
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merge import TiesConfig
from rookery.weights.mutate import GaussianConfig
from rookery.weights.perturb import accumulate

PLAN = ChildPlan(
    id="g001-c00",
    generation=1,
    parents=("x", "y"),
    weights=(0.5, 0.5),
    merge="ties",
    mutation=None,
    sigma=0.1,
    seed_key=7,
)


def open_nursery(device: str = "cpu") -> Nursery:
    founders = {"x": made(1), "y": made(2)}
    nursery = Nursery(founders, merges={"ties": TiesConfig()}, mutations={}, rank=3, device=device)
    nursery.plan([PLAN])
    return nursery


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_made_on_one() -> None:
    with pytest.raises(AdapterError, match="no GPU here: write made_on: cpu"):
        open_nursery("cuda")


def test_a_full_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(nursery_module, "merge", full)
    with pytest.raises(AdapterError, match=r"Making g001-c00: Tried .* write made_on: cpu"):
        open_nursery().adapter("g001-c00")


def test_the_device_is_part_of_the_lineage() -> None:
    nursery = open_nursery()
    child = nursery.adapter("g001-c00")
    lineage = nursery.lineage()
    assert lineage["device"] == "cpu"
    founders = [nursery.adapter("x"), nursery.adapter("y")]
    assert rebuild(lineage, founders, "g001-c00").version == child.version
    del lineage["device"]
    assert rebuild(lineage, founders, "g001-c00").version == child.version, "of older runs"


def drifts(num_steps: int) -> list[Drift]:
    """Centres of an ES, each the one before plus an update of three, with a trial around each."""
    chain, parent = [], "x"
    for step in range(num_steps):
        seeds = tuple(range(3 * step, 3 * step + 3))
        centre = Drift(
            id=f"e{step}-centre", generation=step, parent=parent, seeds=seeds,
            amounts=(0.001, -0.002, 0.003), is_chained=step > 0,
        )  # fmt: skip
        trial = Drift(
            id=f"e{step}-trial", generation=step, parent=centre.id, seeds=(1000 + step,),
            amounts=(0.1,), is_chained=True,
        )  # fmt: skip
        chain += [centre, trial]
        parent = centre.id
    return chain


def change_dtype(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    factors = {
        layer: LoraFactors(a=lora.a.to(dtype), b=lora.b.to(dtype), scale=lora.scale)
        for layer, lora in adapter.factors.items()
    }
    return make_adapter(adapter.name, base=adapter.base, factors=factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_of_updates_has_the_bits_of_their_sum(dtype: torch.dtype) -> None:
    start = change_dtype(made(1), dtype)
    nursery = Nursery({"x": start}, merges={}, mutations={}, rank=3)
    nursery.plan(drifts(20))
    seeds = [*((seed,) for seed in range(60)), (1019,)]
    amounts = [0.001, -0.002, 0.003] * 20 + [0.1]
    assert (
        nursery.adapter("e19-trial").version
        == accumulate(start, seeds=seeds, amounts=amounts).version
    )
    lineage = nursery.lineage()
    again = rebuild(lineage, [nursery.adapter("x")], "e19-trial")
    assert again.version == nursery.adapter("e19-trial").version


def test_the_next_trial_costs_one_noise_however_many_steps_there_were() -> None:
    nursery = Nursery({"x": made(1)}, merges={}, mutations={}, rank=3)
    recipes = drifts(30)
    for centre, trial in zip(recipes[::2], recipes[1::2], strict=True):
        nursery.plan([trial, centre])
        assert nursery.missing(trial.id) == [centre.id, trial.id]
        assert (len(centre.seeds), len(trial.seeds)) == (3, 1)
        nursery.adapter(trial.id)
        nursery.keep(["x", centre.id])
    nursery.keep([])
    assert len(nursery.missing("e29-trial")) == 31, "each centre once, then the trial"


def test_a_long_lineage_is_rebuilt_bit_for_bit() -> None:
    founders = {"x": made(1, rank=1), "y": made(2, rank=1)}
    nursery = Nursery(
        founders, merges={"ties": TiesConfig()}, mutations={"gaussian": GaussianConfig()}, rank=1
    )
    parent = "x"
    for generation in range(1200):
        plan = ChildPlan(
            id=f"g{generation}", generation=generation, parents=(parent,), weights=(1.0,),
            merge=None, mutation="gaussian", sigma=0.1, seed_key=generation,
        )  # fmt: skip
        nursery.plan([plan])
        nursery.adapter(plan.id)
        nursery.keep([plan.id])
        parent = plan.id
    again = rebuild(nursery.lineage(), [nursery.adapter(f) for f in founders], parent)
    assert again.version == nursery.adapter(parent).version


def test_lineages_written_before_a_mutation_obeyed_its_sigma_are_rebuilt() -> None:
    mutations = {"gaussian": GaussianConfig()}
    nursery = Nursery({"x": made(1)}, merges={}, mutations=mutations, rank=3)
    plan = replace(PLAN, merge=None, mutation="gaussian", parents=("x",), weights=(1.0,), sigma=0.3)
    nursery.plan([plan])
    nursery.adapter(plan.id)
    lineage = nursery.lineage()
    del lineage["format"]
    lineage["mutations"]["gaussian"]["sigma"] = 0.1
    rebuild(lineage, [nursery.adapter("x")], plan.id)
