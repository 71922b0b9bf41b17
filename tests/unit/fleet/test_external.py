"""External APIs: text over HTTP, rate limits, and nothing made up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rookery.errors import ConfigError, FleetError
from rookery.fleet.external import Codec, ExternalConfig, ExternalSampler, open_external
from rookery.ports import Sampler
from rookery.types import ModelRef, SampleRequest, SamplingParams, ScoreRequest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "yes", "no"]
CODEC = Codec(
    encode=lambda text: tuple(WORDS.index(word) for word in text.split()),
    decode=lambda tokens: " ".join(WORDS[t] for t in tokens),
)


class Api:
    """An API that answers `the cat`, and remembers what it was asked and when."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.most = 0
        self.now = 0
        self.tokens = ["the", "cat"]
        self.key = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.key = request.headers.get("Authorization", "")
        body = json.loads(await request.read())
        self.asked.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        values = [-0.5 - i for i in range(len(self.tokens))]
        likeliest = {"yes": -0.1, "no": -2.5}
        choices: list[dict[str, Any]] = []
        for index in range(body["n"]):
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop"}
            if "messages" in body:
                choice["message"] = {"content": "the cat"}
                content = [
                    {"token": token, "logprob": value, "top_logprobs": [
                        {"token": name, "logprob": v} for name, v in likeliest.items()
                    ]}
                    for token, value in zip(self.tokens, values, strict=True)
                ]  # fmt: skip
                choice["logprobs"] = {"content": content} if body.get("logprobs") else None
            else:
                choice["text"] = "the cat"
                if "logprobs" in body:
                    choice["logprobs"] = {
                        "tokens": self.tokens, "token_logprobs": values,
                        "top_logprobs": [likeliest] * len(self.tokens),
                    }  # fmt: skip
            choices.append(choice)
        return web.json_response({"choices": choices})


@asynccontextmanager
async def connect(
    api: Api, monkeypatch: pytest.MonkeyPatch, **options: object
) -> AsyncIterator[ExternalSampler]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", api.answer)
    app.router.add_post("/v1/completions", api.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    monkeypatch.setenv("SOME_KEY", "secret")
    config = ExternalConfig(
        url=f"http://127.0.0.1:{port}/v1", model="big", api_key_env="SOME_KEY", **options
    )  # type: ignore[arg-type]
    try:
        async with open_external(config, codec=CODEC) as sampler:
            yield sampler
    finally:
        await runner.cleanup()


def ask(ref: ModelRef, n: int = 1, max_tokens: int = 4) -> SampleRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, stop=("mat",), seed=3)
    return SampleRequest(model=ref, prompt=(0, 1, 2), params=params)


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_texts_go_out_and_tokens_come_back(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    async with connect(api, monkeypatch, route=route, logprobs=True) as sampler:
        assert isinstance(sampler, Sampler)
        [two] = await sampler.sample([ask(sampler.base, n=2)])
    assert [c.text for c in two] == ["the cat"] * 2 and two[0].tokens == (0, 1)
    assert two[0].logprobs == (-0.5, -1.5) and two[0].model == sampler.base
    [body] = api.asked
    text = body["messages"][0]["content"] if route == "chat" else body["prompt"]
    assert text == "the cat sat" and body["stop"] == ["mat"] and api.key == "Bearer secret"


async def test_log_probabilities_of_other_tokens_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api()
    api.tokens = ["the ca", "t"]
    async with connect(api, monkeypatch, logprobs=True) as sampler:
        [[completion]] = await sampler.sample([ask(sampler.base)])
    assert completion.logprobs == () and completion.tokens == (0, 1)
    async with connect(Api(), monkeypatch) as sampler:
        [[completion]] = await sampler.sample([ask(sampler.base)])
    assert completion.logprobs == ()


async def test_labels_are_scored_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(Api(), monkeypatch, logprobs=True) as sampler:
        request = ScoreRequest(model=sampler.base, tokens=(0, 1), start=2, labels=(7, 6))
        [score] = await sampler.score([request])
        assert score.label_logprobs == (-2.5, -0.1)
        for labels, start, said in [((5,), 2, r"\['mat'\]"), ((6,), 1, "no log-probabilities of")]:
            with pytest.raises(FleetError, match=said):
                await sampler.score(
                    [ScoreRequest(model=sampler.base, tokens=(0, 1), start=start, labels=labels)]
                )
    async with connect(Api(), monkeypatch) as sampler:
        with pytest.raises(FleetError, match="logprobs: true"):
            await sampler.score([request])


async def test_request_and_token_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.fleet.external.MINUTE_S", 0.4)
    for limits, num in [({"requests_per_minute": 10}, 20), ({"tokens_per_minute": 70}, 20)]:
        api = Api()
        options = {"requests_per_minute": 1e6, "max_in_flight": 3} | limits
        async with connect(api, monkeypatch, **options) as sampler:
            began = time.monotonic()
            await sampler.sample([ask(sampler.base)] * num)
            seconds = time.monotonic() - began
        # 10 requests, or 70 tokens at 7 a request, go at once; the other 10 over one period.
        assert 0.3 < seconds < 2.0 and len(api.asked) == num and api.most <= 3
    async with connect(Api(), monkeypatch, tokens_per_minute=50) as sampler:
        with pytest.raises(FleetError, match=r"1003 tokens can never.*tokens_per_minute 50"):
            await sampler.sample([ask(sampler.base, max_tokens=1000)])


async def test_a_missing_key_and_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set"):
        async with open_external(ExternalConfig(url="http://x/v1", model="m"), codec=CODEC):
            pass
    async with connect(Api(), monkeypatch) as sampler:
        with pytest.raises(FleetError, match="takes no adapters"):
            await sampler.sample([ask(ModelRef(name="poet", version="1"))])
