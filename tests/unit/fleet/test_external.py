"""External APIs: text over HTTP, rate limits, and nothing made up."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fleet.stub import serve_routes

from rookery.config import parse_config
from rookery.errors import ConfigError, FleetDownError, FleetError
from rookery.fleet import ServerRefusal
from rookery.fleet.http.external import ExternalConfig, ExternalSampler, TextCodec, open_external
from rookery.ports import Sampler
from rookery.runtime.retry import Backoff
from rookery.types import ModelRef, SampleRequest, SamplingParams, ScoreRequest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "yes", "no"]
CODEC = TextCodec(
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
        self.failures: list[tuple[int, Mapping[str, str]]] = []
        """(status, headers) to answer to the next requests, one each."""
        self.change: dict[str, Any] = {}
        """What every choice says instead."""
        self.refused = ""
        """Prompts with this word are refused."""
        self.num_free = 10**6
        """Requests after so many are never answered."""
        self.arrived = asyncio.Condition()

    async def wait_for(self, num: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= num)

    async def answer(self, request: web.Request) -> web.Response:
        self.key = request.headers.get("Authorization", "")
        body = json.loads(await request.read())
        self.asked.append(body)
        async with self.arrived:
            self.arrived.notify_all()
        if len(self.asked) > self.num_free:
            await asyncio.Event().wait()
        if self.refused and self.refused in json.dumps(body.get("messages")):
            return web.json_response({"error": {"message": "as asked"}}, status=400)
        if self.failures:
            status, headers = self.failures.pop(0)
            error = {"error": {"message": headers.get("said", "as asked")}}
            return web.json_response(error, status=status, headers=headers)
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
            choices.append(choice | self.change)
        return web.json_response({"choices": choices})


@asynccontextmanager
async def connect(
    api: Api, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[ExternalSampler]:
    monkeypatch.setenv("SOME_KEY", "secret")
    paths = ("/v1/chat/completions", "/v1/completions")
    async with serve_routes(*(web.post(path, api.answer) for path in paths)) as url:
        config = ExternalConfig(url=f"{url}/v1", model="big", api_key_env="SOME_KEY", **options)
        async with open_external(config, codec=CODEC) as sampler:
            yield sampler


def ask(ref: ModelRef, n: int = 1, max_tokens: int = 4, **options: Any) -> SampleRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, stop=("mat",), seed=3, **options)
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
    monkeypatch.setattr("rookery.fleet.http.api.MINUTE_S", 0.4)
    for limits, num in [({"requests_per_minute": 10}, 20), ({"tokens_per_minute": 70}, 20)]:
        api = Api()
        options = {"requests_per_minute": 1e6, "max_in_flight": 3} | limits
        async with connect(api, monkeypatch, **options) as sampler:
            began = time.monotonic()
            await sampler.sample([ask(sampler.base)] * num)
            seconds = time.monotonic() - began
        # 10 requests, or 70 tokens at 7 a request, go at once; the other 10 over one period.
        assert seconds > 0.3 and len(api.asked) == num and api.most <= 3
    async with connect(Api(), monkeypatch, tokens_per_minute=50) as sampler:
        with pytest.raises(FleetError, match=r"1003 tokens can never.*tokens_per_minute 50"):
            await sampler.sample([ask(sampler.base, max_tokens=1000)])


async def test_the_request_limit_holds_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.fleet.http.api.MINUTE_S", 0.6)
    api = Api()
    api.failures = [(429, {})] * 3
    async with connect(api, monkeypatch, requests_per_minute=2) as sampler:
        began = time.monotonic()
        await sampler.sample([ask(sampler.base)])
        assert len(api.asked) == 4 and time.monotonic() - began >= 0.5, (
            "two at once, then one in 0.3 s"
        )
    with pytest.raises(ConfigError, match=r"requests_per_minute is 0\.5"):
        parse_config(
            ExternalConfig, {"url": "x", "model": "m", "requests_per_minute": 0.5}, origin="x"
        )


@pytest.mark.parametrize(
    ("value", "route"), [(None, "chat"), (float("nan"), "completions"), ("-1", "chat")]
)
async def test_log_probabilities_that_are_no_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: object, route: str
) -> None:
    api = Api()
    told: dict[str, object] = {"tokens": ["the", "cat"], "token_logprobs": [-1.0, value]}
    if route == "chat":
        content = [{"token": "the", "logprob": -1.0}, {"token": "cat", "logprob": value}]
        told = {"content": content}
    api.change = {"logprobs": told}
    async with connect(api, monkeypatch, logprobs=True, route=route) as sampler:
        with pytest.raises(FleetError, match="for a log-probability"):
            await sampler.sample([ask(sampler.base)])


async def test_a_missing_key_and_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set"):
        async with open_external(ExternalConfig(url="http://x/v1", model="m"), codec=CODEC):
            pass
    async with connect(Api(), monkeypatch) as sampler:
        with pytest.raises(FleetError, match="takes no adapters"):
            await sampler.sample([ask(ModelRef(name="poet", version="1"))])


@pytest.mark.parametrize("max_in_flight", [1, 3])
async def test_what_was_answered_is_not_paid_twice(
    monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    api = Api()
    api.refused = "mat"
    async with connect(api, monkeypatch, max_in_flight=max_in_flight) as sampler:
        requests = [
            SampleRequest(model=sampler.base, prompt=(0, 1, word, n), params=SamplingParams(n=1))
            for word, n in [(0, 0), (1, 0), (1, 0), (5, 0), (2, 0), (3, 0)]
        ]
        with pytest.raises(ServerRefusal):
            await sampler.sample(requests)
        for request in requests:
            if 5 in request.prompt:
                with pytest.raises(ServerRefusal):
                    await sampler.sample([request])
            else:
                assert len(await sampler.sample([request])) == 1
        asked = Counter(body["messages"][0]["content"] for body in api.asked)
        assert asked == Counter(CODEC.decode(r.prompt) for r in [*requests, requests[3]])
        await sampler.sample([requests[0]])
        assert len(api.asked) == 8, "an answer is given once: the next is paid for"


async def test_one_refusal_ends_the_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.fleet.http.external.LATE_S", 0.1)
    api = Api()
    api.failures, api.num_free = [(400, {})], 1
    async with connect(api, monkeypatch, max_in_flight=2) as sampler:
        with pytest.raises(ServerRefusal, match=r"refused .400.: as asked"):
            await sampler.sample([ask(sampler.base)] * 40)
        api.num_free = 10**6
        assert await sampler.sample([ask(sampler.base)] * 3), "it can be asked again"
    assert len(api.asked) <= 2 + 3, "two were on their way, none followed"


@pytest.mark.parametrize(
    ("status", "headers"),
    [(401, {}), (402, {}), (403, {}), (404, {}), (429, {"said": "insufficient_quota: no credit"})],
)
async def test_what_is_refused_to_everybody_ends_the_run(
    status: int, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    api.failures = [(status, headers)]
    async with connect(api, monkeypatch, max_in_flight=1) as sampler:
        with pytest.raises(FleetDownError, match=f"refused .{status}") as caught:
            await sampler.sample([ask(sampler.base)] * 3)
    assert len(api.asked) == 1
    assert isinstance(caught.value, ConfigError) == (status not in (402, 429))


async def test_a_busy_api_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    retry = Backoff(first_s=0.1, longest_s=0.05)
    monkeypatch.setattr("rookery.fleet.http.client.RETRY", retry)
    api = Api()
    async with connect(api, monkeypatch, client={"busy_s": 5}) as sampler:
        api.failures = [(429, {"Retry-After": "0.4"}), (503, {"Retry-After": "0.3"})]
        began = time.monotonic()
        await sampler.sample([ask(sampler.base)])
        assert time.monotonic() - began >= 0.7 and len(api.asked) == 3
        api.failures = [(429, {"Retry-After": "45"})]
        with pytest.raises(
            FleetDownError, match=r"asks to wait for longer than busy_s, 5 s: as asked"
        ):
            await sampler.sample([ask(sampler.base)])
        api.failures = [(429, {"Retry-After": "Wed, 21 Oct 2065 07:28:00 GMT"})]
        with pytest.raises(FleetDownError, match=r"asks to wait \d{8,} s"):
            await sampler.sample([ask(sampler.base)])
        api.failures = [(429, {"Retry-After": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"})]
        await sampler.sample([ask(sampler.base)])
        assert len(api.asked) == 7 and time.monotonic() - began < 45
    assert ExternalConfig(url="http://x/v1", model="m").client.busy_s >= 60


async def test_parameters_are_sent_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    async with connect(api, monkeypatch) as sampler:
        await sampler.sample([ask(sampler.base, top_k=5, min_p=0.1, top_p=0.9)])
        await sampler.sample([ask(sampler.base)])
        refused: list[tuple[str, Any]] = [
            ("stop_tokens", (3,)),
            ("ignore_eos", True),
            ("top_logprobs", 2),
        ]
        for name, value in refused:
            with pytest.raises(FleetError, match=f"{name} is .*not token ids"):
                await sampler.sample([ask(sampler.base), ask(sampler.base, **{name: value})])
    first, second = api.asked
    assert (first["top_k"], first["min_p"], first["top_p"]) == (5, 0.1, 0.9)
    assert not {"top_k", "min_p"} & set(second)
    async with connect(api, monkeypatch, logprobs=True) as sampler:
        with pytest.raises(FleetError, match="top_logprobs to 0"):
            await sampler.score(
                [ScoreRequest(model=sampler.base, tokens=(0,), labels=(6,), top_logprobs=2)]
            )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish_reason": "content_filter"}, "ended as 'content_filter'"),
        ({"finish_reason": None}, "ended as None"),
        ({"message": {"content": None, "refusal": "I cannot"}}, "no complete answer: I cannot"),
        ({"logprobs": {"content": [{"token": "the"}]}}, "Could not parse the response of"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    api.change = change
    async with connect(api, monkeypatch) as sampler:
        with pytest.raises(FleetError, match=said):
            await sampler.sample([ask(sampler.base)])
        api.change = {"finish_reason": "length"}
        [[cut]] = await sampler.sample([ask(sampler.base)])
    assert cut.finish_reason == "length"
