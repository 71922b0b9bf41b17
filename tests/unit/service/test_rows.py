"""The document of a snapshot: as it was when it was read, and read in no time."""

import json
from dataclasses import asdict

from rookery.service.futures import Future, Futures
from rookery.service.records import Model, Session, encode
from rookery.service.state import State
from rookery.service.work import Result
from rookery.types import LoraShape


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
