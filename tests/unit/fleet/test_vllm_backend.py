"""The synchronous client, from plain code against a server in another thread."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, greedy
from safetensors.torch import load_file

from rookery import vllm_backend as backend
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

    def call(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(getattr(self.stub, name)(), self.loop).result()

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


def test_a_server_that_dies_is_a_connection_error(server: Server) -> None:
    backend.initialize_vllm_client({"timeout": 0.2})
    server.call("stop")
    with pytest.raises(ConnectionError, match="can't be reached"):
        backend.generate_with_vllm([[1]])
    server.call("start")


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
