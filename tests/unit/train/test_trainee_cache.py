"""More trainees than there is room for: they go away and come back with the same bits."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_adapter
from tiny_training import make_batch

from rookery.slots import SlottedModel, load_model
from rookery.train import LoraTrainer, TrainerConfig
from rookery.train.lora_trainee import LoraTrainee
from rookery.types import Adapter, OptimStep, TrainRequest

NAMES = [f"tenant{i}" for i in range(5)]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


def start(name: str) -> Adapter:
    return tiny_adapter(name, rank=2 + NAMES.index(name), seed=NAMES.index(name))


def gib_of(name: str) -> float:
    return LoraTrainee(start(name), name=name, device=torch.device("cpu")).nbytes / 2**30


def request(name: str) -> TrainRequest:
    return TrainRequest(trainee=name, data=tuple(make_batch((7, 12), seed=len(name))))


async def adapters_after_training(model: SlottedModel, config: TrainerConfig) -> list[Adapter]:
    """Each is trained alone and with others, its gradients held over calls of others."""
    trainer = LoraTrainer(model, config=config)
    for name in NAMES:
        trainer.add(name, start(name))
    for names in (NAMES, NAMES[::2], NAMES[1::2], [NAMES[4]], NAMES):
        outputs = await trainer.forward_backward([request(name) for name in names])
        assert not any(output.error for output in outputs)
        for name in names[1:]:
            [stepped] = await trainer.optim_step([OptimStep(trainee=name, learning_rate=1e-2)])
            assert not stepped.error
    return [trainer.adapter(name) for name in NAMES]


async def test_trainees_come_back_with_the_same_bits(model: SlottedModel) -> None:
    roomy = await adapters_after_training(model, TrainerConfig())
    for gib in (0.0, gib_of(NAMES[4]) * 1.01):
        for config in (
            TrainerConfig(trainees_gib=gib),
            TrainerConfig(trainees_memory_gib=gib),
        ):
            narrow = await adapters_after_training(model, config)
            assert [one.version for one in narrow] == [one.version for one in roomy]


async def test_files_are_only_there_as_long_as_they_are_needed(model: SlottedModel) -> None:
    trainer = LoraTrainer(model, config=TrainerConfig(trainees_memory_gib=gib_of(NAMES[4]) * 1.01))
    for name in NAMES:
        trainer.add(name, start(name))
    parked = trainer.cache.num_parked
    assert 0 < parked < len(NAMES)
    folder = trainer.cache.folder
    assert folder is not None and len(list(folder.iterdir())) == parked
    for name in NAMES:
        trainer.remove(name)
    trainer.add("last", start(NAMES[0]))
    assert trainer.cache.num_parked == 0 and not list(folder.iterdir())


async def test_a_state_is_saved_and_loaded_from_wherever_it_is(
    model: SlottedModel, tmp_path: Path
) -> None:
    trainer = LoraTrainer(model, config=TrainerConfig(trainees_gib=0.0))
    for name in NAMES[:2]:
        trainer.add(name, start(name))
    await trainer.forward_backward([request(name) for name in NAMES[:2]])
    await trainer.save(NAMES[0], tmp_path / "state")
    [stepped] = await trainer.optim_step([OptimStep(trainee=NAMES[0], learning_rate=1e-2)])
    after = trainer.adapter(NAMES[0]).version
    await trainer.forward_backward([request(NAMES[1])])
    await trainer.load(NAMES[0], tmp_path / "state")
    assert trainer.adapter(NAMES[0]).version != after
    assert [stepped] == await trainer.optim_step([OptimStep(trainee=NAMES[0], learning_rate=1e-2)])
    assert trainer.adapter(NAMES[0]).version == after
    await trainer.export(NAMES[1], tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_model.safetensors").exists()
