"""Samples over HTTP: the SDK's way, plain, and OpenAI's; checkpoints and downloads."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest
from service.tenants import UPLOAD, crashed_copy, fake_backend, serve, train_body

from rookery.compat.openai.routes import CompletionRequest
from rookery.compat.serving import make_app
from rookery.service.config import Limits, ServiceConfig
from rookery.service.wire import LARGE_BYTES
from rookery.types import SampleRequest

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


async def test_samples_with_all_that_can_be_asked_of_the_prompt(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        sampler = await ada.sampler()
        body: dict[str, Any] = {
            "prompt": PROMPT,
            "num_samples": 2,
            "sampling_session_id": sampler,
            "seq_id": 10**18,
            "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []},
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 1,
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 2,
            "target_prompt_logprobs": {"data": [9, -1], "dtype": "int64", "shape": [2, 1]},
            "prompt_alt_tokens_k": 2,
        }
        reply = await ada.post("asample", body)
        assert reply["sample_sequence_ids"] == [f"{sampler}:{10**18}:{i}" for i in range(2)]
        found = await ada.samples(reply)
    scores = np.frombuffer(found.prompt_logprobs, dtype="<f4")
    assert np.isnan(scores).tolist() == [True, True, False]
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (2, 3)
    targets = np.frombuffer(found.target_prompt_logprobs.dense, dtype="<f4")
    assert np.isnan(targets).tolist() == [False, True]
    assert list(found.prompt_alt_tokens.tokens.shape) == [2, 2]
    assert found.sequences[0].topk_sampled_logprobs.length == 3


async def test_a_sampler_keeps_its_version(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())

        async def save(seq: int) -> str:
            body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            reply = await ada.post("save_weights_for_sampler", body)
            return str((await ada.result(reply))["sampling_session_id"])

        async def draw(sampler: str, seq: int) -> bytes:
            body = {"prompt": PROMPT, "sampling_session_id": sampler, "seq_id": seq}
            body["sampling_params"] = {"max_tokens": 4, "seed": 1}
            tokens: bytes = (await ada.samples(await ada.post("asample", body))).sequences[0].tokens
            return tokens

        old = await save(1)
        before = await draw(old, 0)
        await ada.train(train_body(model, 2))
        await ada.step(model, 3)
        new = await save(4)
        assert await draw(new, 0) != before
        assert await draw(old, 1) == before


async def test_a_poller_is_told_which_samples_are_finished(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        sampler = await ada.sampler()
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        waiting = asyncio.create_task(ada.post("retrieve_futures", {"target": target}))
        await asyncio.sleep(0)
        body = {"prompt": PROMPT, "sampling_session_id": sampler, "seq_id": 0}
        reply = await ada.post("asample", {**body, "sampling_params": {"max_tokens": 2}})
        answer = await waiting
        assert [one["request_id"] for one in answer["completions"]] == [reply["request_id"]]
        of_another_start = {"target": target, "prev_cursor": 7}
        again = await ada.post("retrieve_futures", of_another_start)
        assert again == answer, "cursors do not outlive a restart, what they point to does"


async def test_plain_texts_as_the_document_has_them(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        body = {
            "prompts": ["5 6 7", "8"],
            "sampling_params": {
                "max_tokens": 3,
                "temperature": 0.8,
                "top_p": 0.95,
                "top_k": 40,
                "n": 2,
                "min_p": 0.01,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
            },
        }
        answer = await ada.post("sample", body)
        assert len(answer["completions"]) == len(answer["sequences"]) == 4
        assert answer["prompt_logprobs"] is None
        unknown = await ada.post("sample", {**body, "model_id": "poet"}, status=404)
        assert "There are: fake" in unknown["error"]
        wrong = {"prompts": ["5"], "sampling_params": {"frequency_penalty": 3}}
        assert "frequency_penalty" in (await ada.post("sample", wrong, status=422))["error"]


async def test_adapters_are_registered_listed_and_removed(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        registered = await ada.post("adapters", UPLOAD, status=201)
        listed = (await ada.send("GET", "/api/v1/adapters")).json()
        assert listed == [registered]
        assert (registered["adapter_id"], registered["lora_path"]) == ("poet", "upload")
        info = await ada.post("weights_info", {"tinker_path": registered["tinker_path"]})
        assert info["lora_rank"] == 4
        body = {"prompts": ["5 6"], "sampling_params": {"max_tokens": 4, "seed": 2}}
        poet = await ada.post("sample", {**body, "model_id": "poet"})
        assert poet["completions"] != (await ada.post("sample", body))["completions"]
        await bob.post("sample", {**body, "model_id": "poet"}, status=404)
        outside = await ada.post("adapters", {"adapter_id": "x", "lora_path": "/etc"}, status=400)
        assert "operator lists" in outside["error"]
        for text in ("?", "\u00e9"):
            wrong = await ada.post("adapters", {**UPLOAD, "adapter_model": text}, status=400)
            assert "not base64" in wrong["error"]
        assert (await ada.send("DELETE", "/api/v1/adapters/poet")).status_code == 204
        await ada.post("sample", {**body, "model_id": "poet"}, status=404)
        await ada.post("weights_info", {"tinker_path": registered["tinker_path"]}, status=404)
        session = await ada.session()
        of_session = {**UPLOAD, "session_id": session}
        await bob.post("adapters", of_session, status=404)
        await ada.post("adapters", of_session, status=201)
        await ada.post("adapters", {**UPLOAD, "adapter_id": "mine"}, status=201)
        await ada.send("POST", f"/api/v1/sessions/{session}/finish", json={})
        [left] = (await ada.send("GET", "/api/v1/adapters")).json()
        assert left["adapter_id"] == "mine", "an adapter of a session ends with it"
        await ada.post("adapters", of_session, status=410)


async def test_openai_clients_are_served(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        names = (await ada.send("GET", "/v1/models")).json()
        assert [row["id"] for row in names["data"]] == ["fake"]
        body = {"model": "fake", "prompt": ["5 6", "7"], "max_tokens": 2, "logprobs": 1, "n": 2}
        answer = (await ada.send("POST", "/v1/completions", json=body)).json()
        assert len(answer["choices"]) == 4
        assert answer["choices"][3]["prompt_token_ids"] == [7]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
        chat = {
            "model": "fake",
            "messages": [{"role": "user", "content": "5 6"}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
        }
        answer = (await ada.send("POST", "/v1/chat/completions", json=chat)).json()
        [choice] = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert len(choice["logprobs"]["content"]) == 2
        nothing = {"best_of": 1, "echo": False, "logit_bias": {}, "suffix": None, "user": "ada"}
        body = {"model": "fake", "prompt": [5], "max_tokens": 4, "seed": 3}
        plain = await ada.send("POST", "/v1/completions", json=body)
        same = await ada.send("POST", "/v1/completions", json={**body, **nothing})
        assert same.json()["choices"] == plain.json()["choices"], "options that ask for nothing"


async def test_exports_are_downloaded_and_encrypted_if_asked(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())

        async def export(seq: int, name: str, **more: Any) -> dict[str, str]:
            body = {"model_id": model, "seq_id": seq, "path": name, **more}
            result = await ada.result(await ada.post("save_weights_external", body))
            assert result["path"] == f"tinker://{model}/external_weights/{name}"
            item = f"/api/v1/training_runs/{model}/checkpoints/external_weights/{name}"
            urls = (await ada.send("GET", f"{item}/external_weights_urls")).json()["urls"]
            return dict(urls)

        plain = await export(1, "plain")
        assert (await ada.send("GET", plain["value.json"])).text == "0.0"
        forged = plain["value.json"].replace("value.json", "../state")
        assert (await ada.send("GET", forged)).status_code == 404
        recipients = [str(identity.to_public())]
        sealed = await export(2, "sealed", age_encryption_recipients=recipients)
        content = (await ada.send("GET", sealed["value.json.age"])).content
        assert pyrage.decrypt(content, [identity]) == b"0.0"
        wrong = {"model_id": model, "seq_id": 3, "path": "x"}
        wrong["age_encryption_recipients"] = ["nobody"]
        await ada.post("save_weights_external", wrong, status=400)


async def test_exports_are_neither_sampled_from_nor_trained_on(tmp_path: Path) -> None:
    """A merged one has no adapter, and an encrypted one none that can be read here."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        model, other = await ada.model(session), await ada.model(session, 1)
        save = {"model_id": model, "seq_id": 1, "path": "whole", "merged": True}
        path = (await ada.result(await ada.post("save_weights_external", save)))["path"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        for route, body in {
            "create_sampling_session": sampler,
            "sample": {"prompts": [[5]], "model_id": path},
            "load_weights": {"model_id": other, "seq_id": 1, "path": path},
        }.items():
            refused = await ada.post(route, body, status=400)
            assert "is there to be downloaded" in refused["error"]


async def test_checkpoints_are_listed_expire_and_are_not_overwritten(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        model = await ada.model(session)
        save = {"model_id": model, "path": "ck", "ttl_seconds": 3600}
        await ada.result(await ada.post("save_weights", {**save, "seq_id": 1}))
        taken = await ada.result(await ada.post("save_weights", {**save, "seq_id": 2}))
        assert "already" in taken["error"]
        again = {**save, "seq_id": 3, "overwrite": True}
        path = (await ada.result(await ada.post("save_weights", again)))["path"]
        listed = (await ada.send("GET", "/api/v1/checkpoints")).json()
        assert [row["checkpoint_id"] for row in listed["checkpoints"]] == ["weights/ck"]
        assert listed["checkpoints"][0]["expires_at"] is not None
        other = await ada.model(session, 1)
        load = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
        assert (await ada.result(await ada.post("load_weights", load)))["path"] == path
        runs = (await ada.send("GET", "/api/v1/training_runs")).json()["training_runs"]
        assert {row["training_run_id"] for row in runs} == {model, other}
        archive = f"/api/v1/training_runs/{model}/checkpoints/weights/ck/archive"
        moved = await ada.send("GET", archive)
        assert moved.status_code == 302
        assert b"value.json" in (await ada.send("GET", moved.headers["location"])).content


async def test_turns_of_a_chat_are_kept_to_train_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    chat = {
        "model": "fake",
        "messages": [{"role": "user", "content": "5 6"}],
        "max_tokens": 3,
        "n": 2,
        "store": True,
    }
    async with serve(tmp_path / "run", key_file=keys) as served:
        ada, bob = served.client("ada"), served.client("bob")
        answer = (await ada.send("POST", "/v1/chat/completions", json=chat)).json()
        first, second = [choice["sequence_id"] for choice in answer["choices"]]
        place = f"/api/v1/sequences/{first}"
        assert (await bob.send("GET", place)).status_code == 404
        assert (await bob.send("DELETE", place)).status_code == 404
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        key = ada.key
    async with serve(killed, key_file=keys) as served:
        ada = served.client("ada")
        ada.key = key
        stored = (await ada.send("GET", place)).json()
        tokens = answer["choices"][0]["token_ids"]
        assert (stored["prompt"], stored["tokens"]) == ([5, 6], tokens)
        datum = stored["datum"]
        assert datum["tokens"] == [5, 6, *tokens[:-1]]
        assert datum["target_tokens"] == [6, *tokens]
        assert datum["weights"] == [0.0, 1.0, 1.0, 1.0]
        assert datum["logprobs"] == [0.0, *stored["logprobs"]]
        assert (await ada.send("DELETE", place)).status_code == 204
        left = (await ada.send("GET", "/api/v1/sequences")).json()
        assert [row["id"] for row in left["sequences"]] == [second]


async def test_samples_are_drawn_from_training_checkpoints_and_the_last_are_kept(
    tmp_path: Path,
) -> None:
    config = ServiceConfig(poll_s=20.0, keep_last=2)
    async with serve(tmp_path / "run", config=config) as served:
        ada = served.client()
        session = await ada.session()
        model = await ada.model(session)
        paths = [await ada.save(model, seq, f"ck{seq}") for seq in range(1, 4)]
        body = {"session_id": session, "sampling_session_seq_id": 0}
        await ada.post("create_sampling_session", {**body, "model_path": paths[0]}, status=404)
        made = await ada.post("create_sampling_session", {**body, "model_path": paths[2]})
        sample = {"prompt": PROMPT, "sampling_session_id": made["sampling_session_id"], "seq_id": 0}
        sample["sampling_params"] = {"max_tokens": 2}
        assert len((await ada.samples(await ada.post("asample", sample))).sequences) == 1


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [[5]] * 9}, "asks for 9 samples; at most 8"),
    ("/v1/completions", {"prompt": [[5], [6]], "n": 5}, "asks for 10 samples"),
    ("/v1/completions", {"prompt": [5], "echo": True}, "echo is not supported"),
    ("/v1/completions", {"prompt": [5], "best_of": 3}, "best_of is not supported"),
    ("/v1/completions", {"prompt": [5], "logit_bias": {"7": -100}}, "logit_bias is not supported"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "5"}], "functions": [{"name": "add"}]},
        "functions is not supported",
    ),
    ("/v1/completions", {"prompt": [5], "tools": [{"type": "function"}]}, "tools is not supported"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "5"}], "tool_choice": "required"},
        "there are no tools",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "needs content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "5"}], "n": 9}, "9 sam"),
    ("/api/v1/sample", {"prompts": [[5]] * 9}, "asks for 9 samples"),
    ("/api/v1/sample", {"prompts": [[5]], "num_samples": 9}, "asks for 9 samples"),
    (
        "/api/v1/sample",
        {"prompt": {"chunks": [{"type": "image", "data": "aa"}, {"tokens": [5]}]}},
        "takes encoded_text",
    ),
]


async def test_plain_requests_that_cannot_be_done_as_written_are_refused(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(samples=8))
    async with serve(tmp_path / "run", config=config) as served:
        for path, body, sentence in IMPOSSIBLE:
            answer = await served.client().send("POST", path, json={"model": "fake", **body})
            assert answer.status_code in (400, 422)
            assert sentence in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "5"}]}),
        ("/api/v1/sample", {"prompts": ["5"], "padding": "x" * LARGE_BYTES}),
    ],
    ids=["chat", "large"],
)
async def test_nothing_is_drawn_for_a_client_that_has_gone(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    backend, begun, ended = fake_backend(), asyncio.Event(), asyncio.Event()

    async def draw_for_ever(requests: Sequence[SampleRequest]) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    backend.engine.sample = draw_for_ever  # type: ignore[method-assign]
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-api-key", b"tml-any")],
    }  # fmt: skip
    received = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    async with serve(tmp_path / "run", backend=backend) as served, asyncio.timeout(30):
        await make_app(served.service, keys=None)(scope, receive, send)
        assert ended.is_set()


def test_openai_options_of_vllm_reach_the_engine() -> None:
    body = CompletionRequest(model="fake", prompt=[5], ignore_eos=True, stop_token_ids=[7])
    params = body.params(max_tokens=4, seed=0, top_logprobs=0)
    assert (params.ignore_eos, params.stop_tokens) == (True, (7,))
