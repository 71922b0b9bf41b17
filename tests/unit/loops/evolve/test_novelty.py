"""Programs compared by embedding: what is rejected, who decides, what fails, what a resume does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import (
    ToyExecutor,
    evolve_toy,
    number_in,
    propose,
    propose_new,
    toy_config,
    toy_model,
)

from rookery.compat.openevolve import read_checkpoint
from rookery.errors import ConfigError, EngineError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.program import pack_vector, unpack_vector
from rookery.loops.evolve.proposer import read_verdict
from rookery.loops.evolve.report import export_population
from rookery.ports import Embedder, Executor, TextModel
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.testing import FakeEmbedder, FakeTextModel
from rookery.types import TextRequest

NUM_DIRECTIONS = 7


def direction(code: str) -> list[float]:
    """Programs whose numbers are equal modulo 7 mean the same."""
    return [float(number_in(code) % NUM_DIRECTIONS == place) for place in range(NUM_DIRECTIONS)]


def embedding_config(*, mode: str = "steady", workers: int = 2, **database: Any) -> EvolveConfig:
    own = {"num_islands": 2, "population_size": 50, "migration_interval": 5}
    return toy_config(
        max_iterations=30,
        llm={"models": [{"name": "toy"}], "retries": 0, "retry_delay": 0.0},
        database={**own, "embedding_model": "meaning", **database},
        rookery={"mode": mode, "lag": 6, "workers": workers, "in_flight": 4},
    )


def is_judging(request: TextRequest) -> bool:
    return "Second program:" in request.messages[-1].content


def judging(verdict: Callable[[TextRequest], str | None]) -> FakeTextModel:
    return toy_model(lambda r: verdict(r) if is_judging(r) else propose_new(r))


async def run_toy(
    folder: Path,
    config: EvolveConfig,
    *,
    model: TextModel | None = None,
    embedder: Embedder | None = None,
    executor: Executor | None = None,
) -> EvolveReport:
    return await evolve_toy(
        folder,
        config,
        models={"toy": model or toy_model(propose_new)},
        executor=executor or ToyExecutor(),
        embedder=embedder or FakeEmbedder(direction),
    )


def failures(result: EvolveReport) -> dict[str, int]:
    return {failure.kind: failure.count for failure in result.failures}


def exported(folder: Path) -> str:
    with Run.view(folder / "toy") as view:
        return export_population(view)


async def test_without_a_judge_each_direction_is_there_once(tmp_path: Path) -> None:
    executor = ToyExecutor()
    result = await run_toy(tmp_path, embedding_config(novelty_llm=False), executor=executor)
    found = failures(result)
    assert result.num_committed <= NUM_DIRECTIONS - 1
    assert result.num_committed + sum(found.values()) == 30
    assert found["similar"] >= 15
    assert len(executor.jobs) < 31 - found["similar"] / 2, "most are not evaluated"
    [similar] = [row for row in result.failures if row.kind == "similar"]
    assert "(cosine 1.0000)" in similar.first_message


@pytest.mark.parametrize(
    ("verdict", "is_kept"), [("NOVEL, another step.", True), ("NOT_NOVEL: a new name.", False)]
)
async def test_a_judge_has_the_last_word(tmp_path: Path, verdict: str, is_kept: bool) -> None:
    model = judging(lambda request: verdict)
    config = embedding_config(similarity_threshold=0.5)
    result = await run_toy(tmp_path, config, model=model)
    asked = [request for request in model.requests if is_judging(request)]
    assert len(asked) >= 15
    assert all("x = " in request.messages[-1].content for request in asked)
    assert failures(result).get("similar", 0) == (0 if is_kept else len(asked))
    assert result.tokens.prompt == sum(
        len(message.content.split()) for request in model.requests for message in request.messages
    )


async def test_one_model_of_the_ensemble_may_be_the_judge(tmp_path: Path) -> None:
    judge = FakeTextModel(lambda request: "NOT NOVEL", name="judge")
    config = embedding_config(novelty_llm="judge")
    llm = {"models": [{"name": "toy"}, {"name": "judge", "weight": 0.0}]}
    config = EvolveConfig.model_validate({**config.model_dump(), "llm": llm})
    await evolve_toy(
        tmp_path,
        config,
        models={"toy": toy_model(propose_new), "judge": judge},
        executor=ToyExecutor(),
        embedder=FakeEmbedder(direction),
    )
    assert judge.requests and all(is_judging(request) for request in judge.requests)


async def test_a_judge_or_an_embedder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"novelty_llm is 'nobody'.*write false"):
        await run_toy(tmp_path / "a", embedding_config(novelty_llm="nobody"))
    config = embedding_config()
    with pytest.raises(ConfigError, match="embedding model 'meaning', and it was not opened"):
        await evolve_toy(tmp_path / "b", config)


def every_third(embed: Callable[[str], list[float]]) -> Callable[[str], list[float] | None]:
    return lambda code: None if number_in(code) % 3 == 0 else embed(code)


@pytest.mark.parametrize(
    ("embed", "said"),
    [
        (every_third(direction), "No embedding: The embedder was told to fail."),
        (lambda code: [0.0] * 7, "without a direction"),
        (lambda code: [float("nan")], "without a direction"),
        (lambda code: [1.0] * (1 + number_in(code) % 2), "numbers, and those before it have not"),
    ],
)
async def test_what_the_embedding_server_does_wrong_is_counted(
    tmp_path: Path, embed: Callable[[str], list[float] | None], said: str
) -> None:
    config = embedding_config(novelty_llm=False)
    result = await run_toy(tmp_path, config, embedder=FakeEmbedder(embed))
    assert result.num_iterations == 30
    [warning] = [text for text in result.warnings if "by embedding" in text]
    assert said in warning


@pytest.mark.parametrize("verdict", [None, "Perhaps."])
async def test_a_judge_that_does_not_judge_rejects_nothing(
    tmp_path: Path, verdict: str | None
) -> None:
    result = await run_toy(tmp_path, embedding_config(), model=judging(lambda request: verdict))
    assert "similar" not in failures(result)
    [warning] = [text for text in result.warnings if "by embedding" in text]
    assert "judge of novelty" in warning


class Stopping:
    """An Embedder that ends the session after so many texts."""

    def __init__(self, num_texts: int) -> None:
        self._inner = FakeEmbedder(direction)
        self._num_left = num_texts

    async def embed(self, text: str) -> tuple[float, ...]:
        self._num_left -= 1
        if self._num_left < 0:
            raise KeyError("The session ends here.")
        return await self._inner.embed(text)


async def test_deterministic_runs_are_equal_however_they_are_run(tmp_path: Path) -> None:
    """With any number of workers, and interrupted; vectors are read from the run, not asked."""

    def config(workers: int) -> EvolveConfig:
        return embedding_config(mode="deterministic", workers=workers, novelty_llm=None)

    def model() -> FakeTextModel:
        return toy_model(
            lambda r: (
                ("NOVEL" if (r.seed or 0) % 2 else "NOT_NOVEL") if is_judging(r) else propose(r)
            )
        )

    await run_toy(tmp_path / "one", config(1), model=model())
    slow = ToyExecutor(delay_s=lambda job: 0.001 * (job.attempt * 7 % 5))
    await run_toy(tmp_path / "four", config(4), model=model(), executor=slow)
    embedders: Iterator[Stopping] = (Stopping(n) for n in (3, 5, 9))
    for embedder in embedders:
        with pytest.raises((KeyError, EngineError)):
            await run_toy(tmp_path / "cut", config(2), model=model(), embedder=embedder)
    last = FakeEmbedder(direction)
    await run_toy(tmp_path / "cut", config(2), model=model(), embedder=last)
    assert exported(tmp_path / "one") == exported(tmp_path / "four") == exported(tmp_path / "cut")
    assert "similar" in exported(tmp_path / "one")
    again = FakeEmbedder(lambda code: None)
    await run_toy(tmp_path / "cut", config(2), model=model(), embedder=again)
    assert again.texts == []


async def test_checkpoints_hold_the_embeddings(tmp_path: Path) -> None:
    await run_toy(tmp_path, embedding_config(novelty_llm=False))
    checkpoint = read_checkpoint(tmp_path / "toy" / "checkpoints" / "checkpoint_30")
    for program in checkpoint.programs:
        assert program.embedding is not None
        assert list(program.embedding) == direction(program.code)


@pytest.mark.parametrize("off", [0.0, 1.5])
async def test_a_threshold_that_no_cosine_meets_compares_nothing(
    tmp_path: Path, off: float
) -> None:
    embedder = FakeEmbedder(direction)
    await run_toy(tmp_path, embedding_config(similarity_threshold=off), embedder=embedder)
    assert embedder.texts == []


@pytest.mark.parametrize(
    ("text", "is_new"),
    [
        ("NOVEL", True),
        ("**NOT_NOVEL**: the same", False),
        ("not novel", False),
        ("Novel. It is not NOT_NOVEL.", True),
        ("NOT_NOVEL, although NOVEL in name", False),
        ("Hm.", None),
    ],
)
def test_the_first_verdict_of_an_answer_counts(text: str, is_new: bool | None) -> None:
    assert read_verdict(text) is is_new


def test_vectors_survive_as_text() -> None:
    vector = (0.25, -1.5, 3e-7)
    assert unpack_vector(pack_vector(vector)) == pytest.approx(vector, rel=1e-7)
    assert pack_vector(unpack_vector(pack_vector(vector))) == pack_vector(vector)
    for bad in ((), (0.0,), (float("inf"), 1.0), (1e300,)):
        with pytest.raises(ValueError, match="direction"):
            pack_vector(bad)
