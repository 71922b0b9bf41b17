"""OpenAI clients: streamed answers, tool calls, and answers held to a schema."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service.tenants import Client, FakeEngine, FakeFolders, Served, fake_backend, serve
from tiny import write_tiny_model
from transformers import AutoTokenizer

from rookery.compat.openai.stream import CallReader, Tool
from rookery.compat.serving import make_app
from rookery.compose.serve import TemplateCodec
from rookery.embedded import EngineConfig, open_engine
from rookery.errors import EngineDownError, EngineError
from rookery.service.config import Limits, ServiceConfig
from rookery.tasks.template import load_template
from rookery.testing import FakeSampler
from rookery.types import Completion, CompletionDelta, SampleRequest

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}w9 {% endfor %}{% for m in messages %}{{ m.content }} "
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.word }} {% endfor %}"
    "{% endfor %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The documents of a stream, which must end as OpenAI's do."""
    *events, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def stream(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.send("POST", path, json={"model": "fake", **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return chunks_of(answer.text)


async def ask(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.send("POST", path, json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def folded(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make, as an answer in one piece has them."""
    choices: dict[int, dict[str, Any]] = {}
    for row in (row for chunk in chunks for row in chunk["choices"]):
        said = row.get("delta", {"content": row.get("text")})
        is_new = row["index"] not in choices
        own = choices.setdefault(
            row["index"], {"token_ids": [], "content": "", "calls": [], "logprobs": []}
        )
        assert ("role" in said) == (is_new and "delta" in row)
        own["content"] += said.get("content") or ""
        own["calls"] += said.get("tool_calls", [])
        own["token_ids"] += row["token_ids"]
        assert "finish_reason" not in own, "nothing comes after the end"
        if row["finish_reason"]:
            own["finish_reason"] = row["finish_reason"]
        if row["logprobs"]:
            own["logprobs"].append(row["logprobs"])
        own.setdefault("prompt_token_ids", row.get("prompt_token_ids"))
    return [choices[index] for index in sorted(choices)]


@asynccontextmanager
async def tiny_service(folder: Path) -> AsyncIterator[Served]:
    """The service over the embedded engine with a tiny model, whose template takes tools."""
    write_tiny_model(folder / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tiny"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tiny")
    async with open_engine(EngineConfig(model=str(folder / "tiny"))) as engine:
        codec = TemplateCodec(load_template(folder / "tiny"))
        backend = replace(fake_backend(), engine=engine, codec=codec)
        async with serve(folder / "run", backend=backend) as served:
            yield served


MESSAGES = [{"role": "user", "content": "w5 w6"}]


ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "tools": [ADD]}),
    ("/v1/completions", {"prompt": ["w5 w6", "w7"], "logprobs": 1}),
]


async def test_a_stream_is_the_answer_in_pieces(tmp_path: Path) -> None:
    async with tiny_service(tmp_path) as served:
        ada = served.client()
        for path, fields in ASKED:
            body = {**fields, "seed": 3, "n": 2, "max_tokens": 12, "ignore_eos": True}
            plain = await ask(ada, path, body)
            text = plain["choices"][0].get("text") or plain["choices"][0]["message"]["content"]
            for stops in ([], [text[8:11]]):
                asked = {**body, "stop": stops, "stream_options": {"include_usage": True}}
                check_pieces(await ask(ada, path, asked), await stream(ada, path, asked))


def check_pieces(plain: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """They add up to the plain answer."""
    *chunks, last = pieces
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(chunks) > 2 * len(plain["choices"]), "not in one piece"
    for found, choice in zip(folded(chunks), plain["choices"], strict=True):
        said = choice.get("message", {"content": choice.get("text")})
        assert found["content"] == said["content"]
        for name in ("token_ids", "prompt_token_ids", "finish_reason"):
            assert found[name] == choice[name]
        if choice["logprobs"]:
            for name, rows in choice["logprobs"].items():
                assert [row for part in found["logprobs"] for row in part[name]] == rows


async def test_streams_are_kept_to_train_on(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        body = {"messages": [{"role": "user", "content": "5 6"}], "max_tokens": 3, "store": True}
        chunks = await stream(ada, CHAT, body)
        [choice] = folded(chunks)
        name = chunks[-1]["choices"][0]["sequence_id"]
        stored = (await ada.send("GET", f"/api/v1/sequences/{name}")).json()
        assert (stored["prompt"], stored["tokens"]) == ([5, 6], choice["token_ids"])


class SilentEngine(FakeEngine):
    """Streams nothing."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        return await super().sample([replace(request, on_delta=None) for request in requests])


async def test_engines_that_do_not_stream_answer_in_one_piece(tmp_path: Path) -> None:
    engine = SilentEngine()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        body = {"prompt": [5], "max_tokens": 4, "seed": 1, "n": 2}
        plain = await ask(ada, "/v1/completions", body)
        found = folded(await stream(ada, "/v1/completions", body))
        assert [own["content"] for own in found] == [one["text"] for one in plain["choices"]]


class FailingEngine(FakeEngine):
    """Fails with an error, before or after its first token."""

    def __init__(self, error: Exception, *, is_late: bool) -> None:
        super().__init__()
        self._error, self._is_late = error, is_late

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        tell = requests[0].on_delta
        if self._is_late and tell is not None:
            tell(CompletionDelta(sample=0, tokens=(5,), logprobs=(-1.0,), text="5"))
            await asyncio.sleep(0)
        raise self._error


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("not so"), 400), (EngineDownError("gone"), 503)]
)
async def test_errors_are_a_status_before_the_first_token_and_an_event_after_it(
    tmp_path: Path, error: Exception, status: int
) -> None:
    for is_late in (False, True):
        engine = FailingEngine(error, is_late=is_late)
        backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
        async with serve(tmp_path / f"run{is_late}", backend=backend) as served:
            body = {"model": "fake", "prompt": [5], "stream": True}
            answer = await served.client().send("POST", "/v1/completions", json=body)
            if not is_late:
                assert (answer.status_code, answer.json()["error"]) == (status, str(error))
                continue
            *_, last = chunks_of(answer.text)
            assert (last["error"]["message"], last["error"]["code"]) == (str(error), status)


class EndlessEngine(FakeEngine):
    """Tells a token, and nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = asyncio.Event()

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        assert requests[0].on_delta is not None
        requests[0].on_delta(CompletionDelta(sample=0, tokens=(5,), logprobs=(-1.0,), text="5"))
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended.set()
        raise AssertionError


class Reader:
    """One request as the web server hands it to the application; `send` is the test's."""

    def __init__(self, body: dict[str, Any]) -> None:
        content = json.dumps({"model": "fake", "stream": True, **body}).encode()
        self._received = [{"type": "http.request", "body": content}]
        self.has_left = asyncio.Event()

    async def read(self, served: Served, send: Callable[[Any], Awaitable[None]]) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        await make_app(served.service, keys=None)(scope, self._receive, send)

    async def _receive(self) -> dict[str, Any]:
        if not self._received:
            await self.has_left.wait()
        return self._received.pop() if self._received else {"type": "http.disconnect"}


@pytest.mark.parametrize("when", ["http.response.start", "http.response.body"])
async def test_a_client_that_leaves_ends_the_drawing(tmp_path: Path, when: str) -> None:
    engine = EndlessEngine()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    reader = Reader({"prompt": [5]})

    async def send(message: Any) -> None:
        if message["type"] == when:
            reader.has_left.set()

    async with serve(tmp_path / "run", backend=backend) as served, asyncio.timeout(10):
        await reader.read(served, send)
        assert engine.has_ended.is_set()
        assert served.service.drawing.turns.num_waiting == 0


async def test_a_service_that_stops_tells_its_streams_and_refuses_others(tmp_path: Path) -> None:
    engine, sent = EndlessEngine(), list[bytes]()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))

    async with serve(tmp_path / "run", backend=backend) as served, asyncio.timeout(10):

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent[-1]:
                served.service.stop()

        await Reader({"prompt": [5]}).read(served, send)
        assert engine.has_ended.is_set()
        body = {"model": "fake", "prompt": [5]}
        late = await served.client().send("POST", "/v1/completions", json=body)
    told = chunks_of(b"".join(sent).decode())[-1]["error"]
    assert (told["code"], late.status_code) == (503, 503)
    assert told["message"] == late.json()["error"]
    assert "stops: send the request again" in told["message"]


async def test_a_slow_reader_holds_nobody_up_and_gets_the_rest_in_one_piece(tmp_path: Path) -> None:
    may_read, sent = asyncio.Event(), list[bytes]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            sent.append(message["body"])
            await may_read.wait()

    config = ServiceConfig(samples_in_flight=1)
    async with serve(tmp_path / "run", config=config) as served, asyncio.timeout(10):
        body = {"prompt": [5], "max_tokens": 200, "seed": 1}
        reading = asyncio.create_task(Reader(body).read(served, send))
        plain = await ask(served.client(), "/v1/completions", body)
        may_read.set()
        await reading
    assert len(sent) < 6, "of 200 tokens"
    [own] = folded(chunks_of(b"".join(sent).decode()))
    assert own["content"] == plain["choices"][0]["text"]


async def test_streams_count_against_the_limits_of_their_tenant(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(samples=8, requests_per_s=1))
    body = {"model": "fake", "prompt": [5], "stream": True}
    async with serve(tmp_path / "run", config=config, key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        many = await bob.send("POST", "/v1/completions", json={**body, "n": 9})
        assert many.status_code == 400
        assert (await ada.send("POST", "/v1/completions", json=body)).status_code == 200
        assert (await ada.send("POST", "/v1/completions", json=body)).status_code == 429
        nobody = await ada.send(
            "POST", "/v1/completions", json=body, headers={"x-api-key": "tml-none"}
        )
        assert nobody.status_code == 401


class SpeakingEngine(FakeEngine):
    """Says a text, a character at a time."""

    def __init__(self, text: str) -> None:
        super().__init__()
        FakeSampler.__init__(
            self,
            reply=lambda *_: tuple(map(ord, text)),
            decode=lambda tokens: "".join(map(chr, tokens)),
        )
        self.asked: list[SampleRequest] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        self.asked += requests
        return await super().sample(requests)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = [("add", '{"a": 1}')]
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "5"}], "tools": [ADD]}


@pytest.mark.parametrize(
    ("text", "more", "content", "calls"),
    [
        (f"Let me see.\n{CALL}", {}, "Let me see.", CALLED),
        (f"{CALL}\n{CALL}", {}, None, CALLED * 2),
        ('{"name": "add", "parameters": {"a": 1}}', {}, None, CALLED),
        ('{"name": "other", "parameters": {}}', {}, '{"name": "other", "parameters": {}}', []),
        ("a < b <tool", {}, "a < b <tool", []),
        ("<tool_call>nothing</tool_call> ", {}, "<tool_call>nothing</tool_call> ", []),
        (f"{CALL[:30]}", {}, CALL[:30], []),
        (CALL, {"tool_choice": "none"}, CALL, []),
        ('{"a": 1}', {"tool_choice": {"function": {"name": "add"}}}, None, CALLED),
        (
            '[{"name": "add", "arguments": {"a": 1}}]', {"tool_choice": "required"}, None, CALLED,
        ),
    ],
)  # fmt: skip
async def test_calls_of_tools_are_read_from_the_answer(
    tmp_path: Path,
    text: str,
    more: dict[str, Any],
    content: str | None,
    calls: list[tuple[str, str]],
) -> None:
    engine = SpeakingEngine(text)
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        [choice] = (await ask(ada, CHAT, {**USER, **more, "max_tokens": 200}))["choices"]
        found = [one["function"] for one in choice["message"].get("tool_calls", [])]
        assert [(one["name"], one["arguments"]) for one in found] == calls
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        [own] = folded(await stream(ada, CHAT, {**USER, **more, "max_tokens": 200}))
        told = [
            (c["index"], c["function"]["name"], c["function"]["arguments"]) for c in own["calls"]
        ]
        assert told == [(i, *call) for i, call in enumerate(calls)]
        assert (own["content"] or None, own["finish_reason"]) == (content, choice["finish_reason"])
    assert bool(engine.asked[0].json_schema) == ("tool_choice" in more and bool(calls))


@given(
    parts=st.lists(st.sampled_from([CALL, " ", "\n", "ab", "<", "<tool_call>", "{"]), max_size=6),
    size=st.integers(1, 40),
)
def test_calls_are_the_same_however_the_text_is_cut(parts: list[str], size: int) -> None:
    text = "".join(parts)

    def read(size: int) -> tuple[str, list[str]]:
        reader = CallReader([Tool.model_validate(ADD)], "auto")
        cuts = [text[i : i + size] for i in range(0, len(text), size)]
        pieces = [*map(reader.add, cuts), reader.end()]
        calls = [call["function"]["name"] for _, own in pieces for call in own]
        assert reader.num_calls == len(calls)
        return "".join(content for content, _ in pieces), calls

    assert read(size) == read(1000)
    if CALL not in text:
        assert read(size) == (text, [])


async def test_tools_go_through_the_chat_template_and_calls_come_back(tmp_path: Path) -> None:
    call = {"id": "call-1", "function": {"name": "add", "arguments": '{"word": "w7"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "w5"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "w8", "tool_call_id": "call-1"},
    ]
    async with tiny_service(tmp_path) as served:
        ada = served.client()
        body = {"messages": messages, "tools": [ADD], "max_tokens": 2}
        [choice] = (await ask(ada, CHAT, body))["choices"]
        assert choice["prompt_token_ids"] == [9, 5, 7, 8]
        off = await ask(ada, CHAT, {**body, "tool_choice": "none"})
        assert off["choices"][0]["prompt_token_ids"] == [5, 7, 8]
        wrong = {"function": {"name": "add", "arguments": "w7"}}
        body["messages"] = [{"role": "assistant", "tool_calls": [wrong]}]
        answer = await ada.send("POST", CHAT, json={"model": "fake", **body})
        assert answer.status_code == 422 and "JSON object" in answer.json()["error"]


async def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    async with tiny_service(tmp_path) as served:
        tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "tiny"))
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        tokenizer.save_pretrained(tmp_path / "bare")
        codec = TemplateCodec(load_template(tmp_path / "bare"))
        context = served.service.context
        context.backends["fake"] = replace(context.backends["fake"], codec=codec)  # type: ignore[index]
        body = {"model": "fake", "messages": MESSAGES, "tools": [ADD]}
        answer = await served.client().send("POST", CHAT, json=body)
        assert answer.status_code == 400
        assert "no place for tools" in answer.json()["error"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
async def test_a_schema_reaches_the_engine(
    tmp_path: Path, form: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    engine = SpeakingEngine("{}")
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    async with serve(tmp_path / "run", backend=backend) as served:
        messages = [{"role": "user", "content": "5"}]
        await ask(served.client(), CHAT, {"messages": messages, "response_format": form})
    [request] = engine.asked
    assert request.json_schema == ("" if schema is None else json.dumps(schema))


async def test_the_embedded_engine_refuses_schemas(tmp_path: Path) -> None:
    async with tiny_service(tmp_path) as served:
        forms: list[dict[str, Any]] = [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_object"}, "stream": True},
            {"tools": [ADD], "tool_choice": "required"},
        ]
        for form in forms:
            body = {"model": "fake", "messages": MESSAGES, **form}
            answer = await served.client().send("POST", CHAT, json=body)
            assert answer.status_code == 400
            assert "serve the model with vLLM" in answer.json()["error"]
