"""OpenAI's clients, as they are, against the service: streams, tools, schemas; on vLLM too.

ROOKERY_OPENAI_PYTHON=/path/to/python-with-clients pytest tests/real/test_openai.py
"""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compat.test_openai_streams import CALL, SpeakingEngine
from service.server_process import ServerProcess
from service.tenants import FakeFolders, fake_backend
from tests.real.peers import needs_vllm, printed_by, served_on_cpu
from tiny import write_tiny_model
from transformers import AutoTokenizer

from rookery.compose.serve import ServeConfig, TemplateCodec, serving
from rookery.embedded import resolve_model
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.tasks.template import load_template
from rookery.types import CompletionDelta, SampleRequest, SamplingParams

CLIENT = Path(__file__).with_name("openai_client.py")
PYTHON = os.environ.get("ROOKERY_OPENAI_PYTHON", "")
RUN_S = 600.0
pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="ROOKERY_OPENAI_PYTHON names no Python with openai, langchain, litellm"
    ),
    pytest.mark.timeout(1800),
]
TEMPLATE = (
    "{% for tool in tools or [] %}w9 {% endfor %}"
    "{% for message in messages %}{{ message.content }} {% endfor %}"
)


async def drive(what: str, url: str, model: str) -> Any:
    """What the clients saw."""
    env = {"PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return json.loads(
        await printed_by(PYTHON, str(CLIENT), what, f"{url}/v1", model, env=env, limit_s=RUN_S)
    )


def write_model(folder: Path) -> Path:
    write_tiny_model(folder)
    return write_template(folder, TEMPLATE)


def write_template(folder: Path, template: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def check_streams(found: Any) -> None:
    for name in ("openai", "completions", "langchain", "litellm"):
        assert found[name]["pieces"] == found[name]["whole"]
        assert found[name]["num"] > 4, "not in one piece"
    for name in ("openai", "langchain"):
        whole, streamed = found[name]["usage"]
        assert streamed == whole
    assert "logit_bias is not supported" in found["refusal"]


async def test_clients_stream(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    server = ServerProcess(tmp_path, {"tiny/model": str(model)})
    async with server.running():
        check_streams(await drive("streams", server.url, "tiny/model"))


async def test_clients_call_tools(tmp_path: Path) -> None:
    engine = SpeakingEngine(CALL.replace('{"a": 1}', '{"a": 1, "b": 2}'))
    codec = TemplateCodec(load_template(write_model(tmp_path / "tiny")))
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine), codec=codec)
    config = ServeConfig(port=0, anonymous=True, folder=tmp_path / "run")
    async with serving(config, backends={"tiny/model": backend}) as url:
        found = await drive("tools", url, "tiny/model")
    written, read = '{"a": 1, "b": 2}', [["add", {"a": 1, "b": 2}]]
    [call] = found["openai"]["calls"]
    assert call["function"] == {"name": "add", "arguments": written}
    assert found["openai"]["reason"] == "tool_calls"
    for name in ("streamed", "litellm", "litellm_streamed"):
        assert found[name] == [written]
    assert found["langchain"] == found["langchain_streamed"] == read
    assert (found["back"], found["langchain_back"]) == ("chat.completion", "ai")


@needs_vllm
async def test_clients_stream_and_ask_for_schemas_on_vllm(tmp_path: Path) -> None:
    # Its own template has no tools.
    folder = Path(shutil.copytree(resolve_model("smollm2").path, tmp_path / "smollm2"))
    own = AutoTokenizer.from_pretrained(str(folder)).chat_template
    write_template(folder, "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + own)
    launch = LaunchConfig(**served_on_cpu(folder, max_model_len=2048))
    async with open_fleet(FleetConfig(name="smollm2", launch=launch)) as fleet:
        await check_deltas(fleet, load_template(folder).encode_text("Once upon a time"))
        url = fleet.pool.replicas[0].url
        engine = {"type": "fleet", "urls": [url], "device": "cpu"}
        server = ServerProcess(tmp_path, {"smollm2": str(folder)}, engine=engine)
        async with server.running():
            check_streams(await drive("streams", server.url, "smollm2"))
            await until_idle(fleet)
            found = await drive("schemas", server.url, "smollm2")
    for name in ("openai", "streamed", "litellm"):
        city = json.loads(found[name])
        assert city["name"] in ("Paris", "Rome") and isinstance(city["size"], int)
    assert found["openai"] == found["streamed"]
    assert found["langchain"]["name"] in ("Paris", "Rome")
    [arguments] = map(json.loads, found["forced"])
    assert {*arguments} == {"a", "b"}
    text, reason = found["object"]
    assert text.lstrip().startswith("{") and (
        reason == "length" or isinstance(json.loads(text), dict)
    )


async def check_deltas(fleet: Any, prompt: tuple[int, ...]) -> None:
    """Streamed by vLLM, drawn by our own route: the same answers, stop strings too."""
    params = SamplingParams(max_tokens=40, n=2, seed=4, top_logprobs=2, temperature=0.8)
    request = SampleRequest(model=fleet.base, prompt=prompt, params=params)
    [plain] = await fleet.sample([request])
    stop = plain[0].text[60:63]
    for stops in ((), (stop,)):
        request = replace(request, params=replace(params, stop=stops))
        deltas: list[CompletionDelta] = []
        [plain] = await fleet.sample([request])
        [told] = await fleet.sample([replace(request, on_delta=deltas.append)])
        assert [one.tokens for one in told] == [one.tokens for one in plain]
        for sample, one in enumerate(plain):
            own = [delta for delta in deltas if delta.sample == sample]
            assert "".join(delta.text for delta in own) == one.text
            assert tuple(token for delta in own for token in delta.tokens) == one.tokens
            assert own[-1].finish_reason == one.finish_reason
            assert sum(len(delta.top_logprobs) for delta in own) == len(one.tokens)


async def until_idle(fleet: Any) -> None:
    """What the client left in the middle is not drawn on."""
    [replica] = fleet.pool.replicas
    async with asyncio.timeout(20):
        while True:
            await replica.measure()
            if not replica.load.foreign:
                return
            await asyncio.sleep(0.1)
