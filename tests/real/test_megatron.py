"""The Megatron server with one and two ranks, against the trainer and engine of this process."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as save_tensors
from service.tenants import serve, train_body
from tiny import write_tiny_model
from tiny_training import make_batch, step, train

from rookery.compose.serve import open_megatron_backend
from rookery.embedded import EngineConfig, run_engine
from rookery.errors import TrainError
from rookery.megatron import MegatronEngine, MegatronServer, MegatronTrainer, open_megatron
from rookery.ports import Engine
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraTrainer, TrainerConfig
from rookery.train.trainee import read_state
from rookery.types import (
    Adapter,
    LoraFactors,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TrainRequest,
)
from rookery.weights import make_adapter

PYTHON = os.environ.get("ROOKERY_MEGATRON_PYTHON", "")
SOURCE = Path(__file__).parents[2] / "src"
START_S = 600.0

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_MEGATRON_PYTHON has no megatron-core"),
    pytest.mark.timeout(900),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class ServerProcess:
    """torchrun with a server."""

    def __init__(self, model: Path, *, ranks: int) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = (
            PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
            "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
            "-m", "rookery.megatron", "--model", str(model), "--port", str(port),
        )  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MegatronServer]:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(*self._command, env=environment)
        try:
            await asyncio.wait_for(self._answers(), START_S)
            async with open_megatron(self.url) as server:
                yield server
        finally:
            await self.kill()

    async def _answers(self) -> None:
        assert self._process is not None
        while self._process.returncode is None:
            try:
                async with open_megatron(self.url):
                    return
            except TrainError:
                await asyncio.sleep(0.5)
        raise AssertionError("the server ended")

    async def kill(self) -> None:
        """The ranks; torchrun then ends by itself."""
        assert self._process is not None
        if self._process.returncode is None:
            pid = self._process.pid
            for rank in _children(pid):
                os.kill(rank, signal.SIGKILL)
            await self._process.wait()


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_adapter(model: SlottedModel) -> Adapter:
    """Of all linear layers, the head too, both factors random."""
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: LoraFactors(
            a=torch.randn(4, linear.in_features, generator=generator) * 0.1,
            b=torch.randn(linear.out_features, 4, generator=generator) * 0.1,
            scale=2.0,
        )
        for name, linear in model.linears.items()
    }
    return make_adapter("start", base="tiny", factors=factors)


def assert_near(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    gap, scale = (got - expected).abs().max().item(), max(1.0, expected.abs().max().item())
    assert gap <= 1e-5 * scale, f"{what}: {gap:.3g} of {scale:.3g}"


def assert_same_state(got: Path, expected: Path) -> None:
    (ours, document), (theirs, expected_document) = read_state(got), read_state(expected)
    assert document == expected_document
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("gradients/") for name in ours)
    for name, tensor in ours.items():
        assert_near(tensor, theirs[name], name)


MODELS = [
    pytest.param(1, "Llama", {"tie_word_embeddings": True}, id="1-llama-tied"),
    pytest.param(2, "Llama", {}, id="2-llama"),
    pytest.param(2, "Qwen2", {"tie_word_embeddings": True}, id="2-qwen2-bias-tied"),
    pytest.param(2, "Qwen3", {"head_dim": 16}, id="2-qwen3-norm"),
]


@pytest.mark.parametrize(("ranks", "kind", "extra"), MODELS)
async def test_gradients_steps_and_answers_are_those_of_this_process(
    tmp_path: Path, ranks: int, kind: str, extra: dict[str, object]
) -> None:
    folder = write_tiny_model(tmp_path / "tiny", kind, **extra)
    model = load_model(folder)
    start = start_adapter(model)
    local = LoraTrainer(model, config=TrainerConfig())
    local.add("policy", start)
    async with ServerProcess(folder, ranks=ranks).running() as server:
        assert server.info.ranks == ranks
        trainer = MegatronTrainer(server)
        await trainer.create("policy", start)
        for number in range(3):
            theirs, ours = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
            got = await train(trainer, make_batch(seed=number))
            expected = await train(local, make_batch(seed=number))
            for one, other in zip(got.logprobs, expected.logprobs, strict=True):
                assert one == pytest.approx(other, abs=1e-5)
            await trainer.save("policy", theirs)
            await local.save("policy", ours)
            assert_same_state(theirs, ours)
            norm = (await step(trainer, 1e-3))["train/grad_norm"]
            assert norm == pytest.approx((await step(local, 1e-3))["train/grad_norm"], rel=1e-5)
        await assert_same_answers(MegatronEngine(server), model, local.adapter("policy"))


async def assert_same_answers(engine: Engine, model: SlottedModel, adapter: Adapter) -> None:
    """Greedy ones of an adapter and of the base model, in one batch, and their scores."""
    config = EngineConfig(model="tiny")
    async with run_engine(model, config=config, detokenize=str, name="tiny") as local:
        answers = []
        for one in (engine, local):
            refs = (await one.load(adapter), one.base)
            params = SamplingParams(max_tokens=12, temperature=0.0)
            drawn = await one.sample(
                [SampleRequest(model=ref, prompt=(5, 6, 7, 8), params=params) for ref in refs]
            )
            scores = await one.score([ScoreRequest(model=r, tokens=(9, 8, 7)) for r in refs])
            await one.unload(refs[0])
            answers.append((drawn, scores))
    (drawn, scores), (expected_drawn, expected_scores) = answers
    for [completion], [expected] in zip(drawn, expected_drawn, strict=True):
        assert completion.tokens == expected.tokens
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    for score, expected_score in zip(scores, expected_scores, strict=True):
        assert score.logprobs == pytest.approx(expected_score.logprobs, abs=1e-4)


async def test_a_killed_server_is_said_and_a_saved_state_goes_on(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    start = start_adapter(load_model(folder))
    process, path = ServerProcess(folder, ranks=2), tmp_path / "state"
    bad = TrainRequest(trainee="policy", data=(replace(make_batch()[0], targets=(10_000,) * 8),))
    async with process.running() as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", start)
        await train(trainer, make_batch())
        await step(trainer, 1e-3)
        [failed] = await trainer.forward_backward([bad])
        assert "not in the vocabulary" in failed.error
        with pytest.raises(TrainError, match="not a trainer state"):
            (tmp_path / "other").write_bytes(save_tensors({"x": torch.zeros(1)}))
            await trainer.load("policy", tmp_path / "other")
        await train(trainer, make_batch(seed=1))
        await trainer.save("policy", path)
        await step(trainer, 1e-3)
        expected = await trainer.adapter("policy")
        await process.kill()
        with pytest.raises(TrainError, match="can't be reached"):
            await step(trainer, 1e-3)
    async with process.running() as server:
        trainer = MegatronTrainer(server)
        await trainer.create("policy", start)
        await trainer.load("policy", path)
        await step(trainer, 1e-3)
        assert (await trainer.adapter("policy")).version == expected.version


async def test_the_service_trains_and_samples_on_the_server(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    async with ServerProcess(folder, ranks=2).running() as server:
        engine = EngineConfig(model=str(folder))
        async with (
            open_megatron_backend(
                str(folder), url=server.url, engine=engine, alpha=32.0
            ) as backend,
            serve(tmp_path / "run", backend=backend) as served,
        ):
            ada = served.client()
            model = await ada.model(await ada.session())
            losses = []
            for seq in range(1, 21, 2):
                output = await ada.outputs(
                    await ada.train(train_body(model, seq, tokens=[5, 6, 7, 8]))
                )
                losses.append(output.metrics["loss:sum"])
                await ada.result(await ada.step(model, seq + 1, rate=1e-2))
            assert losses[-1] < losses[0] / 2
            save = {"model_id": model, "seq_id": 21, "sampling_session_seq_id": 0}
            reply = await ada.result(await ada.post("save_weights_for_sampler", save))
            sample = {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
                "sampling_session_id": reply["sampling_session_id"],
                "seq_id": 0,
                "sampling_params": {"max_tokens": 2, "temperature": 0.0},
            }
            drawn = await ada.result(await ada.post("asample", sample))
            assert drawn["sequences"][0]["tokens"] == [7, 8]
