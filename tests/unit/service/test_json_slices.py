"""Large JSON in slices: what `json.loads` gives, without holding up the event loop."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from service.tenants import serve

from rookery.service.wire import json_slices
from rookery.service.wire.json_slices import load_json

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
    monkeypatch.setattr(json_slices, "LARGE_BYTES", 8)
    draw = random.Random(0)
    for number in range(3000):
        text = json.dumps(document(draw), ensure_ascii=False, indent=number % 2 or None).encode()
        text = damaged(text, draw) if number % 3 == 0 else text
        assert outcome(load_json, text) == outcome(json.loads, text), text


def test_an_error_is_told_where_it_is() -> None:
    text = b"[" + b"1," * 100_000 + b"?," + b"1," * 100_000 + b"1]"
    with pytest.raises(json.JSONDecodeError) as told:
        load_json(text)
    assert told.value.pos == 200_001


async def test_a_large_body_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """`json.loads` would, in a thread too."""
    tokens = b",".join([b"1234"] * 1_500_000)
    body = b'{"session_id": "x", "smile": "\\ud83d\\ude00", "tokens": [' + tokens + b"]}"
    started = time.monotonic()
    json.loads(body)
    whole_s, longest_s, is_done = time.monotonic() - started, 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        while not is_done:
            before = time.monotonic()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.monotonic() - before)

    async with serve(tmp_path / "run") as served:
        watching = asyncio.create_task(watch())
        headers = {"content-type": "application/json"}
        path = "/api/v1/session_heartbeat"
        answer = await served.client().send("POST", path, content=body, headers=headers)
        is_done = True
        await watching
    assert answer.status_code == 404
    assert longest_s < whole_s * 0.6
