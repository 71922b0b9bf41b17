"""Loops whose config names a service elsewhere: the same results as on an engine of their own."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

import rookery
from rookery.compose.serve import ServeConfig, serving
from rookery.embedded import EngineConfig
from rookery.errors import ConfigError, EngineError, ServiceDownError
from rookery.runs import Run
from rookery.service.keys import add_key
from rookery.weights import read_adapter

SCORER = """
def score(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
"""
KEY_NAME = "ROOKERY_TEST_KEY"


class Service:
    """`rookery serve` in a thread; started again on the same folder and port."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "serve"
        self.keys = place / "keys.json"
        self._place = place
        self._port = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def engine(self) -> dict[str, Any]:
        """As a config names it."""
        return {
            "type": "service",
            "url": f"http://127.0.0.1:{self._port}",
            "api_key_env": KEY_NAME,
            "away_s": 60.0,
        }

    def start(self) -> None:
        is_ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_ready)))
        self._thread.start()
        assert is_ready.wait(60)

    def stop(self) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join(60)

    async def _serve(self, is_ready: threading.Event) -> None:
        config = ServeConfig(
            port=self._port,
            keys=self.keys,
            models={"tiny": str(self._place / "tiny"), "chat": str(self._place / "chat")},
            folder=self.folder,
            engine=EngineConfig(cache_gib=0.01),
        )
        async with serving(config) as url:
            self._port = int(url.rpartition(":")[2])
            is_ready.set()
            await asyncio.to_thread(self._ended.wait)

    def left(self) -> dict[str, int]:
        """What the service keeps, as its own folder has it when it has stopped."""
        self.stop()
        self.start()
        answers = {name: self._get(name) for name in ("adapters", "checkpoints")}
        return {"adapters": len(answers["adapters"]),
                "checkpoints": len(answers["checkpoints"]["checkpoints"])}  # fmt: skip

    def _get(self, name: str) -> Any:
        request = Request(
            f"http://127.0.0.1:{self._port}/api/v1/{name}",
            headers={"X-API-Key": os.environ[KEY_NAME]},
        )
        with urlopen(request) as answer:
            return json.load(answer)


@contextmanager
def running(place: Path) -> Iterator[Service]:
    service = Service(place)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def service(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv(KEY_NAME, add_key(place / "keys.json", name="ada"))
    (place / "scorer.py").write_text(SCORER)
    with running(place) as service:
        yield service
        assert service.left() == {"adapters": 0, "checkpoints": 0}


def here(place: Path) -> dict[str, Any]:
    return {"model": str(place / "tiny"), "cache_gib": 0.01}


def genome(place: Path, **changes: Any) -> dict[str, Any]:
    return {
        "engine": here(place),
        "init": {"type": "file", "path": str(place / "founders")},
        "tasksets": [{"type": "jsonl", "path": str(place / "tasks.jsonl")}],
        "stages": [
            {"type": "ga", "generations": 1, "population": {"size": 2, "children": {"count": 2}}}
        ],
        "finals": {"num_finalists": 2, "num_voters": 2, "random_search": False},
        **changes,
    }


def grpo(place: Path, **changes: Any) -> dict[str, Any]:
    return {
        "engine": here(place),
        "tasksets": [
            {"type": "jsonl", "path": str(place / "tasks.jsonl"), "sampling": {"max_tokens": 4},
             "scorer": {"type": "python", "function": f"{place / 'scorer.py'}:score"}}
        ],
        "lora": {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"], "layers": 2},
        "steps": 4,
        "groups_per_step": 2,
        "group_size": 3,
        "drawing": {"max_tokens": 4},
        "learning_rate": 1e-2,
        "save_every": 2,
        "keep": 1,
        **changes,
    }  # fmt: skip


def clockless(report: Any) -> list[dict[str, Any]]:
    """The rows of a report without what differs between two equal runs."""
    rows = [row.model_dump() for row in report.rows]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def on(service: Service, place: Path) -> dict[str, Any]:
    return {"engine": service.engine, "tokenizer": str(place / "tiny")}


def test_a_search_on_a_service_is_the_same_search_and_a_wrong_key_or_model_is_said_first(
    service: Service, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rookery.run_genome(genome(place), name="own", progress=False)
    far = rookery.run_genome(genome(place, **on(service, place)), name="far", progress=False)
    assert clockless(far.report) == clockless(own.report)
    assert read_adapter(far.path / "winner").version == read_adapter(own.path / "winner").version
    assert "tml-" not in (far.path / "config.json").read_text()
    config = genome(place, **on(service, place))
    with pytest.raises(EngineError, match=r"no base model 'large'. It has: tiny, chat"):
        rookery.run_genome(
            {**config, "engine": {**service.engine, "model": "large"}}, name="x", progress=False
        )
    with pytest.raises(ConfigError, match="A service does not send its tokenizer"):
        rookery.run_genome({**config, "tokenizer": ""}, name="x", progress=False)
    with monkeypatch.context() as patched:
        patched.setenv(KEY_NAME, "tml-wrong")
        with pytest.raises(ServiceDownError, match=r"says: .*key"):
            rookery.run_genome(config, name="x", progress=False)
    assert not (place / "runs/x").exists()
    with pytest.raises(ValueError, match="an engine of its own"):
        ServeConfig.model_validate({"engine": service.engine})


def test_labels_and_adapters_of_a_service_are_the_same(service: Service, place: Path) -> None:
    rows = [{"id": f"i{i}", "a": 4 + i} for i in range(8)]
    (place / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "engine": here(place),
        "data": {"path": "items.jsonl", "prompt": "w{{ a }} w20", "labels": ["w90", "w91"]},
        "search": {"iterations": 10, "num_start": 4},
        "num_chains": 1,
        "iterate": {"num_batches": 2, "sft": {"rank": 2, "steps": 2, "targets": ["q_proj"]}},
    }
    own = rookery.run_icm(config, name="own", progress=False)
    far = rookery.run_icm({**config, **on(service, place)}, name="far", progress=False)
    labels = [
        [json.loads(row) for row in (one.path / "labels.jsonl").read_text().splitlines()]
        for one in (own, far)
    ]
    assert [row["label"] for row in labels[1]] == [row["label"] for row in labels[0]]
    scores = [row["score"] for row in labels[0]]
    assert [row["score"] for row in labels[1]] == pytest.approx(scores, abs=1e-5)
    values: dict[str, Any] = {
        "rank": 2, "alpha": 8.0, "targets": ["q_proj", "up_proj"], "layers": 2, "steps": 3,
        "batch_size": 4, "save_every": 1, "progress": False,
    }  # fmt: skip
    ours = rookery.run_sft(place / "tiny", place / "tasks.jsonl", "out/own", **values)
    theirs = rookery.run_sft(
        place / "tiny", place / "tasks.jsonl", "out/far", engine=service.engine, **values
    )
    assert theirs.version == ours.version and theirs.base == ours.base
    where: list[dict[str, Any]] = [{}, {"engine": service.engine}]
    measured = [
        rookery.evaluate(
            place / "tiny", place / "tasks.jsonl", adapters=["out/own", "out/far"],
            progress=False, **one,
        ).report
        for one in where
    ]  # fmt: skip
    assert measured[0].models == measured[1].models


def test_a_training_goes_on_with_the_service_started_again(
    service: Service, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service is restarted in the middle, and later the run is interrupted and resumed."""
    config = grpo(place, **on(service, place))
    whole = rookery.run_grpo(config, name="whole", progress=False)
    append, steps = Run.append, list[int]()

    class Killed(BaseException):
        pass

    async def appending(run: Run, kind: str, payload: Any, **values: Any) -> Any:
        if kind == "checkpoint" and payload["step"]:
            steps.append(payload["step"])
            if len(steps) == 1:
                await asyncio.to_thread(service.stop)
                await asyncio.to_thread(service.start)
            if len(steps) == 2:
                raise Killed
        return await append(run, kind, payload, **values)

    monkeypatch.setattr(Run, "append", appending)
    with pytest.raises(BaseException):  # noqa: B017
        rookery.run_grpo(config, name="again", progress=False)
    assert steps == [2, 4]
    again = rookery.resume("runs/again", progress=False)
    last = [read_adapter(one.path / "checkpoints/adapter_step_4") for one in (whole, again)]
    assert last[0].version == last[1].version


def test_prompts_are_evolved_on_a_service(service: Service, place: Path) -> None:
    rows = [{"prompt": f"{n} and {n + 1}", "reference": "x"} for n in range(24)]
    (place / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "prompt.txt").write_text("{{ prompt }}\n")
    scorer = {"type": "python", "function": f"{place / 'scorer.py'}:score"}
    taskset = {"type": "jsonl", "path": "asked.jsonl", "scorer": scorer}
    (place / "asked.yaml").write_text(json.dumps({**taskset, "sampling": {"max_tokens": 4}}))
    best = []
    for name, where in {"own": {}, "far": {"engine": {**service.engine, "model": "chat"}}}.items():
        own = {"mode": "deterministic", **where}
        report = rookery.evolve_prompt(
            "prompt.txt", "asked.yaml", place / "chat", output=name, progress=False,
            max_iterations=2, llm={"max_tokens": 16}, rookery=own,
        ).report  # fmt: skip
        assert report.best is not None
        best.append((report.best.code, report.best.score))
    assert best[0] == best[1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"full": {}}, "trains all weights"),
        ({"share": True}, "share is for the embedded engine"),
        ({"sweep": {"seeds": 2}}, "sweep is given"),
        ({"bridge": "slot"}, "the engine is no vLLM server"),
    ],
)
def test_what_a_service_cannot_do_is_refused_first(
    place: Path, changes: dict[str, Any], sentence: str
) -> None:
    far = {"engine": {"type": "service", "url": "http://127.0.0.1:9"}}
    with pytest.raises(ConfigError, match=sentence):
        rookery.run_grpo(grpo(place, **far, **changes), name="x", progress=False)
    assert not (place / "runs/x").exists()
