"""External APIs as text models: messages out, text and usage back, and every way to fail."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fleet.stub import serve_routes

from rookery.config import parse_config
from rookery.errors import ConfigError, FleetDownError, FleetError, FleetSettingsError
from rookery.fleet import ServerLost, ServerRefusal
from rookery.fleet.http.external import ExternalConfig, ExternalTextModel, open_text_model
from rookery.ports import TextModel
from rookery.types import Message, TextRequest, TokenUsage

CHAT = (Message(role="system", content="Be brief."), Message(role="user", content="Hello?"))
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
}


class Api:
    """Answers what it is told to, then `ANSWER`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.answers: list[web.Response] = []
        self.hang = False
        self.arrived = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(json.loads(await request.read()))
        self.headers.append(request.headers)
        self.arrived.set()
        if self.hang:
            await asyncio.Event().wait()
        return self.answers.pop(0) if self.answers else web.json_response(ANSWER)

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return self.answers.pop(0) if self.answers else web.json_response({"data": []})


@asynccontextmanager
async def connect(api: Api, **options: Any) -> AsyncIterator[ExternalTextModel]:
    key = options.pop("key", None)
    settings = {"api_key_env": "", "requests_per_minute": None, **options}
    routes = web.post("/v1/chat/completions", api.answer), web.get("/v1/models", api.list_models)
    async with serve_routes(*routes) as url:
        config = ExternalConfig(url=f"{url}/v1", model="big", **settings)
        async with open_text_model(config, api_key=key) as model:
            yield model


def status(code: int, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": "as asked"}}, status=code, headers=headers)


async def test_messages_go_out_and_text_comes_back() -> None:
    api = Api()
    async with connect(api) as model:
        assert isinstance(model, TextModel)
        reply = await model.reply(TextRequest(messages=CHAT, max_tokens=9))
        await model.reply(TextRequest(messages=CHAT, temperature=0.0, top_p=0.5, seed=7))
        assert model.usage == TokenUsage(prompt_tokens=24, completion_tokens=6)
    assert (reply.text, reply.finish_reason, reply.model) == ("Hi.", "stop", "big")
    assert reply.usage == TokenUsage(prompt_tokens=12, completion_tokens=3)
    first, second = api.bodies
    assert first == {
        "model": "big", "max_tokens": 9,
        "messages": [{"role": m.role, "content": m.content} for m in CHAT],
    }  # fmt: skip
    assert (second["temperature"], second["top_p"], second["seed"]) == (0.0, 0.5, 7)
    assert "Authorization" not in api.headers[0], "no key is needed"


async def test_the_key_is_sent_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    api = Api()
    async with connect(api, api_key_env="SOME_KEY") as model:
        await model.reply(TextRequest(messages=CHAT))
    assert api.headers[0]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigError, match=r'SOME_KEY is not set.*api_key_env: ""'):
        async with connect(api, api_key_env="SOME_KEY"):
            pass


async def test_busy_and_failing_apis_are_asked_again() -> None:
    api = Api()
    async with connect(api) as model:
        api.answers = [status(429, **{"Retry-After": "0.05"}), status(503)]
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi."
        api.answers = [status(500)]
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi."
        api.answers = [status(500), status(502)]
        with pytest.raises(ServerLost, match=r"failed .502"):
            await model.reply(TextRequest(messages=CHAT))
    assert len(api.bodies) == 8
    assert api.bodies[-1]["max_tokens"] == 1, "whether it serves anybody"


async def test_a_gateway_that_fails_whatever_it_is_asked_is_down() -> None:
    api = Api()
    async with connect(api) as model:
        api.answers = [status(502) for _ in range(4)]
        with pytest.raises(FleetDownError, match=r"failed .502"):
            await model.reply(TextRequest(messages=CHAT))
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi.", "it is asked again"


def listing(*names: str) -> web.Response:
    return web.json_response({"data": [{"id": name} for name in names]})


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([status(401)], "refuses the key, or wants one.*The key came from SOME_KEY"),
        ([status(403)], "refuses the key, or wants one.*The key came from SOME_KEY"),
        ([status(404), status(404)], "Is http://.* all that comes before /chat/completions"),
        (
            [status(404), listing("small", "models/big-2", *"cdefghij")],
            r"no model 'big'; it lists small, big-2, c, .*h and 2 more. Did you mean big-2\?",
        ),
        ([status(404), web.json_response([])], "refused .404"),
        ([status(404), listing("big")], r"refused .404.: as asked\.$"),
        ([status(500), status(401)], "refuses the key"),
    ],
)
async def test_settings_that_no_waiting_mends_are_told_apart(
    answers: list[web.Response], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    api = Api()
    api.answers = answers
    async with connect(api, api_key_env="SOME_KEY") as model:
        with pytest.raises(FleetSettingsError, match=said):
            await model.reply(TextRequest(messages=CHAT))
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi.", "it is asked again"


async def test_an_api_that_refuses_whatever_it_is_asked_ends_a_loop() -> None:
    """Unless it answered before: then it is the request that it refuses."""
    api = Api()
    requests = [TextRequest(messages=CHAT, seed=seed) for seed in (1, 1, 2, 3)]
    for is_new in (False, True):
        async with connect(api) as model:
            if not is_new:
                await model.reply(requests[0])
            api.answers = [status(400) for _ in requests]
            for request in requests[:3]:
                with pytest.raises(ServerRefusal, match=r"refused .400.: as asked"):
                    await model.reply(request)
            kind = FleetSettingsError if is_new else ServerRefusal
            with pytest.raises(kind, match=r"refused .400.: as asked"):
                await model.reply(requests[3])


async def test_who_can_serve_nobody_is_told_apart() -> None:
    api = Api()
    async with connect(api, client={"busy_s": 0.2}) as model:
        api.answers = [status(429, **{"Retry-After": "60"})]
        with pytest.raises(FleetDownError) as caught:
            await model.reply(TextRequest(messages=CHAT))
        assert not isinstance(caught.value, FleetSettingsError)
        api.answers = [status(400)]
        with pytest.raises(ServerRefusal):
            await model.reply(TextRequest(messages=CHAT))
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi.", "it is asked again"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    async with open_text_model(ExternalConfig(url=url, model="m", api_key_env="")) as model:
        with pytest.raises(FleetDownError, match="The API can't be reached"):
            await model.reply(TextRequest(messages=CHAT))


async def test_text_can_be_written_whatever_the_api_sends() -> None:
    """JSON lets half of a surrogate pair through, which UTF-8 has no bytes for."""
    api = Api()
    half, whole = "half \ud800", "whole \U0001f600"
    message = {"role": "assistant", "content": f"{half}, {whole}"}
    refusal = {"role": "assistant", "content": None, "refusal": f"No: {half}"}
    api.answers = [
        web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]}),
        web.json_response({"choices": [{"message": refusal, "finish_reason": "stop"}]}),
        web.json_response({"error": {"message": half}}, status=400),
    ]
    async with connect(api) as model:
        assert (await model.reply(TextRequest(messages=CHAT))).text == f"half ?, {whole}"
        for kind in (FleetError, ServerRefusal):
            with pytest.raises(kind, match=r"half \?"):
                await model.reply(TextRequest(messages=CHAT))


async def test_an_api_that_hangs_is_down() -> None:
    api = Api()
    async with connect(api, client={"request_s": 0.2}) as model:
        api.hang = True
        with pytest.raises(FleetDownError, match=r"did not answer within 0\.2 s"):
            await model.reply(TextRequest(messages=CHAT))
        api.hang = False
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi."


async def test_closing_tells_who_waits() -> None:
    api = Api()
    api.hang = True
    async with asyncio.timeout(10):
        async with connect(api) as model:
            waiting = asyncio.create_task(model.reply(TextRequest(messages=CHAT)))
            await api.arrived.wait()
        with pytest.raises(FleetDownError, match="was closed here"):
            await waiting
        with pytest.raises(FleetDownError, match="was closed here"):
            await model.reply(TextRequest(messages=CHAT))


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {"prompt_tokens": 1},
        {"prompt_tokens": True, "completion_tokens": 2},
        {"prompt_tokens": 1, "completion_tokens": -2},
    ],
)
async def test_usage_that_is_not_reported_is_not_invented(usage: object) -> None:
    api = Api()
    api.answers = [web.json_response({**ANSWER, "usage": usage})]
    async with connect(api) as model:
        assert (await model.reply(TextRequest(messages=CHAT))).usage is None
        assert model.usage == TokenUsage(prompt_tokens=0, completion_tokens=0)


def choice(**change: object) -> dict[str, object]:
    return {"choices": [{"message": {"content": "Hi."}, "finish_reason": "stop", **change}]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([], "no JSON object"),
        ({}, "not one message"),
        ({"choices": []}, "not one message"),
        ({"choices": ["x"]}, "not one message"),
        (choice(message=None), "not one message"),
        (choice(finish_reason="content_filter"), "ended as 'content_filter'"),
        (choice(finish_reason=None), "ended as None"),
        (choice(message={"content": None, "refusal": "I cannot"}), "no complete reply: I cannot"),
    ],
)
async def test_garbage_is_an_error_of_one_request(answer: object, said: str) -> None:
    api = Api()
    api.answers = [web.json_response(answer)]
    async with connect(api) as model:
        with pytest.raises(FleetError, match=said) as caught:
            await model.reply(TextRequest(messages=CHAT))
        assert not isinstance(caught.value, FleetDownError)
        api.answers = [web.Response(text="<html>", content_type="application/json")]
        with pytest.raises(FleetError):
            await model.reply(TextRequest(messages=CHAT))
        assert (await model.reply(TextRequest(messages=CHAT))).text == "Hi."


async def test_settings_that_texts_do_not_have_are_refused() -> None:
    for options in ({"route": "completions"}, {"logprobs": True}):
        with pytest.raises(ConfigError, match="needs route: chat and logprobs: false"):
            async with connect(Api(), **options):
                pass


@pytest.mark.parametrize("code", [401, 403])
async def test_a_key_that_is_refused_is_seen_before_a_model_is_asked(code: int) -> None:
    api = Api()
    async with connect(api, key="secret") as model:
        await model.check()
        assert api.headers[0]["Authorization"] == "Bearer secret"
        api.answers = [status(code)]
        with pytest.raises(ConfigError, match="refuses the key, or wants one"):
            await model.check()
    assert api.bodies == []


@pytest.mark.parametrize("code", [404, 400, 500])
async def test_a_model_that_is_not_listed_is_asked_for_a_word(code: int) -> None:
    api = Api()
    async with connect(api) as model:
        api.answers = [listing("small"), status(code), *[status(code)] * (code == 500)]
        if code == 404:
            api.answers.append(listing("small"))
            with pytest.raises(ConfigError, match="it lists small"):
                await model.check()
        else:
            await model.check()
        api.answers = [listing("small", "big")]
        await model.check()
    assert len(api.bodies) == (2 if code == 500 else 1)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/v1", "not a url", "http://", "http://host:port/v1"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url is .*[wW]rite http://"):
        parse_config(ExternalConfig, {"url": url, "model": "big"}, origin="the config")


async def test_an_api_without_a_list_of_models_or_that_is_away_is_left_for_later() -> None:
    api = Api()
    async with connect(api) as model:
        api.answers = [status(404), status(500)]
        await model.check()
        await model.check()
    config = ExternalConfig(url="http://127.0.0.1:9/v1", model="big", api_key_env="")
    async with open_text_model(config) as model:
        await model.check()


async def test_reasoning_models_get_what_they_know() -> None:
    api = Api()
    options = {"token_limit": "max_completion_tokens", "reasoning_effort": "low"}
    async with connect(api, **options, takes_seed=False) as model:
        await model.reply(TextRequest(messages=CHAT, temperature=0.5, top_p=0.5, seed=3))
    del api.bodies[0]["messages"]
    assert api.bodies == [
        {"model": "big", "max_completion_tokens": 1024, "reasoning_effort": "low"}
    ]
