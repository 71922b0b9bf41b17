"""Budgets: what a loop may take ends it before a round that does not fit, at the same place when
it is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops.evolution import Genome
from loops.oracle import Oracle, make_config, write_items
from loops.training import Inputs, run_training

from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmInputs, label, read_items
from rookery.ports import Observer
from rookery.reports import GenomeReport, GrpoReport, IcmReport
from rookery.runs import Run
from rookery.runs.budget import Budget, BudgetConfig
from rookery.slots import SlottedModel
from rookery.tasks.taskset import load_taskset_file
from rookery.tasks.template import Template, load_template
from rookery.train.sft import SftConfig, count_steps, sft_data

OVER: dict[str, Any] = {"max_hours": 1e-9}


def make_run(folder: Path, name: str) -> Run:
    path = folder / name
    return Run.open(path) if path.exists() else Run.create(folder, kind="x", config={}, name=name)


async def test_the_end_is_durable_and_rounds_that_were_made_are_made_again(tmp_path: Path) -> None:
    config = BudgetConfig(max_answer_tokens=100)
    with make_run(tmp_path, "x") as run:
        budget = Budget(config, run)
        assert await budget.has_room(0, tokens=100) and not budget.stop_reason
        assert await budget.has_room(3, tokens=500, num_done=4), "it was made before a kill"
        assert not await budget.has_room(4, tokens=101, num_done=4)
        assert await Budget(config, run, key="other").has_room(9, tokens=1)
        assert not await Budget(BudgetConfig(**OVER), run, key="late").has_room(0)
        assert await Budget(BudgetConfig(), run).has_room(3)
    with make_run(tmp_path, "x") as run:
        again = Budget(config, run)
        assert [await again.has_room(number, tokens=0) for number in (3, 4)] == [True, False]
        assert again.stop_reason == "The budget of 100 answer tokens has no room for more."


class Shares(Observer[Any]):
    """What a loop told of its budget."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def on_budget(self, share: float) -> None:
        self.told.append(share)


TOKENS = 120


@pytest.fixture
def grpo(grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path) -> Callable[..., Any]:
    async def run(name: str, **changes: Any) -> GrpoReport:
        with make_run(tmp_path, name) as opened:
            return await run_training(opened, grpo_inputs, model=plain_model, **changes)

    return run


async def test_grpo_ends_with_a_checkpoint_before_a_step_that_does_not_fit(
    grpo: Callable[..., Any],
) -> None:
    staleness = 1
    whole = await grpo("whole", staleness=staleness)
    assert whole.stop_reason == "" and whole.spent.tokens > 2 * TOKENS
    limit = whole.spent.tokens - 20
    shares = Shares()
    budget = {"max_answer_tokens": limit}
    cut = await grpo("cut", staleness=staleness, budget=budget, observer=shares)
    assert len(shares.told) == len(cut.steps) + 1 and sorted(shares.told) == shares.told
    assert shares.told[-2] <= 1 < shares.told[-1]
    assert 0 < len(cut.steps) < len(whole.steps) and "has no room" in cut.stop_reason
    assert cut.spent.tokens <= limit
    assert cut.checkpoints[-1].step == len(cut.steps), "the last weights are measured"
    assert cut.steps[-1].metrics["reward/mean"] == pytest.approx(
        whole.steps[len(cut.steps) - 1].metrics["reward/mean"]
    )
    again = await grpo("cut", staleness=staleness, budget={"max_answer_tokens": limit})
    assert again.checkpoints == cut.checkpoints
    none = await grpo("none", staleness=staleness, budget=OVER)
    assert not none.steps and none.chosen_step == 0


async def test_grpo_counts_every_checkpoint_that_it_measures(
    grpo: Callable[..., Any], grpo_inputs: Inputs
) -> None:
    [taskset] = grpo_inputs.document()["tasksets"]
    splits = {"search": 0.25, "select": 0.5, "report": 0.25}
    often = {"save_every": 1, "steps": 4, "tasksets": [{**taskset, "splits": splits}]}
    whole = await grpo("whole", **often)
    for limit in (200, 290, whole.spent.tokens - 1):
        cut = await grpo(f"cut{limit}", **often, budget={"max_answer_tokens": limit})
        assert cut.spent.tokens <= limit and "has no room" in cut.stop_reason


def test_a_sweep_has_steps_and_no_budget(grpo_inputs: Inputs) -> None:
    document = grpo_inputs.document(sweep={"seeds": 2}, budget=OVER)
    with pytest.raises(ValueError, match="sweep trains many to the same step"):
        GrpoConfig.model_validate(document)


async def test_genome_ends_before_a_generation_that_does_not_fit(genome: Genome) -> None:
    async def run(name: str, **changes: object) -> GenomeReport:
        return (await genome(name, **changes)).report

    whole = await run("whole")
    assert whole.stop_reason == "" and len(whole.generations) == 3
    for limit in (whole.spent.tokens - 1, whole.spent.tokens + 400):
        shares = Shares()
        cut = await run(f"cut{limit}", budget={"max_answer_tokens": limit}, observer=shares)
        assert cut.spent.tokens <= limit and len(shares.told) == 2
        assert (shares.told[-1] > 1) == bool(cut.stop_reason)
        assert bool(cut.stop_reason) == (limit < whole.spent.tokens)
    none = await run("none", budget=OVER)
    assert len(none.generations) == 1 and none.rows, "the founders, and a report of them"


async def test_a_population_is_counted_with_its_centre_and_the_last_one(genome: Genome) -> None:
    """Members see two tasks and a centre sees all 64: most of the answers are the centres'."""
    population = {"type": "es", "steps": 4, "population": 4, "rank": 1, "tasks_per_step": 2}
    children = {"size": 4, "children": {"count": 4}}
    stages = [population, {"type": "ga", "generations": 1, "population": children}]
    whole = (await genome("whole", stages=stages, race={"enabled": False})).report
    num_generations = set()
    for limit in (360, 585, whole.spent.tokens - 1):
        budget = {"max_answer_tokens": limit}
        named = {"stages": stages, "race": {"enabled": False}, "budget": budget}
        cut = (await genome(f"cut{limit}", **named)).report
        assert cut.spent.tokens <= limit and "has no room" in cut.stop_reason
        num_generations.add(len(cut.generations))
    assert len(num_generations) > 1, "and what fits is begun"


async def test_icm_gives_every_search_an_equal_share(tmp_path: Path) -> None:
    oracle = Oracle(16, seed=1)

    async def run(name: str, **changes: Any) -> IcmReport:
        path = write_items(tmp_path / "items.jsonl", oracle)
        config = make_config(path, num_chains=2, **changes)
        inputs = IcmInputs(config=config, items=read_items(config.data))
        with make_run(tmp_path, name) as opened:
            return await label(inputs, engine=oracle.labeller, run=opened)

    whole = await run("whole")
    limit = whole.spent.drawn_tokens // 2
    cut = await run("cut", budget={"max_answer_tokens": limit})
    again = await run("cut", budget={"max_answer_tokens": limit})
    assert cut.stop_reason and cut.spent.tokens <= limit
    assert again.chains == cut.chains != whole.chains
    late = await run("late", budget=OVER)
    assert [chain.num_iterations for chain in late.chains][:2] == [0, 0]


@pytest.fixture
def template(tiny_folder: Path) -> Template:
    return load_template(tiny_folder)


def test_sft_plans_the_steps_that_fit(tasks_folder: Path, template: Template) -> None:
    data = sft_data(load_taskset_file(f"{tasks_folder}/first.jsonl?limit=8").tasks, template)
    assert sum(len(one.targets) for one in data) == 8
    for tokens, steps in ((1, 1), (8, 2), (9, 2), (24, 6), (99, 6)):
        config = SftConfig(batch_size=4, budget=BudgetConfig(max_answer_tokens=tokens))
        assert count_steps(data, config) == steps
