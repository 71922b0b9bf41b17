"""The service with a real model: training and sampling, killed and started again."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import megatron_server
import numpy as np
import pytest
import torch
import transformers
from compose.served_model import served_model
from service.tenants import Client, Served, crashed_copy, serve, train_body
from tiny import tiny_adapter, write_tiny_model

import vllm_backend
from rookery.compose.serve import (
    ServeConfig,
    engine_of_environment,
    megatron_of_environment,
    open_megatron_backend,
    serving,
)
from rookery.embedded import EngineConfig
from rookery.errors import ConfigError, FleetError, TrainError
from rookery.fleet import FleetConfig
from rookery.service.config import ServiceConfig
from rookery.service.keys import add_key
from rookery.weights import read_adapter, write_adapter


async def train_on(client: Client, model: str, seqs: range) -> dict[str, Any]:
    """Pairs of gradients and a step, so that the first number of each is odd. Returned is the last
    request: when its result is there, all are done."""
    for seq in seqs:
        if seq % 2:
            tokens = [5 + (seq * 3 + place) % 60 for place in range(8)]
            last = await client.train(train_body(model, seq, tokens=tokens))
        else:
            last = await client.step(model, seq, rate=1e-2)
    return last


async def exported(served: Served, client: Client, model: str, seq: int) -> bytes:
    body = {"model_id": model, "seq_id": seq, "path": f"final{seq}"}
    result = await client.result(await client.post("save_weights_for_sampler", body))
    blob = served.service.context.state.checkpoints[result["path"]].blob
    folder = served.service.context.wal.run.blobs.path(blob) / "adapter"
    assert read_adapter(folder).rank == 4
    return (folder / "adapter_model.safetensors").read_bytes()


async def test_a_killed_service_trains_to_the_same_bits(tmp_path: Path, tiny_folder: Path) -> None:
    async with served_model(tmp_path / "run", tiny_folder) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        other = await ada.model(await ada.session(), rank=2)
        await train_on(ada, model, range(1, 7))
        await ada.result(await train_on(ada, other, range(1, 4)))
        await ada.result(await ada.step(model, 7))
        await served.service.snapshot()
        await train_on(ada, model, range(8, 12))
        first_kill = crashed_copy(tmp_path / "run", tmp_path / "first")
        await train_on(ada, model, range(12, 15))
        whole = await exported(served, ada, model, 15)
    async with served_model(first_kill, tiny_folder) as served:
        ada = served.client()
        # What was computed at the first kill is done: who is computed at two of them is set aside.
        await ada.result(await ada.step(model, 12, rate=1e-2))
        await train_on(ada, model, range(13, 14))
        second_kill = crashed_copy(first_kill, tmp_path / "second")
    async with served_model(second_kill, tiny_folder) as served:
        ada = served.client()
        await train_on(ada, model, range(14, 15))
        assert await exported(served, ada, model, 15) == whole


@pytest.mark.parametrize("is_tied", [False, True])
async def test_what_is_trained_is_what_is_sampled_and_exported(
    tmp_path: Path, is_tied: bool
) -> None:
    """The output layer too, which clients train by default, also where it is the embeddings. What
    is exported merged is a model of its own."""
    folder = write_tiny_model(tmp_path / "tiny", tie_word_embeddings=is_tied)
    tokens = [5, 6, 7, 8]
    async with served_model(tmp_path / "run", folder) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await train_on(ada, model, range(1, 5))
        body = train_body(model, 5, tokens=tokens, forward_only=True)
        forward = await ada.outputs(await ada.train(body))
        save = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}
        reply = await ada.result(await ada.post("save_weights_for_sampler", save))
        sample = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8, 9]}]},
            "sampling_session_id": reply["sampling_session_id"],
            "seq_id": 0,
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
        }
        scored = await ada.result(await ada.post("asample", sample))
        blob = served.service.context.state.samplers[reply["sampling_session_id"]].blob
        adapter = read_adapter(served.service.context.wal.run.blobs.path(blob) / "adapter")
        assert adapter.factors["lm_head"].b.any()
        save = {"model_id": model, "seq_id": 7, "path": "whole", "merged": True}
        saved = await ada.result(await ada.post("save_weights_external", save))
        run = f"/api/v1/training_runs/{model}/checkpoints/external_weights/whole"
        urls = (await ada.send("GET", f"{run}/external_weights_urls")).json()["urls"]
        assert saved["size_bytes"] > (folder / "model.safetensors").stat().st_size
        (tmp_path / "whole").mkdir()
        for name, url in urls.items():
            (tmp_path / "whole" / name).write_bytes((await ada.send("GET", url)).content)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.inference_mode():
        rows = torch.log_softmax(whole(torch.tensor([tokens])).logits[0], dim=-1)
    trained = np.frombuffer(forward.loss_fn_outputs[0].fields["logprobs"].data, dtype="<f4")
    assert scored["prompt_logprobs"][1:] == pytest.approx(trained.tolist(), abs=1e-4)
    expected = [float(rows[place, token + 1]) for place, token in enumerate(tokens)]
    assert trained.tolist() == pytest.approx(expected, abs=1e-4)


async def test_the_service_listens_and_ends(tmp_path: Path, tiny_folder: Path) -> None:
    key = add_key(tmp_path / "keys.json", name="ada")
    config = ServeConfig(
        port=0,
        models={"tiny": str(tiny_folder), "also/tiny": str(tiny_folder)},
        folder=tmp_path / "run",
        keys=tmp_path / "keys.json",
    )
    async with serving(config) as url, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.get(f"{url}/v1/models", headers=headers) as response:
            names = [row["id"] for row in (await response.json())["data"]]
        async with http.get(f"{url}/v1/models") as response:
            assert response.status == 401
        async with http.get(f"{url}/status") as response:
            page = await response.text()
        async with http.get(f"{url}/status", headers={"x-forwarded-for": "8.8.8.8"}) as response:
            assert response.status == 404
        async with http.get(f"{url}/openapi.json") as response:
            paths = (await response.json())["paths"]
    assert names == ["tiny", "also/tiny"]
    assert "tiny, also/tiny" in page and "Nobody has used it yet" in page
    assert "/api/v1/asample" in paths
    async with serving(config):
        pass  # the folder and the port are free again


async def test_what_cannot_be_served_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    folder, keys = tmp_path / "run", tmp_path / "none.json"
    with pytest.raises(ConfigError, match="rookery keys add"):
        async with serving(ServeConfig(folder=folder, keys=keys)):
            pass
    with pytest.raises(ConfigError, match=r"listen on 127\.0\.0\.1"):
        async with serving(ServeConfig(folder=folder, anonymous=True, host="0.0.0.0")):
            pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="VLLM_PORT"):
            async with serving(ServeConfig(folder=folder, anonymous=True, port=port)):
                pass
    assert not folder.exists()


def test_paths_of_a_config_are_relative_to_it(tmp_path: Path) -> None:
    service = ServiceConfig(adapter_folders=(Path("adapters"), Path("/srv/adapters")))
    config = ServeConfig(folder=Path("run"), keys=Path("keys.json"), service=service)
    moved = config.from_folder(tmp_path)
    assert (moved.folder, moved.keys) == (tmp_path / "run", tmp_path / "keys.json")
    assert moved.service.adapter_folders == (tmp_path / "adapters", Path("/srv/adapters"))


def test_the_environment_names_the_vllm_server() -> None:
    own = EngineConfig()
    assert engine_of_environment(own, {"USE_VLLM": "false"}, port=8000) is own
    given = {"USE_VLLM": "true", "VLLM_HOST": "0.0.0.0", "VLLM_PORT": "8001"}
    engine = engine_of_environment(own, given, port=8000)
    assert isinstance(engine, FleetConfig)
    assert engine.urls == ("http://127.0.0.1:8001",)
    for url in ("", "http://0.0.0.0:8000", "http://[::1]:8000/"):
        with pytest.raises(ConfigError, match="VLLM_PORT"):
            engine_of_environment(own, {"USE_VLLM": "true", "VLLM_BASE_URL": url}, port=8000)
    with pytest.raises(ConfigError, match="write true or false"):
        engine_of_environment(own, {"USE_VLLM": "maybe"}, port=8000)


@asynccontextmanager
async def served_on_megatron(folder: Path, model: Path, url: str) -> AsyncIterator[Served]:
    engine = EngineConfig(model=str(model))
    async with (
        open_megatron_backend(str(model), url=url, engine=engine, alpha=32.0) as backend,
        serve(folder, backend=backend) as served,
    ):
        yield served


async def test_the_service_trains_on_a_megatron_server_as_on_its_own(
    tmp_path: Path, tiny_folder: Path
) -> None:
    async with served_model(tmp_path / "own", tiny_folder) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await train_on(ada, model, range(1, 5))
        expected = await exported(served, ada, model, 5)
    async with (
        megatron_server.served(tiny_folder) as (url, hosted),
        served_on_megatron(tmp_path / "run", tiny_folder, url) as served,
    ):
        ada = served.client()
        model = await ada.model(await ada.session())
        await train_on(ada, model, range(1, 5))
        assert await exported(served, ada, model, 5) == expected
        save = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}
        reply = await ada.result(await ada.post("save_weights_for_sampler", save))
        sample = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_session_id": reply["sampling_session_id"],
            "seq_id": 0,
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
        drawn = await ada.result(await ada.post("asample", sample))
        assert drawn["sequences"][0]["tokens"]
        assert hosted.engine.stats.requested_tokens == 3


async def test_a_megatron_server_that_ends_is_said_and_the_service_goes_on_with_another(
    tmp_path: Path, tiny_folder: Path
) -> None:
    run = tmp_path / "run"
    failed: dict[str, Any] = {}
    async with AsyncExitStack() as megatron:
        url, _ = await megatron.enter_async_context(megatron_server.served(tiny_folder))
        with pytest.raises(TrainError, match="can't be reached"):
            async with served_on_megatron(run, tiny_folder, url) as served:
                ada = served.client()
                model = await ada.model(await ada.session())
                await ada.result(await train_on(ada, model, range(1, 3)))
                await served.service.snapshot()
                await train_on(ada, model, range(3, 5))
                expected = await exported(served, ada, model, 5)
                await megatron.aclose()
                failed = await ada.result(await ada.step(model, 6))
    assert f"can't be reached at {url}" in failed["error"]
    async with (
        megatron_server.served(tiny_folder) as (url, _),
        served_on_megatron(run, tiny_folder, url) as served,
    ):
        assert await exported(served, served.client(), model, 7) == expected


async def test_a_megatron_server_with_another_model_is_refused(
    tmp_path: Path, tiny_folder: Path
) -> None:
    other = write_tiny_model(tmp_path / "other")
    async with megatron_server.served(tiny_folder) as (url, _):
        config = ServeConfig(
            port=0, anonymous=True, models={"m": str(other)}, folder=tmp_path / "run", megatron=url
        )
        with pytest.raises(ConfigError, match="start it with --model"):
            async with serving(config):
                pass
        both = config.model_copy(update={"models": {"m": str(other), "n": str(tiny_folder)}})
        with pytest.raises(ConfigError, match="a Megatron server has one"):
            async with serving(both):
                pass


def test_the_environment_names_the_megatron_server() -> None:
    assert megatron_of_environment(None, {}) is None
    assert megatron_of_environment("http://a:1", {"USE_MEGATRON": "0"}) == "http://a:1"
    assert megatron_of_environment(None, {"USE_MEGATRON": "true"}) == "http://localhost:5000"
    given = {"USE_MEGATRON": "true", "MEGATRON_SERVER_URL": "http://b:2"}
    assert megatron_of_environment("http://a:1", given) == "http://b:2"
    with pytest.raises(ConfigError, match="write true or false"):
        megatron_of_environment(None, {"USE_MEGATRON": "maybe"})


async def test_vllm_backend_registers_what_the_service_serves(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tiny_adapter("poet", rank=2, seed=3), tmp_path / "poet")
    config = ServeConfig(
        port=0, anonymous=True, models={"tiny": str(tiny_folder)}, folder=tmp_path / "run"
    )
    async with serving(config) as url, aiohttp.ClientSession() as http:
        monkeypatch.setenv("VLLM_BASE_URL", url)

        def use_backend() -> tuple[list[Any], list[Any]]:
            info = vllm_backend.initialize_vllm_client()
            assert info["model"] == "tiny" and info["max_lora_rank"] >= 2
            assert vllm_backend.register_lora_adapter("poet", tmp_path / "poet")
            drawn = [
                vllm_backend.generate_with_vllm([[5, 6, 7]], name, max_tokens=4, seed=2)
                for name in (None, "poet")
            ]
            with pytest.raises(FleetError, match="Rookery service"):
                vllm_backend.init_communicator("cpu")
            vllm_backend.reset_prefix_cache()
            return drawn, vllm_backend.list_lora_adapters()

        try:
            (plain, poet), listed = await asyncio.to_thread(use_backend)
            assert [row["adapter_id"] for row in listed] == ["poet"]
            assert len(poet) == 1 and len(poet[0]["token_ids"]) == len(poet[0]["logprobs"])
            assert poet[0]["logprobs"] != plain[0]["logprobs"]
            body = {
                "prompts": [[5, 6, 7]],
                "model_id": "poet",
                "sampling_params": {"max_tokens": 4, "seed": 2},
            }
            async with http.post(f"{url}/api/v1/sample", json=body) as response:
                answer = await response.json()
            assert answer["sequences"][0]["tokens"] == poet[0]["token_ids"]
            gone = await asyncio.to_thread(vllm_backend.unregister_lora_adapter, "poet")
            again = await asyncio.to_thread(vllm_backend.unregister_lora_adapter, "poet")
            assert (gone, again) == (True, False)
            async with http.post(f"{url}/tokenize", json={"prompt": "w5 w6"}) as response:
                assert (await response.json())["count"] == 2
            wrong = {"lora_name": "x", "lora_path": str(tmp_path / "poet")}
            async with http.post(f"{url}/v1/load_lora_adapter", json=wrong) as response:
                assert response.status == 400
                assert "operator lists" in (await response.json())["error"]
        finally:
            await asyncio.to_thread(vllm_backend.shutdown_vllm_client)
