"""The synchronous client on a real vLLM server on the CPU. About two minutes."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.real.peers import needs_vllm, served_on_cpu

from rookery.compat import vllm_backend as backend
from rookery.embedded import resolve_model
from rookery.errors import FleetError
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.http.capabilities import read_shapes
from rookery.runtime.concurrency import LoopThread
from rookery.weights import write_adapter
from rookery.weights.stack import LayerShape, Layout, random_adapter

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
TEXT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    launch = LaunchConfig(**served_on_cpu(max_model_len=2048, max_loras=2, max_cpu_loras=4))
    server = LoopThread(open_fleet(FleetConfig(launch=launch)), name="server")
    try:
        yield server.wait_open().pool.replicas[0].url
    finally:
        server.close()


@pytest.fixture(autouse=True)
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_BASE_URL", url)
    yield
    backend.shutdown_vllm_client()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shapes = read_shapes(resolve_model("smollm2").path)
    layers = tuple(
        LayerShape(name, *size) for name, size in shapes.items() if name.endswith("v_proj")
    )
    layout = Layout(base="", layers=layers, rank=4, scale=1.0)
    return write_adapter(random_adapter(layout, name="poet", seed=(1,), size=0.2), tmp_path / "a")


def test_equal_prompts_are_answered_differently_and_repeatably() -> None:
    answers = backend.generate_with_vllm([TEXT] * 4, n=4, max_tokens=16)
    texts = [answer["text"] for answer in answers]
    assert len(set(texts)) == 16
    again = backend.generate_with_vllm([TEXT] * 4, n=4, max_tokens=16)
    assert [answer["text"] for answer in again] == texts
    others = backend.generate_with_vllm([TEXT] * 4, n=4, max_tokens=16, seed=1)
    assert not {answer["text"] for answer in others} & set(texts)


def test_shutting_down_wakes_who_waits_and_leaves_no_adapter(url: str, folder: Path) -> None:
    backend.register_lora_adapter("poet", folder)
    [tuned] = backend.generate_with_vllm([TEXT], "poet", max_tokens=8, temperature=0)
    [plain] = backend.generate_with_vllm([TEXT], max_tokens=8, temperature=0)
    assert tuned["logprobs"] != plain["logprobs"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(backend.generate_with_vllm, [TEXT] * 8, "poet", max_tokens=1500)
        while not _num_running(url):  # until the server computes
            pass
        backend.shutdown_vllm_client()
        with pytest.raises(FleetError, match="shut down while this call waited"):
            waiting.result(10)
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        assert len(json.load(answer)["data"]) == 1
    [after] = backend.generate_with_vllm([TEXT], max_tokens=8, temperature=0)
    assert after["token_ids"] == plain["token_ids"], "the server is well"


def _num_running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")
    )
