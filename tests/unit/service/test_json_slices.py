"""Large JSON in slices: what `json.loads` gives, without holding up the event loop."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import AfterValidator, BaseModel, ValidationError
from service.tenants import Client, fake_backend, serve

from rookery.compat.openai.routes import CompletionRequest
from rookery.service import wire as body
from rookery.service.futures import Future, Futures
from rookery.service.records import SLICE, Model, Session, encode
from rookery.service.request_context import JsonRoute
from rookery.service.state import State
from rookery.service.wire import load_json
from rookery.service.work import Result
from rookery.testing import BASE
from rookery.types import Completion, LoraShape

ENDS = [1, -2.5, 1e300, "a]b[", 'x\\"é', True, None, [], {}, list(range(20)), float("inf")]


def document(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 4 or kind < 0.3:
        return draw.choice(ENDS)
    if kind < 0.65:
        return [document(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {f"k{place}": document(draw, depth + 1) for place in range(draw.randrange(4))}


def damaged(text: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(text))
    return text[:place] + draw.choice([b",", b"]", b"[", b"1", b" ", b'"']) + text[place + 1 :]


def outcome(load: Any, text: bytes) -> str:
    try:
        return repr(load(text))
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError:
        return "not JSON"


def test_slices_give_what_json_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LARGE_BYTES", 8)
    draw = random.Random(0)
    for number in range(1000):
        text = json.dumps(document(draw), ensure_ascii=False, indent=number % 2 or None).encode()
        text = damaged(text, draw) if number % 3 == 0 else text
        assert outcome(load_json, text) == outcome(json.loads, text), text


def test_an_error_is_told_where_it_is() -> None:
    text = b"[" + b"1," * 100_000 + b"?," + b"1," * 100_000 + b"1]"
    with pytest.raises(json.JSONDecodeError) as told:
        load_json(text)
    assert told.value.pos == 200_001


class NotedTokens(tuple[int, ...]):
    """Knows in which threads it was read, and how much at a time."""

    threads: set[threading.Thread]
    longest = 0

    def __getitem__(self, place: Any) -> Any:
        part = super().__getitem__(place)
        self.longest = max(self.longest, len(part))
        return part

    def __iter__(self) -> Iterator[int]:
        self.threads.add(threading.current_thread())
        return super().__iter__()


async def test_a_large_answer_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """`json.dumps` of all of it would, in a thread too."""
    tokens, backend = NotedTokens([5] * 10_000), fake_backend()
    tokens.threads = set()

    async def sample(_: Any) -> Any:
        one = Completion(
            model=BASE, tokens=tokens, logprobs=tokens, text="", finish_reason="length"
        )
        return [(one,)]

    backend.engine.sample = sample  # type: ignore[method-assign, assignment]
    async with serve(tmp_path / "run", backend=backend) as served:
        answer = await served.client().post("sample", {"prompts": [[5]]})
    assert threading.main_thread() not in tokens.threads
    assert answer["sequences"][0]["tokens"] == list(tokens)
    assert 0 < tokens.longest <= SLICE


async def held_up(client: Client, path: str, body: bytes) -> tuple[httpx2.Response, float]:
    """The answer, and how long the event loop computed without a pause, whatever else runs."""
    longest_s, is_done = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        while not is_done:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before)

    watching = asyncio.create_task(watch())
    headers = {"content-type": "application/json"}
    answer = await client.send("POST", f"/api/v1/{path}", content=body, headers=headers)
    is_done = True
    await watching
    return answer, longest_s


class Tokens(BaseModel):
    tokens: list[int]


async def test_many_wrong_items_do_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """Each would be an error of its own."""
    wrong = ["x"] * 60_000
    started = time.thread_time()
    with pytest.raises(ValidationError) as told:
        Tokens(tokens=wrong)  # type: ignore[arg-type]
    assert len(told.value.errors()) == len(wrong)
    whole_s = time.thread_time() - started
    tokens = [1] * 5000 + wrong
    document = {"prompt": {"chunks": [{"tokens": tokens}]}, "sampling_session_id": "x"}
    async with serve(tmp_path / "run") as served:
        body = json.dumps(document).encode()
        answer, longest_s = await held_up(served.client(), "asample", body)
    assert answer.status_code == 422
    assert "prompt.chunks.0.tokens: item 5000: " in answer.json()["error"]
    assert longest_s < whole_s * 0.6


async def test_large_bodies_are_validated_once_and_in_a_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    def note(text: str) -> str:
        threads.append(threading.current_thread())
        return text

    class Noted(BaseModel):
        text: Annotated[str, AfterValidator(note)]

    router = APIRouter(route_class=JsonRoute)

    @router.post("/api/v1/noted")
    async def noted(body: Noted) -> int:
        return len(body.text)

    app = FastAPI()
    app.include_router(router)
    transport = httpx2.ASGITransport(app=app)
    async with (
        serve(tmp_path / "run") as served,
        httpx2.AsyncClient(transport=transport, base_url="http://tink") as http,
    ):
        app.state.reading = served.service.reading
        answer = await Client(http).send("POST", "/api/v1/noted", json={"text": "x" * 100_000})
    assert answer.json() == 100_000
    [thread] = threads
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("num", [2, 5000])
@pytest.mark.parametrize("item", ["5", 5, [5, 6]])
def test_slices_are_of_the_type_that_the_whole_is(item: Any, num: int) -> None:
    assert CompletionRequest(model="fake", prompt=[item] * num).prompt == [item] * num
    assert CompletionRequest(model="fake", prompt=[[5] * num]).prompt == [[5] * num]
    with pytest.raises(ValidationError):
        CompletionRequest(model="fake", prompt=[*[item] * num, None])


# The document of a snapshot.


def make_state() -> State:
    state = State()
    state.sessions["s"] = Session(id="s", tenant="ada", created=1.5, metadata={"a": [1, None]})
    lora = LoraShape(rank=8, seed=3)
    for name in ("m", "n"):
        state.models[name] = Model(
            id=name, session_id="s", tenant="ada", base_model="b", lora=lora, created=1,
            last_request=2,
        )  # fmt: skip
    return state


def test_a_document_is_restored_as_it_was_when_it_was_read() -> None:
    state = make_state()
    read, expected = state.read(), asdict(state.models["m"])
    state.models["m"].next_seq = 7
    state.sessions["s"].is_over = True
    restored = State.restore(json.loads(encode(read)))
    assert asdict(restored.models["m"]) == expected
    assert restored.sessions == make_state().sessions and not restored.checkpoints


def test_results_are_restored_as_they_were_when_they_were_read() -> None:
    futures = Futures()
    for number in range(3):
        own = {"tenant": "ada", "digest": "d", "owner": "m", "reply": {"request_id": number}}
        futures.add(Future(id=f"f{number}", key=f"m#{number}", **own))  # type: ignore[arg-type]
    futures.finish("f0", Result(b"\x00\xff", form="proto"))
    read = futures.read()
    futures.finish("f1", Result(b"later"))
    restored = Futures.restore(json.loads(encode({"futures": read}))["futures"])
    results = [restored.get(f"f{number}", tenant="ada").result for number in range(3)]
    assert results == [Result(b"\x00\xff", form="proto"), None, None]
