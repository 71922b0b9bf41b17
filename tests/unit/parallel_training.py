"""A training that one process or several do.

Goes on from the state of its first step when that is not 0, saves one after every second step, and
leaves `KIND_SIZE_STEP.safetensors` in the folder. The first process kills itself before step
`kill`.
"""

import asyncio
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import tiny_adapter
from tiny_training import make_batch

from rookery.slots import load_model
from rookery.train import FullConfig, FullTrainer, LoraTrainer, ModelPublisher, TrainerConfig
from rookery.train.full import ShardedTrainer
from rookery.train.processes import Processes, join_processes
from rookery.types import ModelRef, ModelWeights, OptimStep, TrainRequest

LENGTHS = (9, 4, 17, 2, 12, 30, 7)
"""Seven data for two processes: one has a pass more than the other."""


def make(kind: str, folder: Path, processes: Processes) -> FullTrainer | LoraTrainer:
    model = load_model(folder / "model")
    if kind == "lora":
        return LoraTrainer(model, config=TrainerConfig(pass_tokens=24), processes=processes)
    config = FullConfig(pass_tokens=24, checkpoint_layers=kind == "checkpointed")
    like = folder / "model"
    if processes.size == 1:
        return FullTrainer(model, name="policy", config=config, like=like)
    return ShardedTrainer(model, name="policy", config=config, like=like, processes=processes)


async def train(
    kind: str, folder: Path, steps: range, trainer: FullTrainer | LoraTrainer, kill: int
) -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if isinstance(trainer, LoraTrainer):
        trainer.add("policy", tiny_adapter("start", layers=range(2, 4), base="model"))
    if steps.start:
        await trainer.load("policy", folder / f"{kind}_{size}_{steps.start}.safetensors")
    for step in steps:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        data = tuple(make_batch(LENGTHS, seed=step))
        before = await trainer.forward([TrainRequest(trainee="policy", data=data)])
        [output] = await trainer.forward_backward([TrainRequest(trainee="policy", data=data)])
        assert not output.error, output.error
        assert output.logprobs == before[0].logprobs
        assert [len(own) for own in output.logprobs] == [len(datum.targets) for datum in data]
        [stepped] = await trainer.optim_step([OptimStep(trainee="policy", learning_rate=1e-3)])
        assert not stepped.error, stepped.error
        if (step + 1) % 2 == 0:
            await trainer.save("policy", folder / f"{kind}_{size}_{step + 1}.safetensors")
    await trainer.export("policy", folder / f"{kind}_{size}_exported_{steps.start}")
    if isinstance(trainer, FullTrainer):
        await publish(trainer, folder / f"{kind}_{size}_published.safetensors")


async def publish(trainer: FullTrainer, file: Path) -> None:
    """Write what a server is given. The trainer computes meanwhile, as for a canary."""

    async def store(weights: ModelWeights) -> ModelRef:
        data = tuple(make_batch((9,)))
        [output] = await trainer.forward([TrainRequest(trainee="policy", data=data)])
        assert not output.error, output.error
        save_file(dict(weights.tensors), file)
        return ModelRef(name=weights.name, version=weights.version)

    trainer.publish_to(ModelPublisher(store))
    ref = await trainer.publish("policy")
    assert ref.version == await trainer.version()


def work(kind: str, folder: Path, steps: range, kill: int) -> None:
    """The part of one of several processes."""
    torch.set_num_threads(1)
    processes = join_processes("cpu")
    trainer = make(kind, folder, processes)
    if processes.is_first:
        asyncio.run(train(kind, folder, steps, trainer, kill))
        processes.broadcast("over")
    else:
        assert trainer.serve_rank() == "over"
    processes.leave()
