"""Server processes: started, owned, stopped. A small program stands in for vLLM's."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rookery
from rookery.config import load_config, parse_config, read_document
from rookery.errors import ConfigError, FleetError, RookeryError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.http.external import ExternalConfig
from rookery.fleet.servers import launch as launching
from rookery.fleet.servers.launch import LaunchProgress, open_servers, reserve_port
from rookery.fleet.servers.log_hints import explain_failure, first_error, last_lines
from rookery.fleet.servers.registry import (
    ServerRecord,
    ServerRegistry,
    find_registries,
    process_start,
    reap_orphans,
)
from rookery.fleet.servers.settings import (
    LaunchConfig,
    command_line,
    environment,
    first_spare_gpu,
    num_replicas,
)
from rookery.types import Json

FAKE = Path(__file__).parent / "fake"
CONFIG = LaunchConfig(model="tiny", device="cpu", port=18500)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    return tmp_path / "fleet"


async def ask(url: str) -> dict[str, Any]:
    def get() -> dict[str, Any]:
        with urllib.request.urlopen(url + "/health") as response:
            found: dict[str, Any] = json.load(response)
            return found

    return await asyncio.to_thread(get)


def wait_for(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


async def test_servers_start_with_the_right_flags_and_stop_with_the_block(state: Path) -> None:
    seen: list[LaunchProgress] = []
    config = CONFIG.model_copy(update={"replicas": 2, "max_lora_rank": 20, "args": ("--seed", "3"),
                                       "lora_targets": ("q_proj", "v_proj")})  # fmt: skip
    async with open_servers(config, progress=seen.append, adapters=state) as servers:
        told = [await ask(server.url) for server in servers]
        assert len({server.url for server in servers}) == 2
        assert all(server.is_alive for server in servers)
        [registry] = find_registries(state)
        assert registry.has_owner and registry.owner_pid == os.getpid()
        assert [r.pid for r in registry.records] == [t["pid"] for t in told]
    assert all(process_start(t["pid"]) == "" for t in told)
    assert find_registries(state) == [] and os.listdir(state) == []
    argv = told[0]["argv"]
    for flag, value in [
        ("--model", "tiny"), ("--max-lora-rank", "32"), ("--seed", "3"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--worker-extension-cls", "rookery_vllm_plugin.extension.WorkerExtension"),
        ("--middleware", "rookery_vllm_plugin.token_route.TokenRoute"),
        ("--lora-target-modules", "q_proj"),
    ]:  # fmt: skip
        assert argv[argv.index(flag) + 1] == value
    assert {"--enable-lora", "--enable-prefix-caching"} <= set(argv)
    assert ("--no-enable-chunked-prefill" in argv) == config.is_on_cpu
    assert told[0]["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert told[0]["env"]["VLLM_LORA_RESOLVER_CACHE_DIR"] == str(state)
    assert {(p.index, p.is_ready) for p in seen} >= {(0, True), (1, True)}


async def test_a_server_that_cannot_start_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "memory")
    with pytest.raises(FleetError) as failed:
        async with open_servers(CONFIG):
            pass
    said = str(failed.value)
    assert "ended with status 1" in said and "Tried to allocate 2.00 GiB" in said
    assert "launch.gpu_memory_utilization" in said and "loading the model" in said
    [folder] = os.listdir(state)
    assert f"{state / folder}/server-0.log" in said


async def test_a_python_without_vllm_gets_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(FleetError, match=r"pip install .*\[vllm\]"):
        async with open_servers(CONFIG):
            pass
    missing = CONFIG.model_copy(update={"python": "/nowhere/python"})
    with pytest.raises(FleetError, match=r"/nowhere/python.*launch\.python"):
        async with open_servers(missing):
            pass


async def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    with pytest.raises(FleetError, match=r"not ready after .*launch\.startup_s allows 0\.2"):
        async with open_servers(CONFIG.model_copy(update={"startup_s": 0.2})):
            pass


async def test_an_error_stops_the_servers_and_their_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "child")
    with pytest.raises(ZeroDivisionError):
        async with open_servers(CONFIG) as [server]:
            told = await ask(server.url)
            assert process_start(told["child"])
            raise ZeroDivisionError
    wait_for(lambda: not process_start(told["child"]) and not process_start(told["pid"]))


async def test_cancelling_stops_even_a_stubborn_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "stubborn")
    monkeypatch.setattr(launching, "STOP_S", 0.2)
    running = asyncio.Event()
    pids: list[int] = []

    async def hold() -> None:
        async with open_servers(CONFIG) as [server]:
            pids.append(server.pid)
            running.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process_start(pids[0]) == ""


def test_servers_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio\n"
        "from rookery.fleet.servers.launch import open_servers\n"
        "from rookery.fleet.servers.settings import LaunchConfig\n"
        "async def main():\n"
        "    config = LaunchConfig(model='tiny', device='cpu', port=18500)\n"
        "    async with open_servers(config) as [server]:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert process_start(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: process_start(pid) == "")


def test_orphans_are_stopped_by_id_and_start_time_only(state: Path) -> None:
    def sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], start_new_session=True)

    def record(process: subprocess.Popen[bytes], start: str | None = None) -> ServerRecord:
        started = process_start(process.pid) if start is None else start
        return ServerRecord(pid=process.pid, start=started, url="", model="", log="")

    orphan, stranger, owned = sleeper(), sleeper(), sleeper()
    try:
        left = ServerRegistry.create(state, purpose="run")
        left.write([record(orphan), record(stranger, start="12345")])
        left.lock.close()
        held = ServerRegistry.create(state, purpose="run")
        held.write([record(owned)])
        assert reap_orphans(state) == 1
        assert orphan.wait(60) == -signal.SIGTERM
        assert stranger.poll() is None and owned.poll() is None
        assert [registry.has_owner for registry in find_registries(state)] == [True]
        held.close(keep_logs=False)
    finally:
        for process in (orphan, stranger, owned):
            process.kill()
            process.wait()


def test_a_registry_that_is_looked_at_before_it_is_locked_stays(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_made, is_looked_at, is_locked = threading.Event(), threading.Event(), threading.Event()
    real, made = fcntl.flock, list[ServerRegistry]()

    def flock(descriptor: int, kind: int) -> None:
        if threading.current_thread() is other:
            is_made.set()
            is_looked_at.wait(10)
            real(descriptor, kind)
            is_locked.set()
        else:
            real(descriptor, kind)
            is_looked_at.set()
            is_locked.wait(0.2)  # only if the lock of the one who looks does not hold it up

    other = threading.Thread(
        target=lambda: made.append(ServerRegistry.create(state, purpose="run"))
    )
    monkeypatch.setattr("fcntl.flock", flock)
    other.start()
    is_made.wait(10)
    assert reap_orphans(state) == 0
    other.join()
    [registry] = made
    assert [found.has_owner for found in find_registries(state)] == [True]
    registry.close(keep_logs=False)


def test_ports_are_not_given_twice_nor_taken_from_others() -> None:
    first = reserve_port("127.0.0.1", first=18600)
    second = reserve_port("127.0.0.1", first=18600)
    assert first.port != second.port
    first.release()
    third = reserve_port("127.0.0.1", first=18600)
    assert third.port == first.port
    for reservation in (second, third):
        reservation.release()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "0.0.0.0"}, "127.0.0.1 only"),
        ({"api_servers": 4}, "max_loras: 0"),
        ({"max_loras": 99}, "at least max_loras"),
        ({"max_lora": 8}, "Did you mean max_loras"),
        ({"args": ["--host", "0.0.0.0"]}, r"args holds --host.*launch\.host"),
        ({"args": ["--seed", "1", "--host=0.0.0.0"]}, "args holds --host=0.0.0.0"),
        ({"args": ["--hos", "0.0.0.0"]}, "args holds --hos,"),
        ({"args": ["--uds", "/tmp/x"]}, "args holds --uds"),
        ({"args": ["--api_key=x"]}, r"args holds --api_key=x.*launch\.api_key"),
        ({"args": ["--config", "x.yaml"]}, "args holds --config,.*could hold any flag"),
        ({"args": ["--dtype", "float32"]}, r"launch\.dtype"),
        ({"env": {"VLLM_API_KEY": "x"}}, r"env holds VLLM_API_KEY.*launch\.api_key"),
        ({"env": {"VLLM_SERVER_DEV_MODE": "1"}}, "env holds VLLM_SERVER_DEV_MODE"),
        ({"dtype": "float32", "device": "cuda"}, "dtype: bfloat16 .*max_loras: 0"),
        ({"servers_per_gpu": 2, "tensor_parallel": 2}, "each server takes 2 GPUs"),
        ({"servers_per_gpu": 2, "placement": "ray", "replicas": 2}, "leave servers_per_gpu out"),
    ],
)
def test_configs_that_cannot_work_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(LaunchConfig, {"model": "tiny", **given}, origin="x")


@pytest.mark.parametrize("key", ["", "config's"])
async def test_the_key_that_servers_ask_for_is_the_one_their_client_has(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported key reaches the servers; the fleet gets past it and finds that the stand-in has
    no model."""
    monkeypatch.setenv("VLLM_API_KEY", "exported")
    launch = CONFIG.model_copy(update={"api_key": key})
    with pytest.raises(FleetError, match="names no model"):
        async with open_fleet(FleetConfig(launch=launch)):
            pass


def test_other_flags_and_float32_without_adapters_are_fine() -> None:
    args = ("--seed", "3", "--config-format", "hf", "--hf-overrides.x", "1", "-tp", "2")
    assert LaunchConfig(model="m", args=args).args == args
    LaunchConfig(model="m", dtype="float32", device="cuda", max_loras=0)
    LaunchConfig(model="m", dtype="float32", device="cpu")


def test_gpus_are_left_to_a_trainer_and_counted_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7,8")
    config = LaunchConfig(model="m", tensor_parallel=2, pipeline_parallel=2, spare_gpus=1)
    assert num_replicas(config) == 1 and first_spare_gpu(config) == 4
    env = environment(config, index=0, num_servers=1, modules=Path(), adapters=None)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3,5,7"
    words = " ".join(command_line(config, port=1))
    assert "--pipeline-parallel-size 2" in words and "--gpu-memory-utilization 0.9" in words
    whole = LaunchConfig(model="m", gpu_memory_utilization=0.5)
    assert num_replicas(whole) == 5 and first_spare_gpu(whole) == 0
    assert "--gpu-memory-utilization 0.5" in " ".join(command_line(whole, port=1))


def test_servers_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    config = LaunchConfig(model="m", servers_per_gpu=2, gpu_memory_utilization=0.5)
    assert num_replicas(config) == 4
    gpus = [
        environment(config, index=i, num_servers=4, modules=Path(), adapters=None)[
            "CUDA_VISIBLE_DEVICES"
        ]
        for i in range(4)
    ]
    assert gpus == ["2", "2", "3", "3"]
    words = " ".join(command_line(config, port=1))
    assert "--gpu-memory-utilization 0.25" in words and "shared_gpu.Worker" in words
    assert "--worker-cls" not in command_line(LaunchConfig(model="m"), port=1)


def test_gpus_are_dealt_out_and_cpu_servers_get_their_own_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    config = LaunchConfig(model="m", tensor_parallel=2, env={"A": "b"})
    assert num_replicas(config) == 2
    env = environment(config, index=1, num_servers=2, modules=tmp_path, adapters=None)
    assert env["CUDA_VISIBLE_DEVICES"] == "5,7" and env["A"] == "b"
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert "--gpu-memory-utilization" in command_line(config, port=1)
    assert "--compilation-config" not in command_line(config, port=1)
    full = command_line(LaunchConfig(model="m", cuda_graphs="full"), port=1)
    assert '{"cudagraph_mode": "FULL"}' in full
    soon = command_line(LaunchConfig(model="m", compile=False), port=1)
    [chosen] = [json.loads(word) for word in soon if word.startswith("{")]
    assert (chosen["mode"], chosen["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")
    assert chosen["cudagraph_capture_sizes"][-1] == 512
    # vLLM captures up to 512 by itself: larger batches would run without graphs.
    wide = command_line(LaunchConfig(model="m", max_num_seqs=1000), port=1)
    [chosen] = [json.loads(word) for word in wide if word.startswith("{")]
    assert chosen["cudagraph_capture_sizes"][-5:] == [512, 640, 768, 896, 1000]
    said = LaunchConfig(model="m", max_num_seqs=1000, args=("--max_cudagraph_capture_size=256",))
    assert "--compilation-config" not in command_line(said, port=1)
    assert "rookery_vllm_plugin.whole_graphs.WorkerExtension" in full
    cpu = LaunchConfig(model="m", device="cpu", replicas=2, max_loras=0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    envs = [
        environment(cpu, index=i, num_servers=2, modules=tmp_path, adapters=None) for i in (0, 1)
    ]
    assert [e["VLLM_CPU_OMP_THREADS_BIND"] for e in envs] == ["0,1", "2,3"]
    assert "--enable-lora" not in command_line(cpu, port=1)
    assert "--dtype float32" in " ".join(command_line(cpu, port=1))
    assert "--dtype auto" in " ".join(command_line(config, port=1))
    several = LaunchConfig(model="m", device="cpu", api_servers=4, max_loras=0)
    assert command_line(several, port=1)[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"]


def launching_at(folder: Path, **changes: Any) -> dict[str, Any]:
    """An engine whose servers leave a file when they are started."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\ntouch {folder}/was-started\nexit 1\n")
    python.chmod(0o755)
    launch = {"python": str(python), "device": "cpu", **changes}
    return {"type": "fleet", "launch": launch}


TASKSETS = [{"type": "generated", "generator": "label-kind", "size": 60}]
ATROPOS = {"type": "atropos", "port": 0}
LOOPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grpo": (rookery.run_grpo, {"tasksets": TASKSETS}),
    "genome": (rookery.run_genome, {"tasksets": TASKSETS, "init": {"type": "random", "rank": 64}}),
}
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("grpo", {}, {"lora": {"rank": 64}}, "lora.rank is 64, .* up to rank 16: .*max_lora_rank"),
    ("grpo", {"max_loras": 0}, {}, "lora.rank is .*max_loras is 0.*write max_loras: 1"),
    ("genome", {}, {}, "init.rank is 64, .* up to rank 16"),
    ("genome", {"max_loras": 0}, {"rank": 4}, "rank is 4, .*max_loras is 0"),
    ("grpo", {"tensor_parallel": 3}, {}, "tensor_parallel is 3.* 4 attention .* one of 1, 2, 4"),
    ("grpo", {"pipeline_parallel": 5}, {}, "pipeline_parallel is 5, .* has 4 layers"),
    ("grpo", {}, {"tasksets": [], "environment": ATROPOS}, "write environments, url"),
    (
        "grpo",
        {},
        {"tasksets": [], "environment": {**ATROPOS, "environments": [{"command": ["./none"]}]}},
        "there is no program ./none",
    ),
    (
        "grpo",
        {},
        {
            "tasksets": [],
            "environment": {"type": "atropos", "url": "http://127.0.0.1:1", "key_env": "UNSET"},
        },
        "key_env is UNSET, which is not set",
    ),
]


@pytest.mark.parametrize(("loop", "launch", "changes", "said"), REFUSALS)
def test_what_a_config_decides_is_refused_before_a_server_is_started(
    loop: str,
    launch: dict[str, Any],
    changes: dict[str, Any],
    said: str,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    run, config = LOOPS[loop]
    engine = launching_at(tmp_path, model=str(tiny_folder), **launch)
    with pytest.raises(RookeryError, match=said):
        run({**config, "engine": engine, **changes}, runs_dir=tmp_path / "runs", progress=False)
    assert not (tmp_path / "was-started").exists()


# The configs that ship parse, and say what their comments say.


FOLDER = Path(__file__).parents[3] / "configs" / "fleet"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_parses(path: Path) -> None:
    kinds: dict[Json, type[FleetConfig] | type[ExternalConfig]] = {
        "fleet": FleetConfig,
        "external": ExternalConfig,
    }
    config = load_config(kinds[read_document(path)["type"]], path)
    if isinstance(config, FleetConfig) and config.launch is not None:
        assert "--model" in command_line(config.launch, port=1)


def test_a_fleet_without_servers_or_with_wrong_ones_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, said in [
        ("type: fleet", r"urls: \[http://host:8000\]"),
        ("urls: [http://a]\nresolver: true", "adapter_folder"),
        ("urls: [host:8000]", "write http://host:8000"),
        ("urls: [ftp://host:8000]", "write http://host:8000"),
        ("urls: ['http://']", "names no host"),
        ("urls: [http://a:8000, http://a:8000]", "names one server twice"),
        ("urls: [http://A:80, http://a/v1/]", "as http://A:80 and http://a/v1/"),
        ("urls: [http://localhost:8000, http://127.0.0.1:8000]", "names one server twice"),
        ("urls: [http://a]\nlaunch: {modl: x}", "Did you mean model"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_config(FleetConfig, path)


# What is said of a server that does not start.


ENGINE = """\
(APIServer pid=1) INFO 11-16 02:04:41 [utils.py:278] non-default args: max_lora_rank 16
(APIServer pid=1) WARNING 11-16 02:05:00 [vllm.py:725] using the V1 model runner instead.
{first}
Process EngineCore:
Traceback (most recent call last):
  File "process.py", line 314, in _bootstrap
    self.run()
Exception: something later
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
CACHE = """\
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]   File "core.py", line 326, in _initialize
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]     configs = get_kv_cache_configs(
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]               ^^^^^^^^^^^^^^^^^^^^^
(Worker pid=3) INFO 11-16 02:05:30 [worker.py:1] in between
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]   File "cache.py", line 1030, in _check
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]     raise ValueError(
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] ValueError: To serve at least one request, (0.02 GiB KV cache is needed, which is larger than 0.01 GiB).
(EngineCore pid=2) ERROR 11-16 02:05:33 [multiproc_executor.py:315] Worker proc died unexpectedly.
"""  # noqa: E501
WORKER = """\
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] WorkerProc failed to start.
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] Traceback (most recent call last):
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953]   File "weight_utils.py", line 12, in load
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953]     with safe_open(file) as f:
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] SafetensorError: incomplete metadata
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510]   File "exec.py", line 1, in wait
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510] Exception: WorkerProc initialization failed
"""


@pytest.mark.parametrize(
    ("first", "shown", "remedy"),
    [
        (CACHE, "ValueError: To serve at least one request", "lower launch.max_model_len"),
        (WORKER, "SafetensorError: incomplete metadata", "fetch or convert the model again"),
    ],
)
def test_the_first_error_of_the_engine_is_shown(
    first: str, shown: str, remedy: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(ENGINE.format(first=first))
    lines = first_error(log)
    assert lines[-1].startswith(shown), lines
    assert lines[-2].startswith("    ") and not any("pid=" in line for line in lines)
    assert remedy in explain_failure(log)


def test_the_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == [] and explain_failure(log) == "" and first_error(log) == []
    log.write_text("\n".join(f"line {i}" for i in range(50_000)) + "\n\n50 %\r100 %\n")
    assert last_lines(log, num=3) == ["line 49999", "50 %", "100 %"]
    for text, said in [
        ("error: unrecognized arguments: --nope", "launch.args"),
        ("ValueError: No available memory for the cache blocks.", "max_model_len"),
        ("[Errno 98] error while attempting to bind", "launch.port"),
    ]:
        log.write_text(text)
        assert said in explain_failure(log)


REQUEST = """\
(APIServer pid=1) ERROR:    Exception in ASGI application
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "token_route.py", line 70, in _generate
(APIServer pid=1)     await work
(APIServer pid=1) ValueError: max_lora_rank of a request
"""


def test_errors_of_requests_are_not_what_a_ready_server_died_of(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(REQUEST)
    assert first_error(log)[-1].startswith("ValueError: max_lora_rank of a request")
    assert first_error(log, was_ready=True) == []
    assert explain_failure(log) and explain_failure(log, was_ready=True) == ""
    log.write_text(REQUEST + "Killed\n")
    assert "out of memory" in explain_failure(log, was_ready=True)
    log.write_text(REQUEST + WORKER)
    assert first_error(log, was_ready=True)[-1].startswith("SafetensorError: incomplete")
