"""`rookery icm run`: what is left behind and what is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from driving import Command, write_rows

CONFIG: dict[str, Any] = {
    "engine": {"model": "tiny"},
    "data": {
        "path": "items.jsonl",
        "prompt": "w{{ a }} w{{ b }} w20",
        "separator": "\nw21\n",
        "labels": ["w90", "w91"],
        "group": "pair",
    },
    "constraints": [{"type": "exclusive", "count": "exactly_one"}],
    "search": {"iterations": 20, "num_start": 4},
    "baselines": {"inverted": False},
    "num_chains": 1,
}


@pytest.fixture
def config(place: Path) -> Path:
    rows = [
        {"id": f"i{i}", "pair": i // 2, "a": 4 + i, "b": 40 + 3 * i, "label": f"w{90 + i % 2}"}
        for i in range(8)
    ]
    write_rows(place / "items.jsonl", rows)
    (place / "c.json").write_text(json.dumps(CONFIG))
    return place


def test_labels_exports_and_report(rookery: Command, config: Path) -> None:
    ended = rookery("icm", "run", "c.json", "--name", "x", "--data.gold.field", "label")
    assert ended.code == 0
    folder = config / "runs/x"
    for line in ("labels   ", "exports  ", "report   "):
        assert f"{line}{folder}/" in ended.out, "a path is never folded"
    assert "95 % interval" in ended.out and "golden few-shot" in ended.out
    assert f"loading {config / 'tiny'}" in ended.err and "frustrated" in ended.err.splitlines()[-1]
    assert max(map(len, ended.out.split("verdict")[0].splitlines())) <= 80
    names = {path.name for path in folder.iterdir()}
    written = ("labels.jsonl", "sft.jsonl", "pairs.jsonl", "soft.jsonl", "report.json")
    assert {*written, "progress.json"} <= names
    used = rookery("eval", "tiny", folder / "sft.jsonl", "--name", "y", "--json")
    assert used.code == 0 and used.document["num_tasks"] == len(
        (folder / "sft.jsonl").read_text().splitlines()
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data.path", "item.jsonl"], "item.jsonl. Did you mean"),
        (["--data.path", "empty.jsonl"], "has 0 items; labels need at least 2"),
        (["--data.prompt", "'w{{ a }} '"], "the prompt ends in whitespace"),
        (["--data.prompt", "w{{ c }}"], "c"),
        (["--data.labels", "[w90, w90]"], "each may be there once"),
        (["--data.labels", "[w90]"], "labels is"),
        (["--data.group", "pairs"], "has no field 'pairs' (data.group)"),
        (["--data.gold.field", "truth"], "has no item with a field 'truth'"),
        (["--data.gold.field", "pair"], "the search must not see them"),
        (["--batch-size", "1"], "batch_size is 1; it should be greater than or equal to 2"),
        (["--serch.iterations", "3"], "serch is not a key. Did you mean search?"),
        (["--rezume"], "--rezume is not a flag. Did you mean --resume?"),
        (["--engine.model", "nan-model"], "holds NaN or infinity"),
        (["--engine.model", "./tinny"], "There is no model folder ./tinny"),
        (["--resume"], "--resume needs the run: add --name NAME"),
        (["--resume", "--name", "y"], "There is no run runs/y"),
        (["--exports.pairs", "{type: group, prompt: 'w{{ a }}', response: 'w{{ gone }}'}"],
         "exports.pairs, item i0"),
        (["--exports.pairs", "{type: group, prompt: '{{ a }}', response: '{{ b }}', label: w92}"],
         "exports.pairs.label is 'w92'; the labels are ['w90', 'w91']"),
        (["--engine", "{type: fleet}"], "a fleet needs servers"),
        (["--engine", "{type: external, url: 'http://127.0.0.1:1/v1', model: big}",
          "--tokenizer", "tiny"], "OPENAI_API_KEY is not set"),
        (["--engine", "{type: external, url: 'http://127.0.0.1:1/v1', model: big}"],
         "write tokenizer"),
    ],
)  # fmt: skip
def test_labellings_that_cannot_be(
    refused: Command,
    config: Path,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert sentence in refused("icm", "run", "c.json", *words).words


def test_a_batch_longer_than_the_context(refused: Command, config: Path) -> None:
    rows = [{"id": f"i{i}", "pair": i // 2, "a": 4 + i, "b": 4 + i} for i in range(60)]
    write_rows(config / "items.jsonl", rows)
    ended = refused("icm", "run", "c.json")
    assert "A batch of 60 items makes prompts of" in ended.words
    assert "the model reads 128: write batch_size:" in ended.words


class _Answers(BaseHTTPRequestHandler):
    """An API that reports the likeliest tokens; it prefers w90 behind long prompts."""

    wbufsize = -1  # an answer is one packet: the second of two waits for the first's receipt

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        odds = len(body["prompt"]) % 5 - 2.0
        tops = {"w90": -1.0 + odds / 2, "w91": -1.0 - odds / 2}
        logprobs = {"tokens": ["w90"], "token_logprobs": [-1.0], "top_logprobs": [tops]}
        answer = json.dumps({"choices": [{"text": "w90", "logprobs": logprobs}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_an_external_api_labels_too(
    rookery: Command, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as api:
        thread = threading.Thread(target=api.serve_forever)
        thread.start()
        engine = {
            "type": "external", "url": f"http://127.0.0.1:{api.server_port}/v1", "model": "big",
            "route": "completions", "logprobs": True, "requests_per_minute": 100_000,
        }  # fmt: skip
        words = ["--engine", json.dumps(engine), "--tokenizer", "tiny", "--name", "x"]
        ended = rookery("icm", "run", "c.json", *words)
        api.shutdown()
        thread.join()
    assert ended.code == 0
    rows = (config / "runs/x/labels.jsonl").read_text().splitlines()
    assert {json.loads(row)["model"] for row in rows} == {"base@big"}
    assert "secret" not in (config / "runs/x/config.json").read_text()
