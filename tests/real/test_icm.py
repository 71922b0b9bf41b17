"""icm on SmolLM2: what 135 million parameters can label, and what they cannot. Ten minutes; without
ROOKERY_LONG its prompts alone."""

import json
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest
import pytest_asyncio
from marks import long

from rookery.config import load_config
from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.loops.icm import (
    IcmConfig,
    IcmInputs,
    Labeller,
    label,
    load_encoder,
    read_gold,
    read_items,
)
from rookery.loops.icm.chain import Chain, ChainResult, Problem
from rookery.loops.icm.label_scorer import ScoreStore
from rookery.loops.icm.loop import open_problem
from rookery.loops.icm.prompts import BatchPrompts
from rookery.reports import IcmReport
from rookery.runs import Run
from rookery.search.labelling import UNLABELLED, Labels, TreeOrder
from rookery.seeding import stream_seed
from rookery.starters import DEMOS

CONFIG = DEMOS / "icm.yaml"
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def labeller() -> AsyncIterator[Labeller]:
    async with open_engine(EngineConfig(model="smollm2", dtype="float32")) as engine:
        encoder = load_encoder(resolve_model("smollm2").path)
        yield Labeller(sampler=engine, model=engine.base, encoder=encoder, context_tokens=8192)


@pytest.fixture(scope="module")
def store() -> ScoreStore:
    """Kept over the tests: a context that was read is not read again."""
    return ScoreStore()


def reviews(*words: str) -> IcmConfig:
    return load_config(IcmConfig, CONFIG, overrides=words).from_folder(CONFIG.parent)


def truth_of(config: IcmConfig) -> Labels:
    items = read_items(config.data)
    gold = read_gold(config.data, items)
    return tuple(gold[item.id] for item in items)


async def best_of(
    problem: Problem, config: IcmConfig, *, seed: int, start: Labels | None = None
) -> ChainResult:
    chains = [
        await Chain(problem, config=config.search, seed=stream_seed(seed, "chain", chain)).run(
            start
        )
        for chain in range(config.num_chains)
    ]
    return max(chains, key=lambda result: result.rank)


@long
async def test_searches_end_at_the_best_of_all_labellings(
    labeller: Labeller, store: ScoreStore
) -> None:
    """Eight reviews in pairs: six seeds, two of them from labels that are all wrong."""
    config = reviews("--data.limit", "8")
    problem = open_problem(config, read_items(config.data), labeller=labeller, store=store)
    options: list[Labels] = [
        tuple(x for first in firsts for x in (first, 1 - first))
        for firsts in product((0, 1), repeat=4)
    ]
    found = [a.utility for a in await problem.assess(options) if a is not None]
    assert len(found) == len(options)
    optimum = max(range(len(options)), key=lambda i: found[i])
    truth = truth_of(config)
    assert options[optimum] == truth
    wrong = tuple(1 - x if i < 4 else UNLABELLED for i, x in enumerate(truth))
    for seed in range(6):
        start = wrong if seed >= 4 else None
        result = await best_of(problem, config, seed=seed, start=start)
        assert result.labels == truth, f"seed {seed}"
        assert result.assessment.utility == pytest.approx(found[optimum])


async def test_contexts_are_the_tokens_of_their_whole_text() -> None:
    config = reviews("--data.preamble", "Judge these reviews.")
    items, names = read_items(config.data), config.data.labels
    encoder = load_encoder(resolve_model("smollm2").path)
    prompts = BatchPrompts(items, encoder=encoder, data=config.data)
    labels, order = truth_of(config), TreeOrder([(i, i + 1) for i in range(0, len(items), 2)])
    for target in order.leaves:
        shown = [f"{items[i].text} {names[labels[i]]}" for i in order.of(target)]
        text = "\n\n".join(["Judge these reviews.", *shown, items[target].text])
        found = prompts.context(labels, target, order=order.of(target))
        assert found == encoder.encode(text)


@long
async def test_twelve_reviews_are_all_right(labeller: Labeller, tmp_path: Path) -> None:
    config = reviews("--data.limit", "12")
    result = await _run(config, labeller, tmp_path)
    assert result.rows[0].accuracy == 1.0
    assert result.verdict == "coherent" and result.num_frustrated <= 1
    assert result.tokens.computed * 5 < result.tokens.naive


@long
async def test_without_constraints_everything_gets_one_label_and_is_told_so(
    labeller: Labeller, tmp_path: Path
) -> None:
    free = ["--constraints", "[]", "--baselines.inverted", "false"]
    config = reviews("--data.limit", "12", "--num-chains", "3", "--search.iterations", "100", *free)
    result = await _run(config, labeller, tmp_path)
    assert result.verdict == "collapsed"
    assert any("All labels are" in warning for warning in result.warnings)
    assert result.gold is not None and result.gold.utility is not None
    assert (result.utility or 0) > result.gold.utility, "true labels predict one another less"


@long
async def test_what_the_model_does_not_know_is_never_called_a_success(
    labeller: Labeller, tmp_path: Path
) -> None:
    """Capitals: true and false ones in pairs."""
    towns = ["France Paris Lyon", "Italy Rome Milan", "Japan Tokyo Osaka", "Spain Madrid Seville"]
    rows = [
        {
            "id": f"{country}-{town}",
            "pair": country,
            "text": f"Claim: The capital of {country} is {town}.",
            "label": str(town == right),
        }
        for country, right, other in map(str.split, towns)
        for town in (other, right)
    ]
    path = tmp_path / "capitals.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = IcmConfig.model_validate(
        {
            "data": {
                "path": path,
                "prompt": "{{ text }}\nI think this claim is",
                "group": "pair",
                "gold": {},
            },
            "constraints": [{"type": "exclusive", "count": "exactly_one"}],
            "search": {"iterations": 100, "num_start": 4},
            "num_chains": 2,
        }
    )
    result = await _run(config, labeller, tmp_path)
    assert result.rows[0].accuracy is not None
    if result.rows[0].accuracy < 1.0:
        assert result.verdict != "coherent" and result.warnings
    assert (result.verdict == "partial") == (result.num_labelled < 8)


async def _run(config: IcmConfig, labeller: Labeller, folder: Path) -> IcmReport:
    assert isinstance(labeller.sampler, EmbeddedEngine)
    items = read_items(config.data)
    document = config.model_dump(mode="json")
    with Run.create(folder, kind="icm", config=document, name="run") as run:
        result = await label(
            IcmInputs(config=config, items=items, gold=lambda: read_gold(config.data, items)),
            engine=labeller,
            run=run,
        )
    return result
