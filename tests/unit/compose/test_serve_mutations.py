"""Mutated requests of one tenant beside a well-behaved one, over a real model: whatever is accepted
gets a result or an error of its own, the other tenant's numbers are those it gets alone, and a
restart goes on."""

import asyncio
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from compose.served_model import served_model
from marks import long
from service.tenants import PROTO, Client, crashed_copy, loss_body, train_body

from rookery.service.config import Limits, ServiceConfig

CONFIG = ServiceConfig(poll_s=40.0, gap_s=0.001, limits=Limits(samples=8))
DEEP = {depth: "[" * depth + "]" * depth for depth in (60, 130, 220, 400, 900, 40_000)}
RAW = {
    "NaN": "NaN",
    "inf": "-Infinity",
    "1e999": "1e999",
    "int400": "9" * 400,
    "int5000": "9" * 5000,
    "half": '"\\ud800"',
    "zero": '"\\u0000"',
    **{f"deep{depth}": text for depth, text in DEEP.items()},
    **{f"dict{depth}": '{"a":' * depth + "1" + "}" * depth for depth in (100, 220, 400)},
}
"""What `json.dumps` does not write, by the names that stand for it."""
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e-320, 1e308,
    "", "x", "x" * 70_000, "é\U0001f600", "../..", [], [[]], [None], [1, "a"], [[1], [1, 2]],
    [2**40] * 3, [-1], list(range(300)), [0.1] * 300, {}, {"type": "x"}, {"": {}},
    *(f"@@{name}@@" for name in RAW),
]  # fmt: skip


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


def mutated(rng: random.Random, document: dict[str, Any]) -> bytes:
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        if found := list(places(document)):
            owner, key = rng.choice(found)
            match rng.randrange(8):
                case 0:
                    del owner[key]
                case 1 if isinstance(owner, list):
                    owner *= rng.choice((2, 40))
                case _:
                    owner[key] = deepcopy(rng.choice(ODD))
    if rng.random() < 0.2:
        document[rng.choice(("extra", "optimizer_params", "user_metadata"))] = rng.choice(ODD)
    text = json.dumps(document)
    for name, raw in RAW.items():
        text = text.replace(f'"@@{name}@@"', raw)
    if rng.random() < 0.1:  # a key that is there twice
        text = text.replace("{", '{"model_id": "other", "seq_id": 7, "data": null, ', 1)
    data = text.encode()
    return data[: rng.randrange(len(data))] if rng.random() < 0.03 else data


def flipped(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def tensor(values: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {
            "op": "call_method",
            "name": "loss",
            "target": "sum",
            "args": [{"ref": "logprobs"}],
            "kwargs": {},
        },
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}],
            "kwargs": {},
        },
    ],
}


def requests_of(names: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """One right request for each route."""
    model, session, sampler = names["model"], names["session"], names["sampler"]
    inputs = {
        "target_tokens": tensor([6, 7, 8], "int64"),
        "weights": tensor([1.0, 0.5, 1.0], "float32"),
    }
    datum = {"model_input": {"chunks": [{"tokens": [5, 6, 7]}]}, "loss_fn_inputs": inputs}
    policy = {**inputs, "logprobs": tensor([-1.0] * 3, "float32")}
    policy["advantages"] = policy.pop("weights")
    drawn = {"model_input": {"chunks": [{"tokens": [5, 6, 7]}]}, "loss_fn_inputs": policy}
    clips = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    record = {
        "tokens": [5, 6, 7],
        "positions": [1, 2],
        "targets": [7, 8],
        "weights": [1.0, 1.0],
        "advantages": [1.0, -1.0],
        "sampled_logprobs": [-1.0, -1.0],
        "kept": [[7, 9], [8]],
        "inputs": {"a": [1.0]},
    }
    options = {"max_tokens": 2, "seed": 3, "temperature": 1.0, "top_k": 5, "stop": ["x"]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    sample = {"prompt": prompt, "sampling_session_id": sampler, "sampling_params": options}
    loss = {"data": [datum, datum], "loss_fn": "cross_entropy"}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1.0}
    return [
        ("/api/v1/forward_backward", {"model_id": model, "forward_backward_input": loss}),
        ("/api/v1/forward", {"model_id": model, "forward_input": loss}),
        (
            "/api/v1/forward_backward",
            {
                "model_id": model,
                "forward_backward_input": {
                    "data": [drawn],
                    "loss_fn": "ppo",
                    "loss_fn_config": clips,
                },
            },
        ),
        (
            "/api/v1/forward_backward",
            {
                "model_id": model,
                "train_request": {
                    "data": [record],
                    "loss": "importance_sampling",
                    "loss_options": {},
                },
            },
        ),
        (
            "/api/v1/optim_step",
            {"model_id": model, "adam_params": adam, "optimizer_params": {"a": [1]}},
        ),
        ("/api/v1/save_weights", {"model_id": model, "path": "ck", "overwrite": True}),
        ("/api/v1/save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 3}),
        ("/api/v1/load_weights", {"model_id": model, "path": names["path"], "optimizer": True}),
        (
            "/api/v1/create_model",
            {
                "session_id": session,
                "model_seq_id": 99,
                "base_model": "fake",
                "lora_config": {"rank": 2, "seed": 3},
                "user_metadata": {"a": 1},
            },
        ),
        (
            "/api/v1/create_custom_loss",
            {
                "session_id": session,
                "custom_loss_seq_id": 0,
                "inputs": [{"name": "logprobs", "rank": 1}],
                "graph": GRAPH,
            },
        ),
        ("/api/v1/check_loss", {"loss": "ppo", "options": {"clip_low": 0.2}}),
        ("/api/v1/asample", {**sample, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}),
        ("/api/v1/asample", {**sample, "prompt_logprobs": True, "prompt_alt_tokens_k": 2}),
        (
            "/api/v1/asample",
            {**sample, "target_prompt_logprobs": {"tokens": tensor([7, 8], "int64")}},
        ),
        (
            "/api/v1/score",
            {
                "sampling_session_id": sampler,
                "tokens": [5, 6, 7],
                "start": 1,
                "labels": [4, 5],
                "top_logprobs": 2,
            },
        ),
        ("/api/v1/sample", {"prompts": [[5, 6]], "sampling_params": {"max_tokens": 2, "n": 2}}),
        ("/v1/completions", {"model": "fake", "prompt": [5, 6], "max_tokens": 2, "logprobs": 2}),
    ]


def proto_of(rng: random.Random, model: str) -> bytes:
    kinds: list[bytes] = [
        train_body(model, 0),
        loss_body(model, 0, "cross_entropy", {"tokens": [5], "target_tokens": [96]}),
        loss_body(
            model,
            0,
            "ppo",
            {
                "tokens": [5, 6],
                "target_tokens": [6, 7],
                "logprobs": [rng.choice((-1.0, 3e38, float("nan"))), -1.0],
                "advantages": [rng.choice((1.0, 3e38, -3e38)), 1.0],
            },
            clip_low_threshold=rng.choice((0.8, -1.0, float("nan"), 1e300)),
        ),
        loss_body(model, 0, "custom", {"tokens": [5], "target_tokens": [6]}, loss_id="none"),
        train_body(model, 0, tokens=[rng.choice((0, 96, 97, 2**31 - 2, -5))] * 3),
    ]
    return flipped(rng, rng.choice(kinds))


class Attacker:
    """Sends mutated requests, and remembers what was accepted."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self.client = client
        self._rng = rng
        self._num_models = 0
        self._names: dict[str, str] = {}
        self.accepted: list[dict[str, Any]] = []

    async def begin(self) -> None:
        session = await self.client.session()
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
        reply = await self.client.post("create_sampling_session", sampler)
        self._names = {"session": session, "sampler": reply["sampling_session_id"]}

    async def new_model(self) -> None:
        """An odd number that was accepted holds the later requests of its model up."""
        model = await self.client.model(self._names["session"], self._num_models)
        save = {"model_id": model, "path": "start"}
        saved = await self.client.result(await self.client.post("save_weights", save))
        self._names |= {"model": model, "path": saved["path"]}
        self._num_models += 1

    async def attack(self) -> None:
        rng = self._rng
        if rng.random() < 0.2:
            path, headers = "/api/v1/forward_backward", PROTO
            body = proto_of(rng, self._names["model"])
        else:
            path, document = rng.choice(requests_of(self._names))
            headers, body = {"content-type": "application/json"}, mutated(rng, document)
        answer = await self.client.send("POST", path, content=body, headers=headers)
        assert answer.status_code < 500, (path, body[:3000], answer.text)
        document = answer.json() if answer.content else {}
        if answer.status_code == 200 and "request_id" in document:
            self.accepted.append({**document, "body": (path, body[:3000])})

    async def check(self) -> None:
        """Whatever was accepted has a result, or an error that is its own."""
        for reply in self.accepted:
            answer = await self.client.retrieve(reply["request_id"])
            assert answer.status_code == 200, (reply, answer.text)


class Neighbour:
    """Trains as if it were alone."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._seq = 0
        self.losses: list[float] = []

    async def begin(self) -> None:
        self._session = await self.client.session()
        self._model = await self.client.model(self._session)

    async def train(self) -> None:
        gradients = await self.client.train(train_body(self._model, self._seq + 1))
        stepped = await self.client.step(self._model, self._seq + 2, rate=1e-2)
        self._seq += 2
        self.losses.append((await self.client.outputs(gradients)).metrics["loss:sum"])
        assert "metrics" in await self.client.result(stepped)

    async def step(self, *, num: int) -> None:
        assert "metrics" in await self.client.result(await self.client.step(self._model, num))

    async def sample(self) -> None:
        body = {"prompts": [[5, 6]], "sampling_params": {"max_tokens": 2, "seed": 1}}
        answer = await self.client.post("sample", body)
        assert len(answer["sequences"]) == 1

    async def work(self) -> None:
        await asyncio.gather(self.train(), self.sample())


async def fight(tmp_path: Path, model: Path, *, seed: int, rounds: int) -> None:
    """Rounds of mutated requests beside the neighbour's, with a kill in the middle."""
    rng, keys, folder = random.Random(seed), tmp_path / "keys.json", tmp_path / "run"
    rest: dict[str, Any] = {"config": CONFIG, "key_file": keys}
    async with served_model(folder, model, **rest) as served:
        attacker = Attacker(served.client("mallory"), rng)
        neighbour = Neighbour(served.client("bob"))
        await attacker.begin()
        await neighbour.begin()
        for _ in range(rounds):
            await attacker.new_model()
            attacks = [attacker.attack() for _ in range(8)]
            await asyncio.gather(*attacks, neighbour.work())
        await served.service.clean_up()  # gives up what waits for numbers that never come
        crashed_copy(folder, tmp_path / "killed")
        await attacker.check()
        alone = Neighbour(served.client("cyd"))
        await alone.begin()
        for _ in range(rounds):
            await alone.work()
        assert neighbour.losses == alone.losses
    for place in ("killed", "run"):
        async with served_model(tmp_path / place, model, **rest) as served:
            attacker.client = served.client("mallory")
            await attacker.check()
            neighbour.client = served.client("bob")
            await neighbour.step(num=2 * rounds + 1)


async def test_mutated_requests_hurt_nobody_else(tmp_path: Path, tiny_folder: Path) -> None:
    await fight(tmp_path, tiny_folder, seed=1, rounds=2)


@long
@pytest.mark.parametrize("seed", range(2, 8))
async def test_many_mutated_requests_hurt_nobody_else(
    tmp_path: Path, tiny_folder: Path, seed: int
) -> None:
    await fight(tmp_path, tiny_folder, seed=seed, rounds=20)
