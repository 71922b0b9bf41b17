"""Where candidates are made, and what is said when they cannot be."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from weights.made import made

from rookery.errors import AdapterError
from rookery.loops.genome import adapter_builder as builder_module
from rookery.loops.genome.adapter_builder import AdapterBuilder, rebuild
from rookery.search.candidate import ChildPlan, EsStep
from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter
from rookery.weights.merge import LinearConfig, TiesConfig
from rookery.weights.mutate import GaussianConfig, accumulate

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


def open_builder(device: str = "cpu") -> AdapterBuilder:
    founders = {"x": made(1), "y": made(2)}
    builder = AdapterBuilder(
        founders, merges={"ties": TiesConfig()}, mutations={}, rank=3, device=device
    )
    builder.plan([PLAN])
    return builder


def test_a_full_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(builder_module, "merge", full)
    with pytest.raises(AdapterError, match=r"Making g001-c00: Tried .* write merge_device: cpu"):
        open_builder().adapter("g001-c00")


def test_the_device_is_part_of_the_lineage() -> None:
    builder = open_builder()
    child = builder.adapter("g001-c00")
    lineage = builder.lineage()
    assert lineage["device"] == "cpu"
    founders = [builder.adapter("x"), builder.adapter("y")]
    assert rebuild(lineage, founders, "g001-c00").version == child.version
    del lineage["device"]
    assert rebuild(lineage, founders, "g001-c00").version == child.version, "of older runs"


def test_the_coefficients_of_sums_of_all_founders_are_known() -> None:
    plain, normal = LinearConfig(normalise=False), LinearConfig()
    builder = AdapterBuilder(
        {"x": made(1), "y": made(2)},
        merges={"sum": plain, "linear": normal, "ties": TiesConfig()},
        mutations={"gaussian": GaussianConfig()},
        rank=3,
    )
    swapped = {"parents": ("y", "x"), "weights": (0.25, 1.5)}
    changes: dict[str, dict[str, Any]] = {
        "random": {"merge": "random", "weights": (0.25, 1.5)},
        "cmaes": {"merge": "cmaes", "weights": (0.25, 1.5)},
        "crossover": {"merge": "sum", **swapped},
        "by block": {"merge": "by_block", "weights": (0.1, 0.2, 0.3, 0.4)},
        "averaged": {"merge": "linear"},
        "by sign": {"merge": "ties"},
        "mutated": {"merge": "sum", "mutation": "gaussian"},
        "changed alone": {"merge": None, "parents": ("x",), "weights": (1.0,)},
        "of a child": {"merge": "sum", "parents": ("x", "random")},
    }
    builder.plan(replace(PLAN, id=name, **change) for name, change in changes.items())
    known = {name: builder.coefficients(name) for name in ("x", *changes)}
    assert {name: found for name, found in known.items() if found is not None} == {
        "random": (0.25, 1.5),
        "cmaes": (0.25, 1.5),
        "crossover": (1.5, 0.25),
        "by block": (0.1, 0.2, 0.3, 0.4),
    }


def es_steps(num_steps: int) -> list[EsStep]:
    """Centres of an ES, each the one before plus an update of three, with a trial around each."""
    chain, parent = [], "x"
    for step in range(num_steps):
        seeds = tuple(range(3 * step, 3 * step + 3))
        centre = EsStep(
            id=f"e{step}-centre", generation=step, parent=parent, seeds=seeds,
            amounts=(0.001, -0.002, 0.003), is_chained=step > 0,
        )  # fmt: skip
        trial = EsStep(
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
    builder = AdapterBuilder({"x": start}, merges={}, mutations={}, rank=3)
    builder.plan(es_steps(20))
    seeds = [*((seed,) for seed in range(60)), (1019,)]
    amounts = [0.001, -0.002, 0.003] * 20 + [0.1]
    assert (
        builder.adapter("e19-trial").version
        == accumulate(start, seeds=seeds, amounts=amounts).version
    )
    lineage = builder.lineage()
    again = rebuild(lineage, [builder.adapter("x")], "e19-trial")
    assert again.version == builder.adapter("e19-trial").version


def test_the_next_trial_costs_one_noise_however_many_steps_there_were() -> None:
    builder = AdapterBuilder({"x": made(1)}, merges={}, mutations={}, rank=3)
    recipes = es_steps(30)
    for centre, trial in zip(recipes[::2], recipes[1::2], strict=True):
        builder.plan([trial, centre])
        assert builder.missing(trial.id) == [centre.id, trial.id]
        assert (len(centre.seeds), len(trial.seeds)) == (3, 1)
        builder.adapter(trial.id)
        builder.keep(["x", centre.id])
    builder.keep([])
    assert len(builder.missing("e29-trial")) == 31, "each centre once, then the trial"


def test_a_long_lineage_is_rebuilt_bit_for_bit() -> None:
    shapes = {"model.layers.0.a": (4, 3)}
    founders = {"x": made(1, rank=1, shapes=shapes), "y": made(2, rank=1, shapes=shapes)}
    builder = AdapterBuilder(
        founders, merges={"ties": TiesConfig()}, mutations={"gaussian": GaussianConfig()}, rank=1
    )
    parent = "x"
    for generation in range(1200):
        plan = ChildPlan(
            id=f"g{generation}", generation=generation, parents=(parent,), weights=(1.0,),
            merge=None, mutation="gaussian", sigma=0.1, seed_key=generation,
        )  # fmt: skip
        builder.plan([plan])
        builder.adapter(plan.id)
        builder.keep([plan.id])
        parent = plan.id
    lineage, known = builder.lineage(), [builder.adapter(f) for f in founders]
    assert rebuild(lineage, known, parent).version == builder.adapter(parent).version
    lineage["candidates"][-1]["version"] = "other"
    with pytest.raises(AdapterError, match="the run recorded other"):
        rebuild(lineage, known, parent)


def test_lineages_with_merges_that_are_gone_are_rebuilt_where_none_is_used() -> None:
    founders = {"x": made(1), "y": made(2)}
    builder = AdapterBuilder(founders, merges={"ties": TiesConfig()}, mutations={}, rank=4)
    builder.plan(
        ChildPlan(
            id=id, generation=1, parents=("x", "y"), weights=(0.5, 0.5), merge=merge,
            mutation=None, sigma=0.1, seed_key=1,
        )
        for id, merge in (("sum", "move"), ("arc", "ties"))
    )  # fmt: skip
    child = builder.adapter("sum")
    builder.adapter("arc")
    lineage, known = builder.lineage(), [builder.adapter(f) for f in founders]
    lineage["merges"]["slerp"] = {"type": "slerp", "space": "delta"}
    assert rebuild(lineage, known, "sum").version == child.version
    lineage["merges"]["ties"] = {"type": "slerp"}
    with pytest.raises(AdapterError, match="an operator that this version does not have"):
        rebuild(lineage, known, "arc")


def test_lineages_written_before_a_mutation_obeyed_its_sigma_are_rebuilt() -> None:
    mutations = {"gaussian": GaussianConfig()}
    builder = AdapterBuilder({"x": made(1)}, merges={}, mutations=mutations, rank=3)
    plan = replace(PLAN, merge=None, mutation="gaussian", parents=("x",), weights=(1.0,), sigma=0.3)
    builder.plan([plan])
    builder.adapter(plan.id)
    lineage = builder.lineage()
    del lineage["format"]
    lineage["mutations"]["gaussian"] |= {"sigma": 0.1, "adapt": 0.0}
    rebuild(lineage, [builder.adapter("x")], plan.id)


def test_lineages_with_the_former_name_of_es_steps_are_rebuilt() -> None:
    builder = AdapterBuilder({"x": made(1)}, merges={}, mutations={}, rank=3)
    builder.plan(es_steps(2))
    wanted = builder.adapter("e1-trial").version
    lineage = builder.lineage()
    lineage["format"] = 2
    for entry in lineage["candidates"]:
        entry["kind"] = "Drift"
    assert rebuild(lineage, [builder.adapter("x")], "e1-trial").version == wanted
