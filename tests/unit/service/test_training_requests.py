"""Training over HTTP: order, exactly once, one pass for many models, failures."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.jobs import until
from service.tenants import crashed_copy, fake_backend, loss_body, serve, train_body

from rookery.service.config import ServiceConfig
from rookery.service.drawing import BlobResidency
from rookery.service.records import Model
from rookery.service.work import Backend
from rookery.testing import FakeTrainer
from rookery.types import ModelRef, TrainOutput, TrainRequest


def trainer_of(backend: Backend) -> FakeTrainer:
    assert isinstance(backend.trainer, FakeTrainer)
    return backend.trainer


async def test_gradients_and_a_step_come_back(tmp_path: Path) -> None:
    backend = fake_backend()
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1, forward_only=True)))
        first = await ada.train(train_body(model, 2, weights=[0.0, 1.0, 2.0]))
        output = await ada.outputs(first)
        stepped = await ada.result(await ada.step(model, 3, rate=0.5))
    [record] = output.loss_fn_outputs
    logprobs = np.frombuffer(record.fields["logprobs"].data, dtype="<f4")
    assert len(logprobs) == 3, "every position has its log-probability, weight 0 too"
    assert np.isclose(output.metrics["loss:sum"], -(logprobs * [0.0, 1.0, 2.0]).sum())
    assert stepped["metrics"] == {"value:mean": 1.5}, "a forward pass adds no gradient"


async def test_chunks_are_done_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    backend = fake_backend()
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        step = await ada.step(model, 3)
        second = await ada.train(train_body(model, 2, weights=[0.0, 0.0, 10.0]))
        pending = asyncio.create_task(ada.retrieve(second["request_id"]))
        await asyncio.sleep(0)
        assert trainer_of(backend).trainees[model].num_steps == 0
        first = await ada.train(train_body(model, 1))
        assert (await pending).status_code == 200
        assert (await ada.result(step))["metrics"]["value:mean"] == 13.0
        assert (await ada.retrieve(first["request_id"])).status_code == 200


async def test_a_repeated_request_is_done_once(tmp_path: Path) -> None:
    backend = fake_backend()
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        body = train_body(model, 1)
        replies = await asyncio.gather(*(ada.train(body) for _ in range(5)))
        assert len({reply["request_id"] for reply in replies}) == 1
        step = await ada.result(await ada.step(model, 2))
        assert step["metrics"]["value:mean"] == 3.0, "three weights of one, added once"
        other = await ada.train(train_body(model, 1, tokens=(9, 9)), status=400)
        assert "was sent before with another content" in other["error"]


async def test_models_share_a_call_of_the_trainer(tmp_path: Path) -> None:
    backend = fake_backend()
    calls: list[int] = []
    trainer = trainer_of(backend)
    plain = trainer.forward_backward
    api = asyncio.Event()

    async def slow(requests):  # type: ignore[no-untyped-def]
        calls.append(len(requests))
        await api.wait()
        return await plain(requests)

    async with serve(tmp_path / "run", backend=backend) as served:
        tenants = [served.client() for _ in range(4)]
        models = [await one.model(await one.session()) for one in tenants]
        trainer.forward_backward = slow  # type: ignore[method-assign]
        bodies = [train_body(model, 1) for model in models]
        replies = [await one.train(body) for one, body in zip(tenants, bodies, strict=True)]
        api.set()
        for one, reply in zip(tenants, replies, strict=True):
            await one.outputs(reply)
    assert calls == [1, 3], "those that came while the first was computed go together"


async def test_a_failed_request_touches_no_other(tmp_path: Path) -> None:
    backend = fake_backend()
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        session = await ada.session()
        good, bad = await ada.model(session, 0), await ada.model(session, 1)
        trainer_of(backend).failing.add(bad)
        failed = await ada.result(await ada.train(train_body(bad, 1)))
        assert failed == {"error": f"{bad} was told to fail.", "category": "user"}
        await ada.outputs(await ada.train(train_body(good, 1)))
        trainer_of(backend).failing.clear()
        step = await ada.result(await ada.step(bad, 2))
        assert step["metrics"]["value:mean"] == 0.0, "the numbers go on after a failure"


async def test_a_request_that_waits_says_where_it_is(tmp_path: Path) -> None:
    from rookery.service.config import ServiceConfig

    async with serve(tmp_path / "run", config=ServiceConfig(poll_s=0.05)) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        reply = await ada.train(train_body(model, 2))
        response = await ada.retrieve(reply["request_id"])
        assert response.status_code == 408
        document = response.json()
        assert document["type"] == "try_again"
        assert "waits for request 1 of this model" in document["queue_state_reason"]


async def test_old_clients_speak_json(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        data = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]},
                "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
            },
        }
        inner = {"data": [data], "loss_fn": "cross_entropy"}
        body = {"model_id": model, "forward_backward_input": inner}
        document = await ada.result(await ada.post("forward_backward", body))
        [row] = document["loss_fn_outputs"]
        assert row["logprobs"]["shape"] == [2]
        assert document["metrics"]["loss:sum"] > 0
        body = {"model_id": model, "forward_input": inner}
        forward = await ada.result(await ada.post("forward", body))
        assert forward["loss_fn_outputs"] == document["loss_fn_outputs"]


async def test_a_refused_request_does_not_hold_up_the_next(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.train(train_body(model, 1, loss="stable_reinforce"), status=400)
        await ada.train(train_body(model, 1, loss="stable_reinforce"), status=400)
        wrong = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": -1}}
        await ada.post("optim_step", wrong, status=422)
        gone = {"model_id": model, "seq_id": 3, "path": f"tinker://{model}/weights/none"}
        await ada.post("load_weights", gone, status=404)
        await ada.outputs(await ada.train(train_body(model, 4)))
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        ada = served.client()
        assert (await ada.result(await ada.step(model, 5)))["metrics"]["value:mean"] == 3.0


async def test_who_comes_last_waits_for_one_pass(tmp_path: Path) -> None:
    backend = fake_backend()
    trainer, begun, go = trainer_of(backend), asyncio.Event(), asyncio.Event()
    compute, passes = trainer.forward_backward, list[list[str]]()

    async def slow(requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        passes.append([request.trainee for request in requests])
        begun.set()
        await go.wait()
        return await compute(requests)

    trainer.forward_backward = slow  # type: ignore[method-assign]
    config = ServiceConfig(poll_s=20.0, pass_tokens=6)
    keys = tmp_path / "keys.json"
    async with serve(tmp_path / "run", backend=backend, config=config, key_file=keys) as served:
        ada, bob = served.client("ada"), served.client("bob")
        model = await ada.model(await ada.session())
        other = await bob.model(await bob.session())
        replies = [await ada.train(train_body(model, seq)) for seq in range(1, 11)]
        await begun.wait()
        late = await bob.train(train_body(other, 1))
        go.set()
        await bob.outputs(late)
        for reply in replies:
            await ada.outputs(reply)
    assert [len(one) for one in passes[:3]] == [1, 2, 2], "six tokens are two requests"
    assert other in passes[1]


async def test_who_comes_last_waits_for_one_save(tmp_path: Path) -> None:
    """A save has no tokens, and takes as long as a pass."""
    backend = fake_backend()
    trainer, begun, go = trainer_of(backend), asyncio.Event(), asyncio.Event()
    save, compute, calls = trainer.save, trainer.forward_backward, list[str]()

    async def slow_save(trainee: str, path: Path) -> None:
        calls.append("save")
        begun.set()
        await go.wait()
        await save(trainee, path)

    async def noted(requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        calls.append("forward_backward")
        return await compute(requests)

    trainer.save = slow_save  # type: ignore[method-assign]
    trainer.forward_backward = noted  # type: ignore[method-assign]
    async with serve(tmp_path / "run", backend=backend, key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        model = await ada.model(await ada.session())
        other = await bob.model(await bob.session())
        saves = [{"model_id": model, "seq_id": seq, "path": f"ck{seq}"} for seq in range(1, 21)]
        for body in saves:
            await ada.post("save_weights", body)
        await begun.wait()
        late = [await bob.train(train_body(other, seq)) for seq in range(1, 4)]
        go.set()
        for reply in late:
            await bob.outputs(reply)
    assert calls.index("forward_backward") <= 2, "not behind twenty saves"


class _CountedModels(dict[str, Model]):
    """How often all models are looked at."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += 1
        return super().values()


async def test_a_pass_looks_at_no_models_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all sessions there ever were are listed still."""
    monkeypatch.setattr("rookery.service.service.HOUSEKEEPING_S", 3600.0)
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        served.service.context.state.models = models = _CountedModels(
            served.service.context.state.models
        )
        for seq in range(1, 9):
            await ada.result(await ada.step(model, seq))
        assert models.num_looks == 0


# Requests of several tenants in one call of the trainer.


class HeldTrainer(FakeTrainer):
    """Computes when it is let, and notes how many requests share a call."""

    def __init__(self) -> None:
        super().__init__("unused")
        self.is_free = asyncio.Event()
        self.widths: list[int] = []

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        self.widths.append(len(requests))
        await self.is_free.wait()
        return await super().forward_backward(requests)


async def test_a_loss_that_is_gone_fails_its_own_request_alone(tmp_path: Path) -> None:
    trainer = HeldTrainer()
    backend = replace(fake_backend(), trainer=trainer, trainees=trainer)
    async with serve(tmp_path / "run", backend=backend, key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        with_loss = await ada.session()
        loss = {
            "session_id": with_loss,
            "custom_loss_seq_id": 0,
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": []},
        }
        loss_id = (await ada.result(await ada.post("create_custom_loss", loss)))["loss_id"]
        model, other = await ada.model(await ada.session()), await bob.model(await bob.session())
        first = await bob.train(train_body(other, 1))
        await until(lambda: trainer.widths == [1])
        arrays = {"tokens": [5, 6, 7], "target_tokens": [6, 7, 8]}
        lost = await ada.train(loss_body(model, 1, "custom", arrays, loss_id=loss_id))
        beside = await bob.train(train_body(other, 2))
        finish = {"reason": {"type": "success"}}
        await ada.post(f"sessions/{with_loss}/finish", finish, status=204)
        trainer.is_free.set()
        await bob.outputs(first)
        assert "no custom loss" in (await ada.result(lost))["error"]
        assert (await bob.outputs(beside)).metrics["loss:sum"]
        assert trainer.widths == [1, 1]


# Sampler weights in an engine.


class SlowFolders:
    """Loads and unloads in several turns of the event loop, as servers do."""

    def __init__(self) -> None:
        self.loaded: set[ModelRef] = set()

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        await asyncio.sleep(0)
        ref = ModelRef(name=name, version=folder.name)
        assert ref not in self.loaded
        self.loaded.add(ref)
        return ref

    async def unload(self, ref: ModelRef) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.loaded.remove(ref)


async def test_bursts_of_more_adapters_than_may_stay(tmp_path: Path) -> None:
    folders = SlowFolders()
    residency = BlobResidency(folders, folder_of=lambda blob: tmp_path / blob, limit=4)

    async def use(blob: str) -> None:
        async with residency.use(blob) as ref:
            await asyncio.sleep(0)
            assert ref in folders.loaded

    for burst in range(3):
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(use(f"{burst}-{number}"))
    await use("last")
    assert len(folders.loaded) == 4


@pytest.mark.parametrize("num_turns", range(1, 9))
async def test_what_is_being_unloaded_is_loaded_again_when_it_is_asked_for(
    tmp_path: Path, num_turns: int
) -> None:
    folders = SlowFolders()
    residency = BlobResidency(folders, folder_of=lambda blob: tmp_path / blob, limit=1)

    async def use(blob: str) -> None:
        async with residency.use(blob) as ref:
            for _ in range(8):
                assert ref in folders.loaded
                await asyncio.sleep(0)

    await use("first")
    async with asyncio.TaskGroup() as group:
        group.create_task(use("second"))
        for _ in range(num_turns):  # after some of them the first is being unloaded
            await asyncio.sleep(0)
        group.create_task(use("first"))
