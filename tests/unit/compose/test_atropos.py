"""Trainings on Atropos environments, through HTTP: the gateway of a run, and one alone."""

import asyncio
import gzip
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from environments.groups import make_document
from forked import forked, run_code
from marks import long

from rookery.compat.atropos import feed as feed_module
from rookery.compat.atropos import group_queue as registry
from rookery.compat.atropos.feed import ClientFeed, open_client
from rookery.compat.atropos.group_queue import TrainerRegistration
from rookery.compat.atropos.options import AtroposOptions, translate
from rookery.compose.grpo import run_grpo
from rookery.compose.grpo.atropos import GatewayConfig, serving_gateway
from rookery.compose.kinds import resume
from rookery.errors import ConfigError, RunError, TaskError
from rookery.loops.grpo import GrpoConfig
from rookery.runs import Run
from rookery.runs.journal import Journal

TOY = Path(__file__).parents[1] / "environments" / "toy_environment.py"
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 16,
    "checkpoint_dir": "c", "save_checkpoint_interval": 2, "starting_step": 0, "num_steps": 5,
}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    command = [sys.executable, str(TOY), "{gateway}", "{engine}"]
    environment = {
        "type": "atropos", "port": 0, "max_token_len": 64, "batch_s": 120,
        "environments": [{"command": command}],
    }  # fmt: skip
    return {
        "engine": {"type": "embedded", "model": str(folder), "cache_gib": 0.01},
        "environment": environment, "steps": 3, "groups_per_step": 2, "group_size": 4,
        "learning_rate": 1e-2, "save_every": 2, "drawing": {"max_tokens": 8},
        "lora": {"rank": 4}, **changes,
    }  # fmt: skip


def test_a_policy_is_trained_on_an_environment_elsewhere(tiny_folder: Path, tmp_path: Path) -> None:
    outcome = run_grpo(
        config_of(tiny_folder), runs_dir=tmp_path / "runs", name="toy", progress=False
    )
    report = outcome.report
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert all(step.metrics["grpo/num_groups"] == 2 for step in report.steps)
    assert all(step.metrics["game/toy_0/reward"] is not None for step in report.steps)
    gaps = [step.metrics.get("grpo/logprob_gap") for step in report.steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps)
    assert report.chosen_step == 3 and "no tasksets to measure on" in " ".join(report.warnings)
    with Run.view(outcome.path) as run:
        groups = [seq for event in run.events("batch") for seq in event.payload["groups"]]
    assert len(groups) == 6 == len(set(groups)), "each group is trained on once"
    assert (outcome.path / "logs" / "environment-0.log").exists()


def test_answers_that_top_p_cut_are_trained_on_with_what_they_were_drawn_from(
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    """Over the whole vocabulary the log-probabilities would be off by a tenth."""
    config = config_of(tiny_folder, steps=2)
    config["environment"]["environments"][0]["command"].append("0.8")
    outcome = run_grpo(config, runs_dir=tmp_path / "runs", name="toy", progress=False)
    gaps = [step.metrics.get("grpo/logprob_gap") for step in outcome.report.steps]
    assert len(gaps) == 2 and all(gap is not None and gap < 1e-3 for gap in gaps)


def test_some_groups_of_a_batch_have_log_probabilities_of_a_reference(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Those of others are computed."""
    loss = {"type": "grpo", "kl": {"weight": 0.1}}
    config = config_of(tiny_folder, steps=2, loss=loss)
    config["environment"]["environments"][0]["env"] = {"TOY_REFERENCE": "1"}
    outcome = run_grpo(config, runs_dir=tmp_path / "runs", name="toy", progress=False)
    assert len(outcome.report.steps) == 2


def test_a_run_without_environments_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no data here')"]
    environment = {
        "type": "atropos", "port": 0, "max_token_len": 64,
        "environments": [{"command": command, "restarts": 0}],
    }  # fmt: skip
    with pytest.raises(TaskError, match="No environment is left: environment 0 ended with status"):
        run_grpo(
            config_of(tiny_folder, environment=environment),
            runs_dir=tmp_path / "runs",
            progress=False,
        )


GARBAGE = """
import json, sys, time, urllib.request
def post(path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return json.load(error)
new = {"max_token_length": 64, "desired_name": "odd", "weight": 1.0, "group_size": 8}
while (found := post("/register-env", new))["status"] != "success":
    time.sleep(0.05)
post("/scored_data", [1, "nothing"])
group = json.loads(sys.argv[2]) | {"env_id": found["env_id"]}
post("/scored_data", group)
post("/scored_data", group | {"scores": [1.0]})
"""


def test_a_run_without_batches_says_what_came_instead(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one environment, of which nothing makes a batch."""
    monkeypatch.setattr(registry, "SILENT_S", 0.5)
    group = json.dumps(make_document(5))
    command = [sys.executable, "-c", GARBAGE, "{gateway}", group]
    environment = {
        "type": "atropos", "port": 0, "max_token_len": 64,
        "environments": [{"command": command}],
    }  # fmt: skip
    with pytest.raises(TaskError, match="No environment is left") as failed:
        run_grpo(
            config_of(tiny_folder, environment=environment),
            runs_dir=tmp_path / "runs",
            progress=False,
        )
    said = str(failed.value)
    assert "the environments are none" in said
    assert "1 groups of 5 to 5 sequences do not make up the group_size" in said
    assert "2 times groups were refused, the last time: A group has 5 sequences" in said


KILLED = """
import json, os, signal, sys
from rookery.compose.grpo import run_grpo
from rookery.compose.grpo.plan import plan_grpo
from rookery.compose.kinds import resume
from rookery.runs import Run
from rookery.runs.journal import Journal

config, runs, point, number = json.loads(sys.argv[1]), *sys.argv[2:]
append, num = Run.append, 0

async def passing(self, kind, payload, *, key=""):
    global num
    num += kind == "batch"
    if point == "before" and num == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    event = await append(self, kind, payload, key=key)
    if point == "after" and num == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return event

Run.append = passing
run_grpo(config, runs_dir=runs, name="toy", progress=False)
"""


@pytest.mark.parametrize(("point", "number"), [pytest.param("before", 2, marks=long), ("after", 3)])
def test_a_killed_training_goes_on_and_trains_each_group_once(
    point: str, number: int, tiny_folder: Path, tmp_path: Path
) -> None:
    # More groups than an environment sends ahead: the run needs one that is started again.
    config = config_of(tiny_folder, steps=6)
    words = (json.dumps(config), str(tmp_path / "runs"), point, str(number))
    with forked(run_code, KILLED, *words) as killed:
        assert killed.wait() == -signal.SIGKILL
    log = (tmp_path / "runs" / "toy" / "logs" / "environment-0.log").read_text()
    assert "ClientResponseError" not in log, "it may see the connection end, and no refusal"
    outcome = resume(tmp_path / "runs" / "toy")
    assert [step.step for step in outcome.report.steps] == [0, 1, 2, 3, 4, 5]
    with Run.view(outcome.path) as run:
        groups = [seq for event in run.events("batch") for seq in event.payload["groups"]]
        names = [event.payload["desired_name"] for event in run.events("environment")]
    assert len(groups) == 12 == len(set(groups))
    assert names == ["toy", "toy"], "the one that was killed with the run, and its successor"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"type": "atropos", "host": "0.0.0.0"}}, "others reach: write key_env"),
        ({"environment": {"type": "atropos"}, "staleness": 1}, "staleness is for tasks"),
        ({"environment": {"type": "atropos"}, "drawing": {"top_p": 0.9}}, "no room for what they"),
        ({"environment": None}, "tasksets is empty"),
        ({"bridge": "alias"}, "new weights need no bridge"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        GrpoConfig.model_validate(config_of(tmp_path, **changes))


@asynccontextmanager
async def gateway(folder: Path, **changes: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    config = GatewayConfig(port=0, folder=folder / "gateway", vocab_size=97, **changes)
    async with serving_gateway(config) as url, aiohttp.ClientSession(url) as session:
        yield session, url


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    async with session.request(method, path, json=body) as response:
        return await response.json()


async def test_the_thirteen_routes_answer_as_run_api_does(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (session, _):
        assert await ask(session, "GET", "/") == {"message": "AtroposLib API"}
        assert await ask(session, "GET", "/info") == {"batch_size": -1, "max_token_len": -1}
        assert await ask(session, "GET", "/wandb_info") == {"group": None, "project": None}
        assert (await ask(session, "GET", "/batch"))["status"] == "error"
        assert isinstance((await ask(session, "POST", "/register", REGISTRATION))["uuid"], int)
        assert await ask(session, "GET", "/info") == {"batch_size": 4, "max_token_len": 16}
        assert await ask(session, "GET", "/wandb_info") == {"group": "g", "project": "p"}
        env = {"max_token_length": 16, "desired_name": "e", "weight": 1.0, "group_size": 2}
        waiting = await ask(session, "POST", "/register-env", env)
        assert waiting == {"status": "wait for trainer to start"}
        assert await ask(session, "GET", "/batch") == {"batch": None}
        found = await ask(session, "POST", "/register-env", env)
        assert found["env_id"] == 0 and found["wandb_name"] == "e_0" and found["num_steps"] == 5
        assert (await ask(session, "GET", "/latest_example"))["tokens"] == []
        one = make_document(env_id=0)
        assert await ask(session, "POST", "/scored_data", one) == {"status": "received"}
        many = await ask(session, "POST", "/scored_data_list", [one, make_document(1, env_id=0)])
        assert many == {
            "status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1,
        }  # fmt: skip
        status = await ask(session, "GET", "/status")
        assert status == {"current_step": 0, "queue_size": 2}
        assert (await ask(session, "GET", "/status-env", {"env_id": 0}))["self_queue_size"] == 2
        batch = await ask(session, "GET", "/batch?after=0")
        assert batch["batch_id"] == 1 and len(batch["batch"]) == 2
        assert set(batch["batch"][0]) >= {"tokens", "masks", "scores", "distill_logprobs"}
        assert await ask(session, "GET", "/batch?after=0") == batch, "until it is acknowledged"
        assert await ask(session, "POST", "/disconnect-env", {"env_id": 0}) == {"status": "success"}
        gone = await ask(session, "POST", "/disconnect-env", {"env_id": 7})
        assert gone["status"] == "failure" and "no environment 7" in gone["error"]
        async with session.get("/reset_data") as response:
            assert await response.text() == "Reset successful"
        assert await ask(session, "GET", "/status") == {"current_step": 0, "queue_size": 0}


async def test_bad_requests_get_a_sentence_and_cost_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, body_mib=0.01) as (session, _):
        await ask(session, "POST", "/register", REGISTRATION)
        plain = make_document(env_id=3)
        assert "no environment 3" in (await ask(session, "POST", "/scored_data", plain))["error"]
        missing = {"tokens": [[1, 2]]}
        assert (
            "masks: Field required"
            in (await ask(session, "POST", "/scored_data", missing))["error"]
        )
        bomb = gzip.compress(b"0" * 10**7)
        headers = {"Content-Encoding": "gzip"}
        for body in (bomb, b"x" * 20_000):
            async with session.post("/scored_data", data=body, headers=headers) as response:
                assert response.status == 413 and "The body is larger" in await response.text()
        async with session.post("/scored_data", data=b"nogzip", headers=headers) as response:
            assert response.status == 400 and "not gzip" in await response.text()
        small = gzip.compress(json.dumps(make_document()).encode())
        async with session.post("/scored_data", data=small, headers=headers) as response:
            assert await response.json() == {"status": "received"}


async def test_a_second_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first one computes a step and asks for nothing."""
    monkeypatch.setattr(registry, "ACTIVE_S", 0.5)
    monkeypatch.setattr(feed_module, "ALIVE_S", 0.05)
    async with gateway(tmp_path) as (session, url), open_client(url) as client:
        await client.register(TrainerRegistration.model_validate(REGISTRATION))
        for _ in range(10):
            refused = await ask(session, "POST", "/register", REGISTRATION | {"batch_size": 8})
            assert "A trainer with batch_size 4 asked 0 s ago" in refused["error"]
            await asyncio.sleep(0.1)
        for _ in range(2):
            await ask(session, "POST", "/scored_data", make_document())
        assert (await client.batch(after=0))[0] == 1


async def test_a_batch_is_asked_for_again_when_its_gateway_was_killed_while_it_sent_it() -> None:
    answers = [b'{"uuid": 5}', b'{"batch": [', json.dumps({"batch": [make_document()]}).encode()]
    lengths = [len(answers[0]), len(answers[2]), len(answers[2])]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
        writer.write(head.format(lengths.pop(0)).encode() + answers.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_client(f"http://127.0.0.1:{port}") as client:
        await client.register(TrainerRegistration.model_validate(REGISTRATION))
        number, [group] = await client.batch(after=0)
    assert number == 1 and group.tokens == make_document()["tokens"]


async def test_a_gateway_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the environments that take too long."""
    monkeypatch.setattr(feed_module, "REQUEST_S", 0.1)
    monkeypatch.setattr(feed_module, "RETRY_S", 0.01)

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(TaskError, match=rf"The gateway at {url} does not answer: nothing came"):
            async with open_client(url) as client:
                feed = ClientFeed(client, vocab_size=97, max_tokens=9, limit_s=3600)
                await feed.take(0, after=0)
        for writer in writers:
            writer.close()


async def test_a_trainer_that_is_gone_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ACTIVE_S", 0.0)
    async with gateway(tmp_path) as (session, url), open_client(url) as client:
        await client.register(TrainerRegistration.model_validate(REGISTRATION))
        assert "uuid" in await ask(session, "POST", "/register", REGISTRATION)
        with pytest.raises(TaskError, match="Another trainer has registered since"):
            await client.batch(after=0)


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    async with gateway(tmp_path, key="secret") as (session, url):
        async with session.get("/status") as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession(url, headers=headers) as known, known.get("/status") as ok:
            assert ok.status == 200
        for key, status in (("secret", 200), ("public", 401)):  # as atroposlib can be told
            address = url.replace("://", f"://any:{key}@")
            async with session.get(f"{address}/status") as response:
                assert response.status == status
        headers = {"Authorization": "Basic nothing"}
        async with session.get("/status", headers=headers) as response:
            assert response.status == 401


def test_environments_of_a_run_with_a_key_are_given_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "a secret/with signs")
    config = config_of(tiny_folder, steps=1)
    config["environment"]["key_env"] = "GATEWAY_KEY"
    command = config["environment"]["environments"][0]["command"]
    command[-1] = "{gateway}"  # the toy sends the engine no key of its own
    outcome = run_grpo(config, runs_dir=tmp_path / "runs", name="toy", progress=False)
    assert len(outcome.report.steps) == 1


async def test_a_trainer_makes_itself_known_to_a_gateway_that_was_started_anew(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = GatewayConfig(port=port, folder=tmp_path / "gateway", vocab_size=97)
    registration = TrainerRegistration.model_validate(REGISTRATION)
    async with open_client(f"http://127.0.0.1:{port}") as client:
        for number in range(2):
            async with serving_gateway(config) as url, aiohttp.ClientSession(url) as session:
                if number == 0:
                    await client.register(registration)
                for _ in range(2):
                    await ask(session, "POST", "/scored_data", make_document())
                found, groups = await client.batch(after=number)
                assert found == number + 1 and len(groups) == 2


async def test_a_group_that_cannot_be_written_is_to_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """atroposlib drops what is refused with 4xx, and sends again what failed with 5xx."""

    async def full(*_: Any) -> list[int]:
        raise RunError("The disk is full.")

    async with gateway(tmp_path) as (session, _):
        await ask(session, "POST", "/register", REGISTRATION)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append_many", full)
            async with session.post("/scored_data", json=make_document()) as response:
                assert response.status == 503 and "disk is full" in await response.text()
        assert await ask(session, "POST", "/scored_data", make_document()) == {"status": "received"}


async def test_a_batch_is_compressed_for_who_reads_that(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (session, _):
        await ask(session, "POST", "/register", REGISTRATION)
        for _ in range(2):
            await ask(session, "POST", "/scored_data", make_document())
        answers = {}
        for coding in ("gzip", "identity"):
            headers = {"Accept-Encoding": coding}
            async with session.get("/batch?after=0", headers=headers) as response:
                assert (response.headers.get("Content-Encoding") == "gzip") == (coding == "gzip")
                answers[coding] = await response.json()
        assert answers["gzip"] == answers["identity"] and answers["gzip"]["batch_id"] == 1


async def test_engine_routes_over_the_embedded_engine(tiny_folder: Path, tmp_path: Path) -> None:
    engine = {"type": "embedded", "model": str(tiny_folder), "cache_gib": 0.01}
    async with gateway(tmp_path, engine=engine) as (session, _):
        assert (await ask(session, "GET", "/health"))["status"] == "ok"
        body = {
            "prompt": {"prompt_token_ids": [5, 6, 7]}, "n": 2, "max_tokens": 3, "logprobs": 0,
            "prompt_logprobs": 2, "ignore_eos": True,
        }  # fmt: skip
        answer = await ask(session, "POST", "/generate", body)
        assert len(answer["logprobs"]) == 2 and len(answer["logprobs"][0]) == 3
        assert [int(next(iter(e[0]))) for e in answer["logprobs"][0]] == answer["token_ids"][0]
        assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 3
        assert "7" in answer["prompt_logprobs"][2] and len(answer["prompt_logprobs"][2]) >= 2
        asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        tokens = (await ask(session, "POST", "/inference/v1/generate", asked))["choices"][0]
        assert len(tokens["token_ids"]) == 2 == len(tokens["logprobs"]["content"])
        completion = {"model": "any", "prompt": "w5 w6", "max_tokens": 2}
        text = await ask(session, "POST", "/v1/completions", completion)
        assert text["choices"][0]["prompt_token_ids"][-2:] == [5, 6]
        assert (await ask(session, "GET", "/v1/models"))["data"][0]["id"] == "policy"
        long = {"token_ids": [5] * 200, "sampling_params": {}}
        assert "shorten it" in (await ask(session, "POST", "/inference/v1/generate", long))["error"]


async def test_a_training_takes_batches_from_a_gateway_elsewhere(
    tiny_folder: Path, tmp_path: Path
) -> None:
    async with gateway(tmp_path) as (session, url):
        environment = {"type": "atropos", "url": url, "batch_s": 60}
        config = config_of(tiny_folder, environment=environment, steps=2, max_gap=100.0)
        training = asyncio.create_task(
            asyncio.to_thread(
                run_grpo, config, runs_dir=tmp_path / "runs", name="client", progress=False
            )
        )
        while (await ask(session, "GET", "/info"))["max_token_len"] == -1:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.05)
        columns = ("tokens", "masks", "inference_logprobs")
        long = {name: [row * 33 for row in make_document(4)[name]] for name in columns}
        refused = await ask(session, "POST", "/scored_data", make_document(4) | long)
        assert "has 132 tokens and the trainer takes 128" in refused["error"], "its context"
        while not training.done():
            status = await ask(session, "GET", "/status")
            if status["queue_size"] < 8:
                await ask(session, "POST", "/scored_data", make_document(4))
        report = (await training).report
    assert [step.metrics["grpo/num_rollouts"] for step in report.steps] == [8, 8]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"bridge": "restart", "publish_every": 3, "full": True}),
        ({"weight_bridge_mode": "shared_vllm"}, {"bridge": "alias", "full": True}),
        ({"single_copy": True}, {"bridge": "alias", "full": True}),
        ({"weight_bridge_mode": "lora_only"}, {"lora": {"rank": 16, "alpha": 32.0}}),
        ({"use_wandb": True}, {"track": ["wandb"]}),
    ],
)
def test_options_of_the_example_trainer_are_a_config(
    options: dict[str, Any], keys: dict[str, Any]
) -> None:
    document, notes = translate(AtroposOptions(model_name="m", device="cpu", **options), {})
    assert {key: document[key] for key in keys} == keys
    assert GrpoConfig.model_validate(document).steps == 10
    assert any(note.startswith("--save-path") for note in notes)


def test_variables_and_options_without_a_use_are_answered() -> None:
    environment = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": ".", "NUM_INFERENCE_NODES": "0"}
    options = AtroposOptions(model_name="m", vllm_config_path=Path("x"), world_size=2)
    document, notes = translate(options, environment)
    assert document["bridge"] == "alias"
    for name in ("--vllm-config-path", "--world-size", "LOGDIR", "NUM_INFERENCE_NODES"):
        assert any(name in note for note in notes), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 1, "gradient_accumulation_steps": 3}, "is 3 sequences"),
        ({"batch_size": -2, "gradient_accumulation_steps": -2}, "--batch-size is -2: give 1"),
        ({"training_steps": 0}, "--training-steps is 0: give 1"),
        ({"vllm_restart_interval": 0}, "--vllm-restart-interval is 0: give 1"),
        ({"warmup_steps": -3}, "--warmup-steps is -3: give 0"),
        ({"model": "other"}, "Got both of --model-name and --model"),
        ({"model_name": ""}, "Got neither of --model-name and --model"),
    ],
)
def test_options_that_no_config_can_be_made_of_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        translate(AtroposOptions(**{"model_name": "m", **options}), {})


def test_options_of_the_server_are_those_of_the_trainer() -> None:
    document, _ = translate(AtroposOptions(model="m", port=9009, engine_ports=()), {})
    assert document["engine"]["launch"]["model"] == "m"
    assert document["environment"]["engine_ports"] == [9009]
    document, _ = translate(AtroposOptions(model="m"), {})
    assert document["environment"]["engine_ports"] == [9001, 9004, 9005, 9006, 9007]
    assert "gpu_memory_utilization" not in document["engine"]["launch"], "the plan leaves it some"
    document, _ = translate(AtroposOptions(model="m", gpu_memory_utilization=0.4), {})
    assert document["engine"]["launch"]["gpu_memory_utilization"] == 0.4
    options = AtroposOptions(model="m", single_copy=True, tensor_parallel_size=2)
    document, notes = translate(options, {})
    assert document["bridge"] == "copy" and any("bridge: copy" in note for note in notes)
    document, _ = translate(AtroposOptions(model="m", checkpoint_interval=0), {})
    assert document["save_every"] >= document["steps"]
