"""Saving and loading a trainer: what follows is bit for bit what would have followed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_adapter
from tiny_training import make_batch, make_trainer

from rookery.errors import TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraTrainer, TrainerConfig


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


async def test_a_saved_trainer_continues_bit_for_bit(model: SlottedModel, tmp_path: Path) -> None:
    config = TrainerConfig(weight_decay=0.01)
    batches = [make_batch(seed=seed) for seed in range(5)]

    async def train(trainer: LoraTrainer, steps: range) -> None:
        for step in steps:
            await trainer.forward_backward(batches[step][:3], loss="cross_entropy")
            await trainer.forward_backward(batches[step][3:], loss="cross_entropy")
            await trainer.optim_step(learning_rate=1e-2)

    straight = make_trainer(model, config=config)
    await train(straight, range(5))
    first = make_trainer(model, config=config)
    await train(first, range(2))
    await first.forward_backward(batches[2][:3], loss="cross_entropy")
    path = tmp_path / "new" / "state.safetensors"
    await first.save(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    second = make_trainer(model, tiny_adapter("start", layers=range(2, 4), seed=9), config)
    await train(second, range(1))
    await second.load(path)
    assert second.num_steps == 2
    await second.forward_backward(batches[2][3:], loss="cross_entropy")
    await second.optim_step(learning_rate=1e-2)
    await train(second, range(3, 5))
    assert second.adapter().version == straight.adapter().version
    assert second.adapter().version != first.adapter().version


async def test_a_state_saved_before_the_first_step_loads(
    model: SlottedModel, tmp_path: Path
) -> None:
    fresh, used = make_trainer(model), make_trainer(model)
    await fresh.save(tmp_path / "fresh")
    await used.forward_backward(make_batch(), loss="cross_entropy")
    await used.optim_step(learning_rate=1e-2)
    await used.load(tmp_path / "fresh")
    for trainer in (fresh, used):
        await trainer.forward_backward(make_batch(), loss="cross_entropy")
        await trainer.optim_step(learning_rate=1e-2)
    assert fresh.adapter().version == used.adapter().version
    assert fresh.num_steps == used.num_steps == 1


async def test_what_is_no_state_of_this_trainer_is_refused(
    model: SlottedModel, tmp_path: Path
) -> None:
    trainer = make_trainer(model)
    before = trainer.adapter().version
    with pytest.raises(TrainError, match="There is no trainer state"):
        await trainer.load(tmp_path / "missing")
    (tmp_path / "text").write_text("hello, this is not a state")
    with pytest.raises(TrainError, match="reading"):
        await trainer.load(tmp_path / "text")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(TrainError, match="is no trainer state but other safetensors"):
        await trainer.load(tmp_path / "other")
    await make_trainer(model, tiny_adapter("wide", rank=5)).save(tmp_path / "wide")
    await make_trainer(model, tiny_adapter("s", layers=range(2, 4), scale=3.0)).save(
        tmp_path / "scaled"
    )
    for name in ("wide", "scaled"):
        with pytest.raises(TrainError, match="other layers, ranks or scales"):
            await trainer.load(tmp_path / name)
    await trainer.forward_backward(make_batch(), loss="cross_entropy")
    await trainer.optim_step(learning_rate=0.0)
    await trainer.save(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    header = '{"num_steps": 1, "scales": {}}'
    cut = {k: t for k, t in tensors.items() if not k.startswith("exp_avg_sq/")}
    save_file(cut, tmp_path / "cut", metadata={"rookery_trainer": header})
    with pytest.raises(TrainError, match="not a whole trainer state"):
        await trainer.load(tmp_path / "cut")
    with pytest.raises(TrainError, match="is a folder"):
        await trainer.save(tmp_path)
    assert trainer.adapter().version == before
