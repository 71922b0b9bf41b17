"""The icm loop end to end on a scripted model: concept, resume, honesty, equality of the paths."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from loops.oracle import Oracle, make_config, write_items

from rookery.errors import ConfigError, EngineError, TaskError
from rookery.loops.icm import IcmConfig, IcmInputs, label, read_gold, read_items
from rookery.loops.icm.baselines import INVERTED, Baselines
from rookery.loops.icm.chain import Chain, ChainResult, Problem
from rookery.loops.icm.label_scorer import ScoreStore, SharedLabelScorer
from rookery.loops.icm.loop import open_problem
from rookery.loops.icm.prompts import Encoder
from rookery.reports import IcmReport, parse_icm_report
from rookery.runs import Run
from rookery.testing import BASE
from rookery.types import Datum, ModelRef, Score, ScoreRequest, TokenIds


async def run_icm(root: Path, oracle: Oracle, config: IcmConfig, *, name: str = "a") -> IcmReport:
    path = root / name
    opened = Run.open(path) if path.exists() else Run.create(root, kind="icm", config={}, name=name)
    items = read_items(config.data)
    with opened as run:
        return await label(
            IcmInputs(config=config, items=items, gold=lambda: read_gold(config.data, items)),
            engine=oracle.labeller,
            run=run,
        )


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def decisions(path: Path) -> list[tuple[str, Any]]:
    with Run.view(path) as run:
        return [(event.key, event.payload) for event in run.events("decision")]


class Forgetful(ScoreStore):
    """Every context is asked for again."""

    def __contains__(self, key: str) -> bool:
        return False


MakeProblem = Callable[..., tuple[Oracle, Problem, IcmConfig]]


@pytest.fixture
def problem(tmp_path: Path) -> MakeProblem:
    """A scripted model and one batch of its items, with every scorer."""

    def make(
        num_items: int, *, scorer: str = "shared", **changes: Any
    ) -> tuple[Oracle, Problem, IcmConfig]:
        oracle = Oracle(num_items, **changes)
        config = make_config(write_items(tmp_path / "items.jsonl", oracle))
        items = read_items(config.data)
        store = ScoreStore() if scorer == "shared" else Forgetful()
        return oracle, open_problem(config, items, labeller=oracle.labeller, store=store), config

    return make


async def test_labels_are_the_hidden_concept_and_everything_is_left_behind(tmp_path: Path) -> None:
    oracle = Oracle(16, seed=1)
    config = make_config(write_items(tmp_path / "items.jsonl", oracle))
    result = await run_icm(tmp_path, oracle, config)
    report = result
    assert oracle.accuracy(result.label_by_id) == 1.0
    assert report.verdict == "coherent" and report.warnings == ()
    assert report.num_labelled == 16 and report.balance == {"True": 8, "False": 8}
    assert [row.name for row in report.rows] == [
        "icm", "zero-shot", "random few-shot", "bootstrap", "golden few-shot", "inverted seed",
    ]  # fmt: skip
    assert report.rows[0].accuracy == 1.0
    assert report.tokens.computed < report.tokens.requested < report.tokens.naive
    assert report.gold is not None and report.gold.utility == pytest.approx(report.utility)
    written = json.loads((tmp_path / "a" / "report.json").read_text())
    assert parse_icm_report(written) == report and report.run == "a"
    rows = read_rows(tmp_path / "a" / "labels.jsonl")
    assert [row["id"] for row in rows] == [f"i{i}" for i in range(16)]
    assert all(row["margin"] > 0 and row["model"] == "base@fake" for row in rows)
    sft = read_rows(tmp_path / "a" / "sft.jsonl")
    assert sft[0] == {
        "id": "i0", "prompt": "#0 is", "choices": ["True", "False"],
        "answer": result.label_by_id["i0"],
        "weight": pytest.approx(2 / (1 + math.exp(-rows[0]["margin"])) - 1),
    }  # fmt: skip
    soft = read_rows(tmp_path / "a" / "soft.jsonl")
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in soft)
    pairs = read_rows(tmp_path / "a" / "pairs.jsonl")
    assert all(row["chosen"] != row["rejected"] for row in pairs) and len(pairs) == 16


@pytest.mark.parametrize("order_weight", [0.0, 4.0])
@pytest.mark.parametrize("seed", range(2))
async def test_the_shared_and_the_plain_path_decide_alike(
    problem: MakeProblem, seed: int, order_weight: float
) -> None:
    """Memo, batches and speculation change no decision, also when the order matters."""
    found = []
    for scorer, speculate in (("plain", 1), ("shared", 1), ("shared", 6)):
        oracle, opened, config = problem(12, scorer=scorer, seed=seed, order_weight=order_weight)
        chain = Chain(opened, config=config.search, seed=seed, speculate=speculate)
        found.append((await chain.run(), oracle.sampler.num_scores))
        if scorer == "shared":
            assert len(set(oracle.asked)) == len(oracle.asked), "no context was asked for twice"
    (plain, num_plain), (shared, num_shared), (ahead, _) = found
    assert plain == shared == ahead
    assert num_shared < num_plain


async def test_the_order_of_answers_does_not_matter(
    problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one request, answered backwards."""
    _, opened, config = problem(10, seed=3, order_weight=4.0)
    expected = await Chain(opened, config=config.search, seed=3).run()
    monkeypatch.setattr("rookery.loops.icm.label_scorer.BLOCK_REQUESTS", 1)
    oracle, opened, config = problem(10, seed=3, order_weight=4.0)
    score = oracle.sampler.score

    async def late(requests: Sequence[ScoreRequest]) -> list[Score]:
        for _ in range(len(requests[0].tokens) % 7):
            await asyncio.sleep(0)
        return await score(requests)

    monkeypatch.setattr(oracle.sampler, "score", late)
    assert await Chain(opened, config=config.search, seed=3).run() == expected


async def test_what_a_chain_asks_for_has_one_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(16, seed=1)
    path = write_items(tmp_path / "items.jsonl", oracle)
    config = make_config(path, num_chains=2, batch_size=8)
    asked: list[set[object]] = []
    score = oracle.sampler.score

    async def recorded(requests: Sequence[ScoreRequest]) -> list[Score]:
        asked.append({request.affinity for request in requests})
        return await score(requests)

    monkeypatch.setattr(oracle.sampler, "score", recorded)
    await run_icm(tmp_path, oracle, config)
    assert all(len(affinities) == 1 for affinities in asked)
    assert set.union(*asked) - {None} == {(batch, chain) for batch in (0, 1) for chain in (0, 1)}


async def test_the_best_chain_is_the_exhaustive_optimum(tmp_path: Path) -> None:
    for seed in range(2):
        oracle = Oracle(10, seed=seed)
        path = write_items(tmp_path / f"{seed}.jsonl", oracle)
        config = make_config(path, num_chains=3, seed=seed)
        items = read_items(config.data)
        opened = open_problem(config, items, labeller=oracle.labeller, store=ScoreStore())
        options = [
            tuple(x for first in firsts for x in (first, 1 - first))
            for firsts in product((0, 1), repeat=5)
        ]
        best = max(a.utility for a in await opened.assess(options) if a is not None)
        result = await run_icm(tmp_path, oracle, config, name=f"run{seed}")
        assert result.utility == pytest.approx(best)


async def test_permuting_the_true_labels_changes_no_decision(tmp_path: Path) -> None:
    oracle = Oracle(12, seed=2)
    path = write_items(tmp_path / "items.jsonl", oracle)
    config = make_config(path)
    first = await run_icm(tmp_path, oracle, config, name="first")
    rows = read_rows(path)
    truth = [row["truth"] for row in rows]
    for row, other in zip(rows, truth[1:] + truth[:1], strict=True):
        row["truth"] = other
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = await run_icm(tmp_path, oracle, config, name="second")
    assert decisions(tmp_path / "first") == decisions(tmp_path / "second")
    assert first.label_by_id == second.label_by_id
    assert first.rows[0].accuracy != second.rows[0].accuracy


def test_the_search_cannot_be_shown_the_true_labels(tmp_path: Path) -> None:
    oracle = Oracle(4)
    path = write_items(tmp_path / "items.jsonl", oracle)
    with pytest.raises(ValueError, match="holds the true labels"):
        make_config(path, constraints=[{"type": "exclusive", "group": "truth"}])
    data = {"path": str(path), "prompt": "#{{ n }} {{ truth }} is", "gold": {"field": "truth"}}
    with pytest.raises(TaskError, match="truth"):
        read_items(make_config(path, data=data).data)
    assert all("truth" not in item.fields for item in read_items(make_config(path).data))


class Killed(BaseException):
    pass


async def test_a_run_killed_anywhere_resumes_without_asking_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(10, seed=4, order_weight=2.0)
    config = make_config(write_items(tmp_path / "items.jsonl", oracle), num_chains=2)
    expected = await run_icm(tmp_path, oracle, config, name="whole")
    total = len(oracle.asked)
    score, kills = oracle.sampler.score, 0
    asked: list[TokenIds] = []
    for room in (1, 3, 4, 9, 30):
        left = [room]

        async def dying(requests: Sequence[ScoreRequest], left: list[int] = left) -> list[Score]:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            answers = await score(requests)
            asked.extend(request.tokens for request in requests)
            return answers

        monkeypatch.setattr(oracle.sampler, "score", dying)
        try:
            report = await run_icm(tmp_path, oracle, config, name="killed")
        except (Killed, BaseExceptionGroup):
            kills += 1
    monkeypatch.setattr(oracle.sampler, "score", score)
    before = len(oracle.asked)
    report = await run_icm(tmp_path, oracle, config, name="killed")
    asked.extend(oracle.asked[before:])
    assert kills >= 4
    assert len(asked) == len(set(asked)) == total, "what was answered is not asked for again"
    other = {"run", "seconds", "tokens"}
    assert report.model_dump(exclude=other) == expected.model_dump(exclude=other)
    assert decisions(tmp_path / "killed") != [] and report.tokens.naive > 0
    again = len(oracle.asked)
    assert (await run_icm(tmp_path, oracle, config, name="killed")).rows == report.rows
    assert len(oracle.asked) == again, "a finished run costs nothing to open"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n: [Score(model=BASE, logprobs=())] * n, "label log-probabilities"),
        (lambda n: [Score(model=BASE, logprobs=(), label_logprobs=(-1.0,))] * n, "for 2 labels"),
        (
            lambda n: [Score(model=BASE, logprobs=(), label_logprobs=(-1.0, float("nan")))] * n,
            "finite",
        ),
        (
            lambda n: [Score(model=BASE, logprobs=(), label_logprobs=(-1.0, float("-inf")))] * n,
            "finite",
        ),
        (
            lambda n: [Score(model=BASE, logprobs=(), label_logprobs=(-1.0, -1.0))] * (n - 1),
            "asked",
        ),
    ],
)
async def test_a_missing_number_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[int], list[Score]],
    words: str,
) -> None:
    oracle = Oracle(6)
    config = make_config(write_items(tmp_path / "items.jsonl", oracle))

    async def broken(requests: Sequence[ScoreRequest]) -> list[Score]:
        return answer(len(requests))

    monkeypatch.setattr(oracle.sampler, "score", broken)
    with pytest.raises(EngineError, match=words):
        await run_icm(tmp_path, oracle, config)


async def test_without_constraints_a_biased_model_collapses_and_is_told_so(tmp_path: Path) -> None:
    oracle = Oracle(12, prior=0.2, pull=0.5, noise=0.1, bias=4.0)
    path = write_items(tmp_path / "items.jsonl", oracle)
    result = await run_icm(tmp_path, oracle, make_config(path, constraints=[]))
    assert result.verdict == "collapsed"
    assert "All labels are True" in result.warnings[0]
    calibrated = make_config(path, constraints=[], objective={"calibrate": True}, num_chains=3)
    result = await run_icm(tmp_path, oracle, calibrated, name="calibrated")
    assert result.verdict != "collapsed" and oracle.accuracy(result.label_by_id) == 1.0


class Silent(Oracle):
    """A model that has no answer for one item."""

    def odds(self, tokens: TokenIds) -> float:
        asked = [self.words.items[token] for token in tokens if token in self.words.items]
        return math.nan if asked[-1] == 3 else super().odds(tokens)


async def test_an_end_with_unlabelled_items_is_never_a_success(tmp_path: Path) -> None:
    oracle = Silent(20, seed=1)
    path = write_items(tmp_path / "items.jsonl", oracle)
    config = make_config(path, constraints=[])
    result = await run_icm(tmp_path, oracle, config)
    assert result.verdict == "partial"
    assert result.num_labelled < 20
    assert None in result.label_by_id.values()
    rows = read_rows(tmp_path / "a" / "sft.jsonl")
    assert len(rows) <= result.num_labelled


@pytest.mark.parametrize("num_chains", [1, 2])
async def test_a_search_never_ends_below_a_baseline(tmp_path: Path, num_chains: int) -> None:
    """Two iterations label few items; bootstrap labels all of them, and none is frustrated."""
    oracle = Oracle(20, seed=1)
    path = write_items(tmp_path / "items.jsonl", oracle)
    search = {"iterations": 2, "num_start": 4}
    config = make_config(path, search=search, num_chains=num_chains, baselines={"inverted": False})
    report = await run_icm(tmp_path, oracle, config)
    ours, *others = report.rows
    assert report.num_labelled == 20
    known = [row.utility for row in others if row.utility is not None and not row.num_violated]
    assert known and ours.utility is not None and ours.utility >= max(known)
    assert ours.note == "labels of bootstrap: no chain found better ones"
    origins = [chain.origin for chain in report.chains]
    assert origins == ["random labels", "bootstrap"]
    assert [chain.is_best for chain in report.chains] == [False, True]


@pytest.mark.parametrize("num_chains", [1, 3])
async def test_the_search_from_the_opposite_counts_where_it_is_better(
    tmp_path: Path, num_chains: int
) -> None:
    """All chains end in labels that predict one another less well than those found from the
    opposite ones."""
    oracle = Oracle(12, seed=20, prior=0.3, order_weight=2.0)
    path = write_items(tmp_path / "items.jsonl", oracle)
    search = {"iterations": 40, "num_start": 4}
    config = make_config(path, search=search, num_chains=num_chains, batch_size=12, seed=20)
    found = await run_icm(tmp_path, oracle, config)
    rows = {row.name: row for row in found.rows}
    ours, inverted = rows["icm"], rows["inverted seed"]
    assert ours.utility is not None and ours.utility == inverted.utility
    assert ours.note == "labels of inverted seed: no chain found better ones"
    *chains, best = found.chains
    assert best.is_best and best.origin == "inverted seed"
    assert max(chain.utility or 0.0 for chain in chains) < (best.utility or 0.0)
    decided = {key for key, _ in decisions(tmp_path / "a")}
    assert sum(key.startswith(f"0/{len(chains)}/") for key in decided) == len(best.steps)
    again = await run_icm(tmp_path, oracle, config)
    assert again.label_by_id == found.label_by_id and again.rows == found.rows


async def test_a_model_without_the_concept_is_reported_as_ambiguous_or_chance(
    tmp_path: Path,
) -> None:
    """No prior: concept and inverse are equally coherent, and the start decides."""
    oracle = Oracle(16, prior=0.0, pull=3.0, noise=0.0)
    path = write_items(tmp_path / "items.jsonl", oracle)
    reports = [
        (await run_icm(tmp_path, oracle, make_config(path, seed=s), name=f"s{s}")) for s in range(4)
    ]
    accuracies = {report.rows[0].accuracy for report in reports}
    assert accuracies == {0.0, 1.0}, "both ends are found"
    for report in reports:
        assert report.verdict == ("inverse" if report.rows[0].accuracy == 0 else "ambiguous")
        assert any("the items do not decide" in warning for warning in report.warnings)


async def test_batches_keep_groups_together_and_are_labelled_each_by_itself(tmp_path: Path) -> None:
    oracle = Oracle(22, seed=5)
    path = write_items(tmp_path / "items.jsonl", oracle)
    result = await run_icm(tmp_path, oracle, make_config(path, batch_size=8, num_chains=2))
    assert len(result.label_by_id) == 22
    rows = read_rows(tmp_path / "a" / "labels.jsonl")
    assert {row["batch"] for row in rows} == {0, 1, 2}
    for i in range(0, 22, 2):
        assert rows[i]["batch"] == rows[i + 1]["batch"]
    assert oracle.accuracy(result.label_by_id) > 0.85


async def test_batches_of_opposite_concepts_are_never_called_coherent(tmp_path: Path) -> None:
    """A model that does not know the concept: each batch keeps what its start labels say."""
    seen = set()
    for seed in range(4):
        oracle = Oracle(24, prior=0.0, pull=3.0, noise=0.0)
        path = write_items(tmp_path / "items.jsonl", oracle)
        config = make_config(path, batch_size=12, seed=seed, baselines={"inverted": False})
        config = config.model_copy(update={"data": config.data.model_copy(update={"gold": None})})
        result = await run_icm(tmp_path, oracle, config, name=f"s{seed}")
        rights = [result.label_by_id[f"i{i}"] == ("True" if oracle.truth[i] > 0 else "False")
                  for i in range(24)]  # fmt: skip
        is_opposite = all(rights[:12]) != all(rights[12:])
        seen.add(is_opposite)
        [row] = result.transfers
        assert row.accuracy == (0.0 if is_opposite else 1.0)
        assert (result.verdict == "opposite") == is_opposite
    assert seen == {True, False}


async def test_more_than_two_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three labels by prompt; the hidden concept of the fake is their name in the text."""
    rows = [{"id": f"i{i}", "word": "abc"[i % 3]} for i in range(9)]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = IcmConfig.model_validate(
        {
            "data": {"path": str(path), "prompt": "{{ id }} {{ word }} is", "labels": list("abc")},
            "search": {"iterations": 200, "num_start": 3},
            "num_chains": 1,
        }
    )
    oracle = Oracle(2)

    def logprob(model: ModelRef, tokens: TokenIds, token: int) -> float:
        names = {t: word for word, t in oracle.words.ids.items()}
        return -0.1 if names[tokens[-2]] == names[token] else -3.0

    monkeypatch.setattr(oracle, "logprob", logprob)
    items = read_items(config.data)
    with Run.create(tmp_path, kind="icm", config={}, name="a") as run:
        result = await label(IcmInputs(config=config, items=items), engine=oracle.labeller, run=run)
    assert result.label_by_id == {row["id"]: row["word"] for row in rows}
    assert result.gold is None and result.rows[0].accuracy is None


async def test_texts_become_tokens_beside_the_event_loop(tmp_path: Path) -> None:
    """Of every batch, of what is trained on, and of what is shown to another batch."""
    oracle = Oracle(24, seed=6)
    path = write_items(tmp_path / "items.jsonl", oracle)
    config = make_config(path, batch_size=8, iterate={"num_batches": 1})
    threads: set[int] = set()

    def encode(text: str) -> TokenIds:
        threads.add(threading.get_ident())
        return oracle.words(text)

    async def tune(data: Sequence[Datum]) -> ModelRef:
        return ModelRef(name="icm", version=str(len(data)))

    labeller = replace(oracle.labeller, tune=tune, encoder=Encoder(encode=encode))
    with Run.create(tmp_path, kind="icm", config={}, name="a") as run:
        result = await label(
            IcmInputs(config=config, items=read_items(config.data)), engine=labeller, run=run
        )
    assert len(result.transfers) == 2
    assert threads and threading.get_ident() not in threads


async def test_batches_are_searched_from_the_opposite_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = asyncio.Barrier(2)
    inverted = Baselines.inverted

    async def together(*args: Any, **options: Any) -> ChainResult | None:
        async with asyncio.timeout(20):
            await both.wait()
        return await inverted(*args, **options)

    monkeypatch.setattr(Baselines, "inverted", together)
    oracle = Oracle(16, seed=6)
    config = make_config(write_items(tmp_path / "items.jsonl", oracle), batch_size=8, parallel=2)
    result = await run_icm(tmp_path, oracle, config)
    assert [row.utility is not None for row in result.rows if row.name == INVERTED] == [True]


async def test_chains_of_one_batch_share_what_is_in_flight(problem: MakeProblem) -> None:
    oracle, opened, _ = problem(8)
    assert isinstance(opened.scorer, SharedLabelScorer)
    labels = (0, 1) * 4
    contexts = [(labels, item) for item in range(8)]
    one, two = await asyncio.gather(opened.scorer.score(contexts), opened.scorer.score(contexts))
    assert one == two and oracle.sampler.num_scores == 8


async def test_iterating_trains_on_the_labels_and_goes_on_with_the_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not know the concept by itself learns it from the first batch."""
    oracle = Oracle(24, seed=6)
    path = write_items(tmp_path / "items.jsonl", oracle)
    config = make_config(path, batch_size=8, iterate={"num_batches": 1})
    trained: list[list[Datum]] = []
    seen: list[ModelRef] = []

    async def tune(data: Sequence[Datum]) -> ModelRef:
        trained.append(list(data))
        return ModelRef(name="icm", version=str(len(trained)))

    known = oracle.logprob

    def logprob(model: ModelRef, tokens: TokenIds, token: int) -> float:
        seen.append(model)
        return known(model, tokens, token)

    monkeypatch.setattr(oracle, "logprob", logprob)
    items = read_items(config.data)
    with Run.create(tmp_path, kind="icm", config={}, name="a") as run:
        labeller = replace(oracle.labeller, tune=tune)
        result = await label(IcmInputs(config=config, items=items), engine=labeller, run=run)
    assert [len(data) for data in trained] == [8, 16], "all labels so far"
    rows = read_rows(tmp_path / "a" / "labels.jsonl")
    assert [row["model"] for row in rows] == ["base@fake"] * 8 + ["icm@1"] * 8 + ["icm@2"] * 8
    assert [m.version for m in dict.fromkeys(seen)] == ["fake", "1", "2"]
    words = oracle.words.ids
    first = trained[0][0]
    assert first.tokens == (words["#0"], words["is"]) and first.positions == (1,)
    assert first.targets == (words[result.label_by_id["i0"] or ""],) and first.weights == (1.0,)
    with pytest.raises(ConfigError, match="adapters can be loaded"):
        await run_icm(tmp_path, oracle, config, name="b")
