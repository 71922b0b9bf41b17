"""Saving and loading a trainer: what follows is bit for bit what would have followed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_adapter
from tiny_training import make_batch, make_trainer, step, train

from rookery.errors import TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraTrainer, TrainerConfig
from rookery.train.lora_trainee import LoraTrainee
from rookery.types import Adapter, OptimStep, TrainRequest


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


async def test_a_saved_trainer_continues_bit_for_bit(model: SlottedModel, tmp_path: Path) -> None:
    batches = [make_batch(seed=seed) for seed in range(5)]

    async def run(trainer: LoraTrainer, steps: range) -> None:
        for number in steps:
            await train(trainer, batches[number][:3])
            await train(trainer, batches[number][3:])
            await step(trainer, 1e-2, weight_decay=0.01)

    straight = make_trainer(model)
    await run(straight, range(5))
    first = make_trainer(model)
    await run(first, range(2))
    await train(first, batches[2][:3])
    path = tmp_path / "new" / "state.safetensors"
    await first.save("policy", path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    second = make_trainer(model, tiny_adapter("start", layers=range(2, 4), seed=9))
    await run(second, range(1))
    await second.load("policy", path)
    assert second.trainee("policy").num_steps == 2
    await train(second, batches[2][3:])
    await step(second, 1e-2, weight_decay=0.01)
    await run(second, range(3, 5))
    assert second.adapter("policy").version == straight.adapter("policy").version
    assert second.adapter("policy").version != first.adapter("policy").version


async def test_a_state_saved_before_the_first_step_loads(
    model: SlottedModel, tmp_path: Path
) -> None:
    fresh, used = make_trainer(model), make_trainer(model)
    await fresh.save("policy", tmp_path / "fresh")
    await train(used, make_batch())
    await step(used, 1e-2)
    await used.load("policy", tmp_path / "fresh")
    for trainer in (fresh, used):
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
    assert fresh.adapter("policy").version == used.adapter("policy").version
    assert fresh.trainee("policy").num_steps == used.trainee("policy").num_steps == 1


async def test_what_is_no_state_of_this_trainer_is_refused(
    model: SlottedModel, tmp_path: Path
) -> None:
    trainer = make_trainer(model)
    before = trainer.adapter("policy").version
    with pytest.raises(TrainError, match="There is no trainer state"):
        await trainer.load("policy", tmp_path / "missing")
    (tmp_path / "text").write_text("hello, this is not a state")
    with pytest.raises(TrainError, match="reading"):
        await trainer.load("policy", tmp_path / "text")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(TrainError, match="is not a trainer state but another safetensors file"):
        await trainer.load("policy", tmp_path / "other")
    await make_trainer(model, tiny_adapter("wide", rank=5)).save("policy", tmp_path / "wide")
    await make_trainer(model, tiny_adapter("s", layers=range(2, 4), scale=3.0)).save(
        "policy", tmp_path / "scaled"
    )
    for name in ("wide", "scaled"):
        with pytest.raises(TrainError, match="other layers, ranks or scales"):
            await trainer.load("policy", tmp_path / name)
    await train(trainer, make_batch())
    await step(trainer, 0.0)
    await trainer.save("policy", tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    header = '{"num_steps": 1, "scales": {}}'
    cut = {k: t for k, t in tensors.items() if not k.startswith("exp_avg_sq/")}
    save_file(cut, tmp_path / "cut", metadata={"rookery_trainer": header})
    with pytest.raises(TrainError, match="not a whole trainer state"):
        await trainer.load("policy", tmp_path / "cut")
    with pytest.raises(TrainError, match="is a folder"):
        await trainer.save("policy", tmp_path)
    assert trainer.adapter("policy").version == before


# More trainees than there is room for.


NAMES = [f"tenant{i}" for i in range(5)]


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
    for config in (
        TrainerConfig(trainees_gib=gib_of(NAMES[4]) * 1.01),
        TrainerConfig(trainees_memory_gib=0.0),
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
