"""`rookery fleet` against stub servers, and the other commands on a fleet of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driving import Command
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, serve

from rookery.compose.running import run_async
from rookery.fleet.servers.registry import process_start
from rookery.weights import write_adapter

FAKE = Path(__file__).parents[1] / "fleet" / "fake"


@contextmanager
def serving(*stubs: Stub) -> Iterator[None]:
    """The stubs in a thread of their own: a command has an event loop for itself."""
    import asyncio

    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:
            for stub in stubs:
                await stack.enter_async_context(serve(stub))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=run_async, args=(run(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        stop.set()
        thread.join(10)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No servers of the user's own are seen or stopped."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ROOKERY_CACHE", str(folder))
    return folder


def test_status_shows_load_adapters_and_what_does_not_answer(rookery: Command) -> None:
    stub = Stub(adapters={"poet@3fa9": "/a"})
    with serving(stub):
        good = rookery("fleet", "status", stub.url)
        assert good.code == 0 and "poet@3fa9" in good.out and "75%" in good.out
        [document] = rookery("fleet", "status", stub.url, "--json").document
        assert document["is_up"] and document["adapters"] == ["poet@3fa9"]
        bad = rookery("fleet", "status", stub.url, "http://127.0.0.1:9")
        assert bad.code == 2 and "can't be reached at http://127.0.0.1:9" in bad.words
    assert rookery("fleet", "status").words.startswith("No servers.")


def test_restore_gives_servers_their_weights_back(rookery: Command) -> None:
    stub = Stub(weights="half", weight_version="rookery:elsewhere:7:9:step-3")
    with serving(stub):
        ended = rookery("fleet", "restore", stub.url)
        assert ended.code == 0 and stub.url in ended.out
        assert (stub.weights, stub.weight_version) == ("", "default")
    assert rookery("fleet", "restore").code == 2


def test_verify_says_what_is_wrong_and_what_to_do(rookery: Command, tmp_path: Path) -> None:
    write_adapter(make_small("a"), tmp_path / "a")
    stub = Stub(root=str(write_model(tmp_path / "tiny")))
    poor = Stub(processed=False, routes=())
    with serving(stub, poor):
        ended = rookery("fleet", "verify", f"{stub.url}/v1/", "--adapter", tmp_path / "a")
        assert "✓ completion" in ended.out and "✓ adapters" in ended.out
        # The stub's cache counters stand still.
        assert ended.code == 2 and "✗ prefix cache" in ended.out
        ended = rookery("fleet", "verify", poor.url)
        assert ended.code == 2 and "✗ adapters" in ended.out and "--enable-lora" in ended.words
    gone = rookery("fleet", "verify", "http://127.0.0.1:9")
    assert gone.code == 2 and "✗ server" in gone.out


def test_up_serves_until_down(rookery: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    words = ["fleet", "up", "tiny", "--launch.device", "cpu", "--launch.port", "18720",
             "--launch.replicas", "2"]  # fmt: skip
    owner = _spawn(words)
    assert "In a config:" in _read_until(owner, "Ctrl-C")
    found = rookery("fleet", "status", "--json").document
    assert len(found) == 2 and all(process_start(server["pid"]) for server in found)
    ended = rookery("fleet", "down")
    assert ended.code == 0 and "Stopped 2 servers: http://127.0.0.1:1872" in ended.words
    out, err = owner.communicate(timeout=20)
    assert owner.returncode == 0 and "Stopped." in out and "Traceback" not in err
    assert not any(process_start(server["pid"]) for server in found)
    assert rookery("fleet", "down").out == "No servers to stop.\n"


def test_ctrl_c_stops_the_servers(rookery: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    owner = _spawn(["fleet", "up", "tiny", "--launch.device", "cpu", "--launch.port", "18740"])
    _read_until(owner, "Ctrl-C")
    [server] = rookery("fleet", "status", "--json").document
    owner.send_signal(signal.SIGINT)
    _, err = owner.communicate(timeout=20)
    assert owner.returncode == 130 and "Traceback" not in err
    assert not process_start(server["pid"])


def _spawn(words: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "rookery", *words], env=dict(os.environ), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _read_until(owner: "subprocess.Popen[str]", word: str) -> str:
    assert owner.stdout is not None
    text, limit = "", time.monotonic() + 30
    while word not in text:
        line = owner.stdout.readline()
        assert line and time.monotonic() < limit, text + (
            owner.stderr.read() if owner.stderr else ""
        )
        text += line
    return text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["up", "nowhere.yaml"], "There is no config file nowhere.yaml."),
        (["up", "tiny", "--launch.max-lora", "3"], "launch.max_lora is not a key. Did you mean"),
        (["up", "tiny", "--max-lors", "3"], "max_lors is not a key. Did you mean max_loras?"),
        (["up", "tiny", "--launch.max-loras", "99"], "max_cpu_loras is 64; it must be at least"),
        (["up", "tiny", "--placement", "ray"], "placement: ray needs replicas"),
        (["up", "urls.yaml"], "urls.yaml has no launch section"),
        (["verify", "http://127.0.0.1:9", "--adapter", "nowhere"], "nowhere"),
        (["verify"], "`rookery fleet verify` needs URL"),
    ],
)
def test_what_is_wrong_gets_a_sentence(
    refused: Command, place: Path, words: list[str], sentence: str
) -> None:
    (place / "urls.yaml").write_text("urls: [http://127.0.0.1:9]\n")
    assert sentence in refused("fleet", *words).words


def test_a_server_that_does_not_start_is_reported_with_its_log(rookery: Command) -> None:
    ended = rookery(
        "fleet", "up", "tiny", "--launch.device", "cpu", "--launch.port", "18760",
    )  # fmt: skip
    assert ended.code == 2 and "The end of its log" in ended.err
    assert "launch.python" in ended.words


def test_eval_runs_on_servers_by_url(rookery: Command, place: Path) -> None:
    stub = Stub(root=str(place / "tiny"))
    with serving(stub):
        words = (
            "eval",
            "tiny",
            "tasks.jsonl",
            "--limit",
            "6",
            "--fleet",
            stub.url,
            "--adapter",
            "a",
        )
        report = rookery(*words, "--json").document
        assert [row["num_scored"] for row in report["models"]] == [6, 6]
        assert stub.loads.total() == 1 and report["tokens"]["asked_and_answered"] > 0
        table = rookery(*words, "--name", "again")
        assert table.code == 0 and "tokens asked and answered" in table.words
        name = place / "runs" / "again"
        assert rookery("runs", "resume", name).code == 0
    both = rookery(*words, "--fleet", "x.yaml")
    assert both.code == 2 and "give URLs alone, or one config file" in both.words


def test_a_loop_on_servers_by_url_needs_their_tokenizer(rookery: Command, place: Path) -> None:
    stub = Stub(root=str(place / "tiny"))
    with serving(stub):
        (place / "genome.yaml").write_text(
            f"engine: {{type: fleet, urls: [{stub.url}], name: tiny}}\n"
            "init: {type: file, path: founders}\n"
            "tasksets: [{type: jsonl, path: tasks.jsonl}]\n"
        )
        untold = rookery("genome", "run", "genome.yaml")
        assert untold.code == 2 and "write tokenizer, the model's folder" in untold.words
