"""Requests of several tenants in one call of the trainer: what fails, fails alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from executors.jobs import until
from service.tenants import fake_backend, loss_body, serve, train_body

from rookery.testing import FakeTrainer
from rookery.types import TrainOutput, TrainRequest


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
