"""Trainings on environments of real atroposlib, through Rookery's gateway and through `run-api`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from environments.groups import make_document
from tests.real.peers import ATROPOS, needs_atropos, toy_training
from tiny import write_tiny_model

import rookery
from rookery.runs import Run

ENVIRONMENT = Path(__file__).with_name("atropos_environment.py")
pytestmark = [
    needs_atropos,
    pytest.mark.timeout(900),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def variables(folder: Path, *, engine: str, gateway: str) -> dict[str, str]:
    return {
        "ATROPOS_MODEL": str(folder), "ATROPOS_ENGINE": engine, "ATROPOS_GATEWAY": gateway,
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@contextmanager
def running(words: list[str], **extra: Any) -> Iterator[None]:
    with subprocess.Popen(words, start_new_session=True, **extra) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, 9)


def test_an_environment_of_atroposlib_trains_through_the_gateway(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = {
        "command": [ATROPOS, str(ENVIRONMENT), "serve", "--slurm", "false"],
        "env": variables(folder, engine=f"{url}/v1", gateway=url), "folder": str(tmp_path),
    }  # fmt: skip
    environment = {"port": port, "environments": [command]}
    outcome = rookery.run_grpo(
        toy_training(folder, environment),
        runs_dir=tmp_path / "runs",
        name="own",
        progress=False,
    )
    steps = outcome.report.steps
    assert [step.metrics["grpo/num_rollouts"] for step in steps] == [8, 8, 8]
    gaps = [step.metrics.get("grpo/logprob_gap") for step in steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps), "tokens are those that were drawn"
    with Run.view(outcome.path) as run:
        groups = [seq for event in run.events("batch") for seq in event.payload["groups"]]
    assert len(groups) == 6 == len(set(groups))


def test_batches_are_taken_from_a_real_run_api(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    api, engine = free_port(), free_port()
    url = f"http://127.0.0.1:{api}"
    run_api = [str(Path(ATROPOS).with_name("run-api")), "--host", "127.0.0.1", "--port", str(api)]
    gateway = tmp_path / "gateway.yaml"
    gateway.write_text(
        f"port: {engine}\nvocab_size: 97\n"
        f"engine: {{type: embedded, model: {folder}, cache_gib: 0.01}}\n"
    )
    serve = [sys.executable, "-m", "rookery", "grpo", "gateway", str(gateway)]
    env = variables(folder, engine=f"http://127.0.0.1:{engine}/v1", gateway=url)
    plays = [ATROPOS, str(ENVIRONMENT), "serve", "--slurm", "false"]
    with running(run_api), running(serve), running(plays, env={**os.environ, **env}, cwd=tmp_path):
        wait_for(url)
        config = toy_training(folder, {"url": url}, max_gap=1.0)
        outcome = rookery.run_grpo(
            config, runs_dir=tmp_path / "runs", name="client", progress=False
        )
    assert [step.metrics["grpo/num_rollouts"] for step in outcome.report.steps] == [8, 8, 8]


@pytest.mark.parametrize(("kind", "is_given_again"), [("gateway", True), ("run-api", False)])
def test_what_a_killed_trainer_was_given(kind: str, is_given_again: bool, tmp_path: Path) -> None:
    """The same requests to both: `run-api` has handed its batch out, and it is lost."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = tmp_path / "gateway.yaml"
    config.write_text(f"port: {port}\nvocab_size: 97\nfolder: groups\n")
    words = {
        "gateway": [sys.executable, "-m", "rookery", "grpo", "gateway", str(config)],
        "run-api": [
            str(Path(ATROPOS).with_name("run-api")), "--host", "127.0.0.1", "--port", str(port)
        ],
    }[kind]  # fmt: skip
    trainer = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 16,
        "checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 9,
    }  # fmt: skip
    with running(words):
        wait_for(url)
        ask(f"{url}/register", trainer)
        assert ask(f"{url}/batch") == {"batch": None}
        for _ in range(2):
            ask(f"{url}/scored_data", make_document())
        given = ask(f"{url}/batch")
        assert len(given["batch"]) == 2
        register_again(url, trainer)  # it was killed before it had trained on it
        assert ask(f"{url}/batch") == (given if is_given_again else {"batch": None})


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def register_again(url: str, trainer: dict[str, Any]) -> None:
    """The gateway takes another trainer when the one before was silent for a while."""
    end_s = time.monotonic() + 120
    while True:
        try:
            ask(f"{url}/register", trainer)
        except urllib.error.HTTPError as error:
            assert error.code == 409 and time.monotonic() < end_s
            time.sleep(1)
        else:
            return


def wait_for(url: str) -> None:
    end_s = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert time.monotonic() < end_s, f"{url} does not answer"
            time.sleep(0.2)
        else:
            return
