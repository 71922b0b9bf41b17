"""The synchronous client, from plain code against a server in another thread."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, greedy
from forked import forked, run_code
from safetensors.torch import load_file

from rookery.compat import vllm_backend as backend
from rookery.errors import AdapterError, ConfigError, FleetError
from rookery.weights import write_adapter


class Server:
    """A stub on an event loop of its own: the backend blocks the test's thread."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.call("start")

    def call(self, name: str, *arguments: Any) -> None:
        async def work() -> None:
            await getattr(self.stub, name)(*arguments)

        asyncio.run_coroutine_threadsafe(work(), self.loop).result(30)

    def close(self) -> None:
        self.call("stop")
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(Stub(root=str(write_model(tmp_path / "tiny"))))
    monkeypatch.setenv("VLLM_BASE_URL", server.stub.url)
    try:
        yield server
    finally:
        backend.shutdown_vllm_client()
        server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(make_small("x", 1), tmp_path / "adapter")


def test_generating_with_and_without_an_adapter(server: Server, folder: Path) -> None:
    assert backend.get_client_info() == {"initialized": False}
    [plain] = backend.generate_with_vllm([[1, 2]], max_tokens=3, temperature=0)
    assert plain["token_ids"] == greedy("tiny", [1, 2], 3) and len(plain["logprobs"]) == 3
    assert backend.register_lora_adapter(adapter_id="poet", lora_path=str(folder))
    [tuned] = backend.generate_with_vllm([[1, 2]], "poet", max_tokens=3, temperature=0)
    assert tuned["token_ids"] != plain["token_ids"] and tuned["finish_reason"] == "length"
    [first, second] = backend.generate_with_vllm(["w1 w2"], n=2, max_tokens=2, top_k=-1)
    assert first["prompt"] == "w1 w2" and first["token_ids"] != second["token_ids"]


def test_adapters_are_listed_replaced_and_forgotten(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    backend.register_lora_adapter("poet", folder)
    assert backend.list_lora_adapters() == [{"adapter_id": "poet", "lora_path": str(folder)}]
    [old] = backend.generate_with_vllm([[1]], "poet", max_tokens=4, temperature=0)
    newer = write_adapter(make_small("y", 2), tmp_path / "newer")
    backend.register_lora_adapter("poet", newer)
    [new] = backend.generate_with_vllm([[1]], "poet", max_tokens=4, temperature=0)
    assert new["token_ids"] != old["token_ids"], "the new weights have a new name on the server"
    assert len(server.stub.adapters) == 1 and len(server.stub.loads) == 2
    assert backend.unregister_lora_adapter("poet") and not backend.unregister_lora_adapter("poet")
    assert backend.list_lora_adapters() == [] and not server.stub.adapters
    with pytest.raises(ValueError, match=r"'poet' is not registered"):
        backend.generate_with_vllm([[1]], "poet")


def test_old_bin_files_are_read(server: Server, folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    assert backend.register_lora_adapter("old", folder)


def test_weights_for_another_machine_go_from_gpu_to_gpu(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its address, which reaches this machine, the server is one of another."""
    elsewhere = server.stub.url.replace("127.0.0.1", "0.0.0.0")
    monkeypatch.setenv("VLLM_BASE_URL", elsewhere)
    with pytest.raises(RuntimeError, match=r"device is cpu; .* write cuda, or set VLLM_ADAPTER_FO"):
        backend.init_communicator(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(FleetError, match="takes no weights from another machine: start it with"):
        backend.init_communicator(device="cuda")
    backend.shutdown_vllm_client()
    monkeypatch.setenv("VLLM_ADAPTER_FOLDER", str(tmp_path))
    with pytest.raises(FleetError, match="takes no weight updates: start it with VLLM_SERVER_DEV"):
        backend.init_communicator(device="cpu")


def test_the_documented_errors(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="LoRA path does not exist: /nowhere/lora"):
        backend.register_lora_adapter("a", "/nowhere/lora")
    tall = write_adapter(make_small("t", rank=17), tmp_path / "tall")
    with pytest.raises(AdapterError, match="rank 17"):
        backend.register_lora_adapter("a", tall)
    with pytest.raises(RuntimeError, match="init_communicator"):
        backend.update_model_weights(torch.nn.Linear(1, 1))
    with pytest.raises(FleetError, match="VLLM_SERVER_DEV_MODE=1"):
        backend.init_communicator(device="cpu")
    server.call("stop")
    with pytest.raises(ConnectionError, match=f"can't be reached at {server.stub.url}"):
        backend.initialize_vllm_client({"timeout": 0})
    server.call("start")
    with pytest.raises(ConfigError, match="Did you mean base_url"):
        backend.initialize_vllm_client({"base_ur": "x"})


def test_a_request_that_is_not_answered_ends_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REQUEST_S", "0.3")
    backend.initialize_vllm_client()
    server.stub.hang = True
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"did not answer within 0\.3 s.*raise request_s"):
        backend.generate_with_vllm([[1]])
    assert time.monotonic() - began < 30
    server.stub.hang = False
    assert backend.generate_with_vllm([[1]], max_tokens=1), "the next call is served"


def test_settings_come_from_the_environment_and_the_config(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = backend.initialize_vllm_client()
    assert info["initialized"] and info["base_url"] == server.stub.url and info["is_up"]
    assert info["model"] == "tiny" and info["max_loras"] == 8 and info["enable_lora"]
    backend.reset_prefix_cache()
    monkeypatch.delenv("VLLM_BASE_URL")
    monkeypatch.setenv("VLLM_HOST", "0.0.0.0")
    monkeypatch.setenv("VLLM_PORT", str(server.stub.port))
    monkeypatch.setenv("VLLM_GROUP_PORT", "51217")
    monkeypatch.setenv("VLLM_ENABLE_LORA", "false")
    info = backend.initialize_vllm_client()
    assert info["base_url"] == server.stub.url and not info["enable_lora"]
    with pytest.raises(ValueError, match="VLLM_ENABLE_LORA"):
        backend.register_lora_adapter("a", ".")
    monkeypatch.setenv("VLLM_PORT", "none")
    with pytest.raises(ConfigError, match="port is"):
        backend.initialize_vllm_client()


def test_shutting_down_wakes_threads_that_wait(server: Server) -> None:
    backend.initialize_vllm_client()
    server.stub.hang = True
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(backend.generate_with_vllm, [[1]]) for _ in range(3)]
        server.call("wait_in_flight", 3)
        backend.shutdown_vllm_client()
        for call in waiting:
            with pytest.raises(FleetError, match=r"shut down while this call waited"):
                call.result(10)
    server.stub.hang = False
    assert backend.generate_with_vllm([[1]], max_tokens=1), "and connects again"


FORK = """
import os, sys, threading
import rookery.compat.vllm_backend as backend
from rookery.errors import FleetError

backend.register_lora_adapter("poet", sys.argv[1])
before = backend.generate_with_vllm([[1]], "poet", max_tokens=2)
held, leave = threading.Event(), threading.Event()

def hold():
    with backend._lock:  # as a thread that registers an adapter does
        held.set()
        leave.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
leave.set()
if child == 0:
    assert backend.get_client_info() == {"initialized": False}
    for work in (
        lambda: backend.generate_with_vllm([[1]], "poet"),
        lambda: backend.unregister_lora_adapter("poet"),
        backend.list_lora_adapters,
    ):
        try:
            work()
        except FleetError as error:
            assert "was forked" in str(error) and "initialize_vllm_client" in str(error)
        else:
            raise AssertionError("no sentence")
    assert backend.initialize_vllm_client()["adapters"] == []
    assert backend.generate_with_vllm([[1]], max_tokens=2)
    print("child", flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert backend.generate_with_vllm([[1]], "poet", max_tokens=2) == before
print("parent")
"""


def test_a_forked_process_is_told_and_can_connect_itself(server: Server, folder: Path) -> None:
    url = {"VLLM_BASE_URL": server.stub.url}
    with forked(run_code, FORK, str(folder), variables=url) as process:
        assert process.lines.read() == "child\nparent\n"
        assert process.wait() == 0


EXIT = """
import json, sys, urllib.request
import rookery.compat.vllm_backend as backend

url = backend.initialize_vllm_client()["base_url"]
backend.register_lora_adapter("poet", sys.argv[1])
backend.generate_with_vllm([[1]], "poet")
models = json.load(urllib.request.urlopen(url + "/v1/models"))["data"]
print(models[1]["root"])
"""


def test_a_program_that_ends_leaves_nothing_behind(server: Server, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, str(folder)],
        env={**os.environ, "VLLM_BASE_URL": server.stub.url},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.stderr, ended.returncode) == ("", 0)
    staged = Path(ended.stdout.strip())
    assert staged.parent.name.startswith("rookery-adapters-") and not staged.parent.exists()
    assert server.stub.unloads and not server.stub.adapters


def test_equal_prompts_never_share_a_draw(server: Server) -> None:
    def seeds(**options: Any) -> set[int]:
        """The seeds that vLLM draws with: it adds a sample's index to the seed of its request."""
        before = len(server.stub.bodies)
        backend.generate_with_vllm([[1]] * 4, max_tokens=1, **options)
        bodies = server.stub.bodies[before:]
        return {body["seed"] + index for body in bodies for index in range(body["n"])}

    backend.initialize_vllm_client()
    first = seeds(n=4)
    assert len(first) == 16 and seeds(n=4) == first, "keyed by the seed alone"
    assert not first & seeds(n=4, seed=1)
    assert len(seeds(n=1)) == 4


def test_texts_are_tokenized_together(server: Server) -> None:
    backend.initialize_vllm_client()
    server.stub.tokenize_together = 4
    texts = ["w1", "w2", "w3", "w4", "w1"]
    answers = backend.generate_with_vllm(texts, max_tokens=1, temperature=0)
    assert [a["token_ids"] for a in answers] == [greedy("tiny", [int(t[1:])], 1) for t in texts]
    with pytest.raises(ValueError, match=r"one prompt; give a list"):
        backend.generate_with_vllm("w1")
    with pytest.raises(ValueError, match=r"one prompt; give a list"):
        backend.generate_with_vllm([1, 2])  # type: ignore[list-item]


def test_an_explicit_host_and_port_beat_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}"):
        backend.initialize_vllm_client({"host": "127.0.0.1", "port": port, "timeout": 0})
    monkeypatch.setenv("VLLM_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("VLLM_HOST", "127.0.0.1")
    assert backend.initialize_vllm_client({"port": server.stub.port})["is_up"]
    assert backend.initialize_vllm_client({"base_url": server.stub.url, "port": port})["is_up"]


def test_adapters_reach_another_machine_by_a_folder_that_both_see(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.fleet.routing.replica.is_local", lambda url: False)
    with pytest.raises(FleetError, match="set adapter_folder to a folder that both see"):
        backend.register_lora_adapter("poet", folder)
    monkeypatch.setenv("VLLM_ADAPTER_FOLDER", str(tmp_path / "shared"))
    backend.initialize_vllm_client()
    backend.register_lora_adapter("poet", folder)
    assert backend.generate_with_vllm([[1]], "poet", max_tokens=1)
    [path] = server.stub.adapters.values()
    assert tmp_path / "shared" in Path(path).parents


def test_what_needs_torch_says_so(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert backend.generate_with_vllm(["w1"], max_tokens=1), "sampling does not"
    with pytest.raises(ImportError, match=r"vLLM is not available: pip install .*\[vllm\]"):
        backend.register_lora_adapter("poet", folder)
    with pytest.raises(ImportError, match="vLLM is not available"):
        backend.init_communicator()


def test_shutting_down_wakes_a_thread_that_connects(server: Server) -> None:
    server.stub.hang = True
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(backend.initialize_vllm_client)
        server.call("wait_in_flight", 1)
        backend.shutdown_vllm_client()
        with pytest.raises(FleetError, match="shut down before it was connected"):
            connecting.result(10)
