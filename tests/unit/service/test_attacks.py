"""Two tenants against each other: whatever one sends, the other keeps what it has, and the answer
is a sentence, never a 500."""

import errno
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from service.tenants import (
    PROTO,
    UPLOAD,
    Client,
    FakeEngine,
    FakeFolders,
    crashed_copy,
    fake_backend,
    serve,
)

from rookery.errors import AdapterError
from rookery.service.app import FILES
from rookery.service.config import ServiceConfig
from rookery.types import ModelRef

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


async def belongings(ada: Client) -> dict[str, str]:
    """One of everything, by the letter that the attacks name it with."""
    session = await ada.session()
    model = await ada.model(session)
    path, sampler_id = await ada.save(model, 1, "ck"), await ada.sampler(session)
    body = {"prompt": PROMPT, "sampling_session_id": sampler_id, "seq_id": 0}
    request = await ada.post("asample", {**body, "sampling_params": {"max_tokens": 2}})
    adapter = await ada.post("adapters", UPLOAD, status=201)
    return {
        "$session": session,
        "$model": model,
        "$path": path,
        "$sampler": sampler_id,
        "$request": request["request_id"],
        "$adapter": adapter["tinker_path"],
        "$item": f"training_runs/{model}/checkpoints/weights/ck",
    }


def fill(value: Any, names: dict[str, str]) -> Any:
    text = json.dumps(value)
    for name, real in names.items():
        text = text.replace(name, real)
    return json.loads(text)


FOREIGN: list[tuple[str, str, Any]] = [
    ("POST", "session_heartbeat", {"session_id": "$session"}),
    ("POST", "sessions/$session/finish", {}),
    ("GET", "sessions/$session", None),
    ("POST", "create_model", {"session_id": "$session", "model_seq_id": 1, "base_model": "fake"}),
    ("POST", "get_info", {"model_id": "$model"}),
    ("POST", "unload_model", {"model_id": "$model"}),
    ("POST", "optim_step", {"model_id": "$model", "seq_id": 2, "adam_params": {}}),
    ("POST", "save_weights", {"model_id": "$model", "seq_id": 2, "path": "mine"}),
    ("POST", "save_weights_for_sampler", {"model_id": "$model", "seq_id": 2, "path": "mine"}),
    ("POST", "save_weights_external", {"model_id": "$model", "seq_id": 2, "path": "mine"}),
    ("POST", "weights_info", {"tinker_path": "$path"}),
    ("POST", "weights_info", {"tinker_path": "$adapter"}),
    ("POST", "copy_weights", {"source_path": "$path", "session_id": "$own", "model_seq_id": 7}),
    ("POST", "load_weights", {"model_id": "$mine", "seq_id": 1, "path": "$path"}),
    ("GET", "samplers/$sampler", None),
    ("DELETE", "samplers/$sampler", None),
    ("POST", "join_sampling_session", {"sampling_session_id": "$sampler"}),
    ("POST", "asample", {"prompt": PROMPT, "sampling_session_id": "$sampler", "seq_id": 1}),
    ("POST", "score", {"sampling_session_id": "$sampler", "tokens": [5, 6]}),
    ("POST", "retrieve_future", {"request_id": "$request"}),
    ("POST", "retrieve_futures", {"target": {"sampling_session_id": "$sampler"}}),
    ("POST", "cancel_future", {"request_id": "$request"}),
    ("GET", "training_runs/$model", None),
    ("GET", "training_runs/$model/checkpoints", None),
    ("DELETE", "$item", None),
    ("POST", "$item/publish", None),
    ("PUT", "$item/ttl", {"ttl_seconds": 3600}),
    ("GET", "$item/archive", None),
    ("GET", "$item/external_weights_urls", None),
    ("DELETE", "adapters/poet", None),
    ("POST", "sample", {"prompts": ["5"], "model_id": "poet"}),
    ("POST", "sample", {"prompts": ["5"], "model_id": "$path"}),
]


async def test_nothing_of_another_tenant_is_reached(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        names = await belongings(ada)
        own = await bob.session()
        names |= {"$own": own, "$mine": await bob.model(own)}
        for method, path, body in FOREIGN:
            response = await bob.send(
                method, f"/api/v1/{fill(path, names)}", json=fill(body, names)
            )
            assert response.status_code == 404, (method, path, response.text)
        assert (await ada.send("GET", f"/api/v1/{names['$item']}/archive")).status_code == 302
        assert (await ada.retrieve(names["$request"])).status_code == 200
        stepped = await ada.result(await ada.step(names["$model"], 2))
        assert stepped["metrics"] == {"value:mean": 0.0}, "nobody trained it meanwhile"


async def test_links_are_good_after_a_restart_and_cannot_be_forged(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        names = await belongings(ada)
        item = f"/api/v1/{names['$item']}"
        urls = (await ada.send("GET", f"{item}/external_weights_urls")).json()["urls"]
        link = urls["value.json"]
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        ada = served.client()
        assert (await ada.send("GET", link)).text == "0.0"
        token = link.split("/")[-2]
        digest, expires, signature = token.split("-")
        for forged in (
            f"{digest}-{int(expires) + 9}-{signature}",
            f"{'0' * 64}-{expires}-{signature}",
            f"{digest}-{expires}-{signature[:-1]}x",
            "x",
            "--",
        ):
            assert (await ada.send("GET", link.replace(token, forged))).status_code == 404
        above = ("../state", "..%2fstate", "%2e%2e/state", "/etc/passwd", "adapter")
        for file in (*above, "a%00b", "x" * 300, "a/" * 3000):
            answer = await ada.send("GET", link.replace("value.json", file))
            assert answer.status_code == 404, file


@pytest.mark.parametrize("name", ["a/" * 3000, "locked"])
async def test_a_path_that_cannot_be_read_is_refused_with_a_sentence(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapters"
    (folder / "locked").mkdir(parents=True)
    for file in FILES:
        (folder / "locked" / file).write_bytes(b"{}")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    config = ServiceConfig(adapter_folders=(folder,))
    async with serve(tmp_path / "run", config=config) as served:
        upload = {"adapter_id": "poet", "lora_path": str(folder / name)}
        answer = await served.client().post("adapters", upload, status=400)
        assert "cannot be read" in answer["error"]


class PickyFolders(FakeFolders):
    """Refuses adapters as the real one does: with where they are."""

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        raise AdapterError(f"{folder / FILES[1]} holds no tensors.")


async def test_no_path_of_the_server_is_told(tmp_path: Path) -> None:
    backend = fake_backend()
    engine, trainer = FakeEngine(), backend.trainer

    async def refuse(trainee: str, start: object) -> None:
        raise AdapterError(f"{start}: its layers do not fit.")

    async with serve(
        tmp_path / "run", backend=replace(backend, folders=PickyFolders(engine))
    ) as served:
        ada = served.client()
        refused = await ada.post("adapters", UPLOAD, status=400)
        assert "adapter_model.safetensors holds no tensors" in refused["error"]
        model = await ada.model(session := await ada.session())
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        await ada.result(await ada.post("save_weights_for_sampler", save))
        body = {"prompt": PROMPT, "sampling_session_id": f"{session}:sample:0", "seq_id": 0}
        drawn = await ada.result(await ada.post("asample", body))
        assert "holds no tensors" in drawn["error"]
        await ada.result(await ada.post("save_weights", {"model_id": model, "path": "ck"}))
        trainer.create = refuse  # type: ignore[attr-defined]
        load = {"model_id": model, "path": f"tinker://{model}/weights/ck"}
        loaded = await ada.result(await ada.post("load_weights", load))
        assert "do not fit" in loaded["error"]
    for answer in (refused, drawn, loaded):
        assert str(tmp_path) not in json.dumps(answer)


NOTHING: list[tuple[bytes, dict[str, str]]] = [
    (pickle.dumps({"model_id": "x"}), {"content-type": "application/python-pickle"}),
    (pickle.dumps([1, 2]), PROTO),
    (b"\xff" * 100, PROTO),
    (b"[" * 100_000, {"content-type": "application/json"}),
    (b'{"model_id": NaN}', {"content-type": "application/json"}),
    (b"null", {"content-type": "application/json"}),
    (b'{"train_request": {"data": [{}]}, "model_id": 3}', {"content-type": "application/json"}),
    (b"\x28\xb5\x2f\xfd\xff\xff\xff", {**PROTO, "content-encoding": "zstd"}),
    (b"", {**PROTO, "content-encoding": "gzip"}),
    (
        zstandard.ZstdCompressor().compress(pickle.dumps(3)),
        {**PROTO, "content-encoding": "zstd"},
    ),
]


async def test_bodies_that_are_nothing_are_refused(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        for content, headers in NOTHING:
            for path in ("forward_backward", "forward", "optim_step", "asample", "create_session"):
                response = await ada.send(
                    "POST", f"/api/v1/{path}", content=content, headers=headers
                )
                is_refused = 400 <= response.status_code < 500
                assert is_refused or path == "create_session", (path, response.text)
                assert response.status_code < 500
            assert (await ada.session()).startswith("session-")


HALF = '"\\ud800"'
DEEP = "[" * 300 + "]" * 300
DATUM = """{"model_input": {"chunks": [{"tokens": %s}]},
"loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64"}}}"""
STEP = '{"model_id": "M", "seq_id": 1, "adam_params": {}, "optimizer_params": {"a": %s}}'
FORWARD = '{"model_id": "M", "seq_id": 1, "forward_backward_input": {"data": [%s], "loss_fn": %s}}'


UNKEPT: list[tuple[str, str | bytes, str]] = [
    ("/api/v1/create_session", f'{{"tags": [{HALF}]}}', "half of a character"),
    ("/api/v1/create_session", f'{{"user_metadata": {{"k": {DEEP}}}}}', "cannot be stored"),
    ("/api/v1/create_session", b'{"sdk_version": "\xed\xa0\x80"}', "half of a character"),
    ("/api/v1/sample", f'{{"prompts": [{HALF}]}}', "half of a character"),
    ("/v1/completions", f'{{"model": "fake", "prompt": {HALF}}}', "half of a character"),
    ("/tokenize", f'{{"prompt": {HALF}}}', "half of a character"),
    ("/v1/unload_lora_adapter", f'{{"lora_name": {HALF}}}', "half of a character"),
    ("/v1/load_lora_adapter", '{"lora_name": "a", "lora_path": "\\u0000"}', "null character"),
    ("/api/v1/optim_step", STEP % ("[" * 220 + "]" * 220), "nested too deeply"),
    ("/api/v1/forward_backward", FORWARD % (DATUM % "[1]", HALF), "half of a character"),
    ("/api/v1/forward_backward", FORWARD % (DATUM % "5", '"cross_entropy"'), "not a datum"),
    ("/api/v1/forward_backward", FORWARD % (DATUM % "[[5]]", '"cross_entropy"'), "not a datum"),
]


async def test_text_that_cannot_be_kept_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        for path, body, sentence in UNKEPT:
            model = await ada.model(await ada.session())
            content = body.replace('"M"', f'"{model}"').encode() if isinstance(body, str) else body
            headers = {"content-type": "application/json"}
            response = await ada.send("POST", path, content=content, headers=headers)
            assert response.status_code in (400, 422), response.text
            assert sentence in response.json()["error"]
            whole = {"tags": ["\U0001f600", "\ud7a3"]}  # both have the bytes of a half somewhere
            assert "session_id" in await ada.post("create_session", whole)
