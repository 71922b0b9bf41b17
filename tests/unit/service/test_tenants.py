"""Tenants apart, keys, limits, and bad input over HTTP."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from executors.jobs import until
from service.tenants import PROTO, Client, HeldTrainer, Served, fake_backend, serve, train_body

from rookery.remote.messages import ForwardBackwardRequest
from rookery.service.app import read_status
from rookery.service.commands import MAX_SEQUENCES, apply
from rookery.service.config import Limits, ServiceConfig
from rookery.service.keys import Keys, add_key, list_keys, remove_key
from rookery.service.records import StoredSequence
from rookery.service.state import State
from rookery.service.work import Command
from rookery.ui.live.export import render_service_page

LOSS = {
    "session_id": "S",
    "custom_loss_seq_id": 0,
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {},
}


async def test_without_a_known_key_the_body_is_not_read(tmp_path: Path) -> None:
    """To parse a large one takes seconds, in which nobody is served."""
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(b"{")
        yield b"{"
        read.append(b"}")
        yield b"}"

    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        stranger = served.client("ada")
        stranger.key = "tml-made-up"
        headers = {"content-type": "application/json"}
        for path in ("sample", "forward_backward"):
            answer = await stranger.send("POST", f"/api/v1/{path}", content=body(), headers=headers)
            assert answer.status_code == 401
            assert "rookery keys add" in answer.json()["error"]
        assert not read
        assert (await stranger.send("GET", "/api/v1/healthz")).status_code == 200


async def test_a_published_checkpoint_is_read_by_others_and_theirs_alone_to_change(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        model = await ada.model(await ada.session())
        path = await ada.save(model, 1, "ck")
        item = f"/api/v1/training_runs/{model}/checkpoints/weights/ck"
        for listed in ("checkpoints", "training_runs"):
            assert (await bob.send("GET", f"/api/v1/{listed}")).json()[listed] == []
        sampler = {"session_id": await bob.session(), "sampling_session_seq_id": 0}
        sampler["model_path"] = path
        await bob.post("create_sampling_session", sampler, status=404)
        assert (await ada.send("POST", f"{item}/publish")).status_code == 204
        await bob.post("create_sampling_session", sampler)
        assert (await bob.send("DELETE", item)).status_code == 404
        assert (await ada.send("DELETE", item)).status_code == 204
        await ada.post("weights_info", {"tinker_path": path}, status=404)


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("create_model", {"session_id": "S", "model_seq_id": 0, "base_model": "x"}, 400, "It has"),
    ("create_model", {"model_seq_id": 0, "base_model": "fake"}, 422, "session_id"),
    ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": -1}}, 422, "learning"),
    ("optim_step", {"model_id": "M", "optimizer_params": {"type": "dimuon"}}, 400, "dimuon"),
    ("save_weights", {"model_id": "M", "seq_id": 1, "path": "../up"}, 422, "path"),
    ("load_weights", {"model_id": "M", "seq_id": 1, "path": "/etc"}, 400, "not a checkpoint"),
    ("asample", {"prompt": {"chunks": []}, "sampling_session_id": "S"}, 404, "no sampling"),
    ("create_custom_loss", {"session_id": "S"}, 422, "inputs"),
    ("create_custom_loss", {**LOSS, "session_id": "other"}, 404, "session"),
    ("create_custom_loss", {**LOSS, "graph": {"target": "forbidden"}}, 400, "'forbidden'"),
    ("retrieve_future", {"request_id": "req-0"}, 404, "no request"),
]


async def test_bad_input_gets_a_status_and_a_sentence(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        names = {"S": session, "M": await ada.model(session)}
        for path, body, status, sentence in WRONG:
            filled = {key: names.get(value, value) if isinstance(value, str) else value
                      for key, value in body.items()}  # fmt: skip
            answer = await ada.post(path, filled, status=status)
            assert sentence in answer["error"]


async def test_bodies_over_the_limit_are_refused(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(body_mib=0.01))
    async with serve(tmp_path / "run", config=config) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        long = train_body(model, 1, tokens=[5] * 200, weights=[1.0] * 200) * 10
        plain = await ada.send("POST", "/api/v1/forward_backward", content=long)
        assert plain.status_code == 413 and "limits.body_mib" in plain.json()["error"]
        nowhere = await ada.send("POST", "/api/v1/nothing", content=b"{}")
        assert nowhere.status_code == 404 and nowhere.json()["error"] == "Not Found"
        bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 22))
        answer = await ada.train(bomb, status=413, **{"content-encoding": "zstd"})
        assert "larger than" in answer["error"]
        packed = zstandard.ZstdCompressor().compress(train_body(model, 1, tokens=[5] * 5000))
        answer = await ada.train(packed, status=413, **{"content-encoding": "zstd"})
        assert "larger than" in answer["error"]
        assert "metrics" in await ada.result(await ada.step(model, 2)), "it holds up no later one"


async def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(waiting=2))
    async with serve(tmp_path / "run", config=config) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        for seq in (2, 3):
            await ada.train(train_body(model, seq))
        response = await ada.send(
            "POST",
            "/api/v1/forward_backward",
            content=train_body(model, 4),
            headers={"content-type": "application/x-protobuf"},
        )
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        repeated = await ada.train(train_body(model, 2))
        assert repeated["model_id"] == model, "what was accepted is not refused when repeated"


async def test_what_one_tenant_has_waiting_is_no_reason_to_refuse_another(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(waiting_mib=0.02))
    tokens = range(1, 250)
    async with serve(tmp_path / "run", config=config, key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        model, other = [await one.model(await one.session()) for one in (ada, bob)]
        answers = [
            await ada.send(
                "POST", "/api/v1/forward_backward", content=train_body(model, seq, tokens),
                headers={"content-type": "application/x-protobuf"},
            )
            for seq in range(2, 12)  # they wait for number 1, which does not come
        ]  # fmt: skip
        assert [answer.status_code for answer in answers[:2]] == [200, 200]
        assert answers[-1].status_code == 429
        assert "more than a tenant's share" in answers[-1].json()["error"]
        await bob.outputs(await bob.train(train_body(other, 1, tokens)))


async def test_what_is_kept_of_a_client_s_own_data_is_bounded(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        large = {"user_metadata": {"k": "x" * (17 << 10)}}
        answer = await ada.post("create_session", large, status=422)
        assert "at most 16 KiB" in answer["error"]
        await ada.post("create_session", {"tags": ["x"] * 101}, status=422)
        session = await ada.session()
        loss = {
            **LOSS,
            "session_id": session,
            "graph": {"note": "x" * (300 << 10)},
        }
        answer = await ada.post("create_custom_loss", loss, status=422)
        assert "at most 256 KiB" in answer["error"]


async def test_an_ended_session_ends_what_waits(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada: Client = served.client()
        session = await ada.session()
        model = await ada.model(session)
        reply = await ada.train(train_body(model, 5))
        finish = {"reason": {"type": "success"}, "detail": "done"}
        await ada.post(f"sessions/{session}/finish", finish, status=204)
        result = await ada.result(reply)
        assert "session ended" in result["error"]
        await ada.post("session_heartbeat", {"session_id": session}, status=410)
        answer = await ada.train(train_body(model, 6), status=400)
        assert "create_training_client_from_state" in answer["error"]


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: add_key(path, name=f"t{number}"), range(40)))
    keys = Keys(path)
    assert [keys.tenant(key) for key in made] == [f"t{number}" for number in range(40)]


def test_keys_are_hashed_and_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.json"
    ada, bob = add_key(path, name="ada"), add_key(path, name="bob")
    keys = Keys(path)
    assert (keys.tenant(ada), keys.tenant(bob), keys.tenant("tml-x")) == ("ada", "bob", None)
    assert ada.startswith("tml-")
    assert ada not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert remove_key(path, name="ada") == 1
    assert keys.tenant(ada) is None
    assert [record["name"] for record in list_keys(path)] == ["bob"]


@pytest.mark.parametrize("text", ["[", '[{"name": "ada"}]'])
async def test_a_key_file_that_is_being_edited_is_waited_for(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    async with serve(tmp_path / "run", key_file=path) as served:
        ada = served.client("ada")
        kept = path.read_text()
        path.write_text(text)
        refused = await ada.post("create_session", {}, status=503)
        assert str(tmp_path) not in refused["error"]
        path.write_text(kept)
        await ada.session()


async def test_whoever_sends_the_most_there_may_be_holds_up_nobody_else(tmp_path: Path) -> None:
    """One tenant has as many of the largest requests waiting as it may, all the time; the other is
    answered after a few calls of the trainer."""
    limits = Limits(body_mib=0.0625, waiting_mib=0.25)
    config = ServiceConfig(poll_s=20.0, limits=limits)
    trainer = HeldTrainer(num_free=1_000_000)
    async with serve(
        tmp_path / "run",
        backend=fake_backend(trainer),
        config=config,
        key_file=tmp_path / "keys.json",
    ) as served:
        greedy, bob = served.client("greedy"), served.client("bob")
        model, own = [await who.model(await who.session()) for who in (greedy, bob)]
        message = ForwardBackwardRequest.FromString(train_body(model, 0, tokens=[5] * 100))
        for _ in range(35):
            message.data.append(message.data[0])
        statuses: Counter[int] = Counter()

        async def send_always() -> None:
            while True:
                message.seq_id = statuses[200] + 1
                body = message.SerializeToString(deterministic=True)
                path = "/api/v1/forward_backward"
                answer = await greedy.send("POST", path, content=body, headers=PROTO)
                statuses[answer.status_code] += 1

        sending = asyncio.create_task(send_always())
        try:
            await until(lambda: statuses[429])
            before = len(trainer.calls)
            await bob.outputs(await bob.train(train_body(own, 1)))
            await bob.result(await bob.step(own, 2))
            assert len(trainer.calls) - before <= 8
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        assert set(statuses) == {200, 429}


class _Untouched(dict[str, StoredSequence]):
    """What another tenant has stored."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a tenant's turn looks at those of another")

    def values(self) -> Any:
        return iter(self)


def test_a_stored_turn_costs_the_same_beside_other_tenants() -> None:
    """The oldest of a tenant's own gives way."""
    state = State()
    state.sequences["bob"] = _Untouched()
    for number in range(MAX_SEQUENCES + 2):
        turn = {"id": f"seq-{number}", "model": "m", "prompt": [1], "tokens": [], "logprobs": []}
        command = Command(
            kind="store_sequence",
            id=f"change-{number}",
            tenant="ada",
            time=float(number),
            body=json.dumps(turn).encode(),
        )
        apply(state, command)
    assert len(state.sequences["ada"]) == MAX_SEQUENCES
    assert next(iter(state.sequences["ada"])) == "seq-2"


# What the operator sees of queues and tenants.


async def test_queues_and_tenants_are_counted(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        model = await ada.model(await ada.session())
        await bob.session()
        await ada.outputs(await ada.train(train_body(model, 1)))
        await ada.train(train_body(model, 3))
        status = read_status(served.service)
        assert [queue.name for queue in status.queues] == ["training", "sampling"]
        assert status.queues[0].tokens_per_s > 0
        by_name = {tenant.name: tenant for tenant in status.tenants}
        assert by_name["ada"].num_pending == 1 and by_name["ada"].num_models == 1
        assert by_name["ada"].tokens["trained"] >= 3
        assert by_name["bob"].num_pending == 0
    page = render_service_page(replace(status, models=("<b>",)))
    assert "ada" in page and "bob" in page
    assert "&lt;b&gt;" in page and "<b>" not in page


async def test_the_root_names_routes_that_are_there(tmp_path: Path) -> None:
    """And no page loads anything from elsewhere."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        index = (await ada.send("GET", "/")).json()
        assert index["name"] == "rookery" and index["version"]
        known = {path: (await ada.send("GET", path)).status_code for path in index["routes"]}
        assert known.pop("/status") == 404, "only this machine is shown it"
        assert set(known.values()) == {200}
        for path in ("/docs", "/redoc"):
            assert (await ada.send("GET", path)).status_code == 404


async def test_names_of_tenants_are_told_to_this_machine_alone(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada = served.client("ada")
        body = {"model": "fake", "prompt": [5], "max_tokens": 2}
        assert (await ada.send("POST", "/v1/completions", json=body)).status_code == 200
        here = await ada.send("GET", "/metrics")
        assert 'rookery_tokens_total{kind="sampled",tenant="ada"} 2.0' in here.text
        elsewhere = await ada.send("GET", "/metrics", headers={"x-forwarded-for": "192.0.2.1"})
        assert "rookery_requests_total" in elsewhere.text and "ada" not in elsewhere.text


# How far sampler and trainer are apart, where data say which samples their targets are of.


PROMPT = (5, 6, 7)
Span = tuple[str, int, int]
"""Its sequence, where it begins there, and its length."""


async def drawn_sequence(client: Client) -> tuple[str, Any]:
    sampler = await client.sampler()
    sample = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(PROMPT)}]},
        "num_samples": 2,
        "sampling_session_id": sampler,
        "seq_id": 4,
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []},
    }
    reply = await client.post("asample", sample)
    return reply["sample_sequence_ids"][1], (await client.samples(reply)).sequences[1]


def spanned_body(model: str, seq: int, tokens: list[int], spans: list[Span]) -> bytes:
    """Targets that are the next tokens, tiled by spans; an empty name is of the prompt."""
    body = train_body(model, seq, tokens=tokens[:-1])
    message = ForwardBackwardRequest.FromString(body)
    [datum] = message.data
    targets = np.asarray(tokens[1:], dtype="<i8")
    datum.loss_fn_inputs["target_tokens"].dense = targets.tobytes()
    for name, offset, length in spans:
        span = datum.loss_fn_input_spans.add()
        own = span.sampled_tokens if name else span.prompt_tokens
        own.sequence_id, own.offset, own.length = name or "any", offset, length
    data: bytes = message.SerializeToString(deterministic=True)
    return data


async def drift(served: Served, client: Client, body: bytes) -> dict[str, float]:
    output = await client.outputs(await client.train(body))
    return {key: value for key, value in output.metrics.items() if key.startswith("kl_")}


async def test_cross_entropy_on_drawn_tokens_tells_the_drift(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        name, sequence = await drawn_sequence(ada)
        drawn = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
        sampled = np.frombuffer(sequence.logprobs, dtype="<f4")
        tokens, spans = [*PROMPT, *drawn], [("", 0, 2), (name, 0, 1), (name, 1, 2)]
        model = await ada.model(await ada.session())
        output = await ada.outputs(await ada.train(spanned_body(model, 1, tokens, spans)))
        trained = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, dtype="<f4")
        gaps = sampled - trained[2:]
        assert output.metrics["kl_sample_train_v1:mean"] == pytest.approx(gaps.mean())
        assert output.metrics["kl_sample_train_v2:mean"] == pytest.approx((gaps**2).mean() / 2)
        other = await bob.model(await bob.session())
        stolen = spanned_body(other, 1, tokens, spans)
        assert not await drift(served, bob, stolen), "a sample of another tenant is not known"
        unknown = [("", 0, 2), (f"{name}9", 0, 3)]
        assert not await drift(served, ada, spanned_body(model, 2, tokens, unknown))
        refused = await ada.train(spanned_body(model, 3, tokens, [(name, 0, 3)]), status=400)
        assert "do not cover" in refused["error"]
