"""The LoRA trainer against itself: packed, cached, shared, and given what it cannot take."""

import asyncio
from pathlib import Path

import pytest
import torch
from tiny import tiny_adapter
from tiny_training import ATTENTION, NO_CLIP, gradients_of, make_batch, make_trainer

from rookery.errors import AdapterError, TrainError
from rookery.ports import Trainer
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraTrainer, TrainerConfig
from rookery.train.losses import LOSSES, LossOutput, Targets
from rookery.types import Adapter, Datum, ModelRef


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


async def test_packing_does_not_change_gradients(model: SlottedModel) -> None:
    batch = make_batch((9, 4, 17, 2, 12, 30, 3))
    whole = await gradients_of(make_trainer(model), batch)
    for pass_tokens in (1, 13, 40):
        split = await gradients_of(
            make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens)), batch
        )
        for one, other in zip(whole, split, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


async def test_metrics_are_means_over_all_passes(model: SlottedModel) -> None:
    batch = make_batch()
    weight = sum(w for datum in batch for w in datum.weights)
    for pass_tokens in (1, 1024):
        trainer = make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
        metrics = await trainer.forward_backward(batch, loss="cross_entropy")
        assert metrics["train/loss"] == pytest.approx(metrics["train/loss_sum"] / weight)
        assert metrics["train/num_tokens"] == sum(w != 0 for d in batch for w in d.weights)


async def test_a_cached_trunk_gives_the_same_bits(model: SlottedModel) -> None:
    """With no cache, one that holds a part and one that holds all; in other company and alone.

    A row alone goes through another matrix product than a row among others.
    """
    whole = make_batch(seed=1)
    one_row = [datum for datum in whole if len(datum.tokens) == 2]
    batches = [whole, whole[::-1], one_row]
    some = 20 * model.shape.hidden_size * 4 / 2**30
    seen = []
    for gib in (0.0, some, 1.0):
        config = TrainerConfig(trunk_cache_gib=gib, pass_tokens=25)
        trainer = make_trainer(model, config=config)
        seen.append([await gradients_of(trainer, batch) for batch in batches])
        tokens = trainer.trunk.num_computed_tokens
        if gib == 1.0:
            assert tokens == sum(len(d.tokens) - 1 for d in batches[0])
        elif gib == 0.0:
            assert tokens == sum(len(d.tokens) - 1 for batch in batches for d in batch)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


async def test_the_trunk_cache_is_bounded(model: SlottedModel) -> None:
    token_bytes = model.shape.hidden_size * 4
    trainer = make_trainer(model, config=TrainerConfig(trunk_cache_gib=40 * token_bytes / 2**30))
    for seed in range(6):
        await trainer.forward_backward(make_batch(seed=seed), loss="cross_entropy")
        kept = sum(hidden.nbytes for hidden in trainer.trunk._cache.values())
        assert kept == trainer.trunk._used_bytes <= 40 * token_bytes
    assert kept > 0


async def test_a_batch_that_fails_leaves_no_gradients(model: SlottedModel) -> None:
    """The second pass of the batch overflows: nothing of the first may stay."""
    trainer = make_trainer(model, config=TrainerConfig(pass_tokens=20, max_grad_norm=0.0))
    clean = await gradients_of(trainer, make_batch(seed=1))
    good = make_batch((18,))[0]
    bad = Datum(tokens=good.tokens, weights=(0.0,) * 16 + (3e38, 3e38))
    with pytest.raises(TrainError, match=r"Step 1: the loss is inf.*lower the learning rate"):
        await trainer.forward_backward([good, bad], loss="cross_entropy")
    assert trainer._gradients is not None
    assert all(torch.equal(a, b) for a, b in zip(clean, trainer._gradients, strict=True))
    await trainer.optim_step(learning_rate=1e-3)


async def test_gradients_that_are_not_finite_change_nothing(model: SlottedModel) -> None:
    trainer = make_trainer(model)
    await trainer.forward_backward(make_batch(), loss="cross_entropy")
    assert trainer._gradients is not None
    trainer._gradients[3][0, 0] = float("nan")
    before = trainer.adapter().version
    with pytest.raises(TrainError, match="Step 1: the gradient is nan"):
        await trainer.optim_step(learning_rate=1e-3)
    assert trainer.adapter().version == before and trainer.num_steps == 0


async def test_wrong_calls_are_refused_with_a_sentence(model: SlottedModel) -> None:
    trainer = make_trainer(model)
    with pytest.raises(TrainError, match="'ppo_2' is not a loss"):
        await trainer.forward_backward(make_batch(), loss="ppo_2")
    with pytest.raises(TrainError, match="no gradients to apply"):
        await trainer.optim_step(learning_rate=1e-3)
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TrainError, match="it must be 0 or more"):
            await trainer.optim_step(learning_rate=rate)
    with pytest.raises(TrainError, match="has no publisher"):
        await trainer.publish()


def test_what_cannot_be_trained_is_refused(model: SlottedModel, tiny_folder: Path) -> None:
    with pytest.raises(AdapterError, match="was made for 'other'"):
        make_trainer(model, tiny_adapter("a", base="other"))
    packed = load_model(tiny_folder)
    packed.pack()
    with pytest.raises(TrainError, match="packed for inference"):
        make_trainer(packed)


async def test_publish_hands_over_the_current_weights(model: SlottedModel) -> None:
    class Shelf:
        adapters: list[Adapter]

        async def publish(self, adapter: Adapter) -> ModelRef:
            self.adapters = [adapter]
            return ModelRef(name=adapter.name, version=adapter.version)

    shelf = Shelf()
    start = tiny_adapter("poet", layers=range(2, 4))
    trainer = LoraTrainer(model, start, config=NO_CLIP, publisher=shelf)
    assert isinstance(trainer, Trainer)
    assert await trainer.publish() == ModelRef(name="poet", version=start.version)
    await trainer.forward_backward(make_batch(), loss="cross_entropy")
    await trainer.optim_step(learning_rate=1e-2)
    ref = await trainer.publish()
    assert ref == ModelRef(name="poet", version=shelf.adapters[0].version)
    assert ref.version != start.version
    kept = shelf.adapters[0].factors["model.layers.3.mlp.up_proj"].b.clone()
    await trainer.forward_backward(make_batch(), loss="cross_entropy")
    await trainer.optim_step(learning_rate=1e-2)
    assert torch.equal(kept, shelf.adapters[0].factors["model.layers.3.mlp.up_proj"].b)


async def test_trainers_of_one_model_at_once_do_not_touch_each_other(
    model: SlottedModel, tiny_folder: Path
) -> None:
    starts = [
        tiny_adapter("a", rank=2, layers=range(1, 3), seed=1),
        tiny_adapter("b", rank=7, targets=ATTENTION, seed=2),
        tiny_adapter("c", rank=4, layers=range(3, 4), seed=3),
    ]
    adapter = tiny_adapter("resident", seed=4)
    shared = load_model(tiny_folder)
    shared.bank.put(0, adapter)
    held = shared.linears["model.layers.1.mlp.up_proj"].a
    assert held is not None

    async def train(trainer: LoraTrainer) -> str:
        for seed in range(3):
            await trainer.forward_backward(make_batch(seed=seed), loss="cross_entropy")
            await trainer.optim_step(learning_rate=1e-2)
        return trainer.adapter().version

    together = await asyncio.gather(*[train(make_trainer(shared, start)) for start in starts])
    alone = [await train(make_trainer(model, start)) for start in starts]
    assert together == alone
    assert shared.linears["model.layers.1.mlp.up_proj"].a is held and not held.requires_grad
    assert torch.equal(held[0], adapter.factors["model.layers.1.mlp.up_proj"].a)
    assert all(linear.a is None for linear in model.linears.values())


async def test_a_loss_sees_the_columns_of_its_tokens(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Targets] = []

    def spy(logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        seen.append(targets)
        assert targets.advantages is not None
        loss = -(targets.advantages * logprobs).sum()
        return LossOutput(loss=loss, sums={"spied": targets.advantages.sum()})

    monkeypatch.setitem(LOSSES, "spy", spy)
    batch = [
        Datum(
            tokens=(5, 6, 7, 8),
            weights=(0.0, 1.0, 0.0, 1.0),
            logprobs=(0.0, -1.0, -2.0, -3.0),
            advantages=(9.0, 0.5, 9.0, 1.5),
        ),
        Datum(tokens=(5, 9), weights=(0.0, 2.0), logprobs=(0.0, -4.0), advantages=(9.0, 3.0)),
    ]
    metrics = await make_trainer(model).forward_backward(batch, loss="spy")
    [targets] = seen
    assert targets.weights.tolist() == [1.0, 1.0, 2.0]
    assert targets.datum.tolist() == [0, 0, 1]
    assert targets.sampled is not None and targets.sampled.tolist() == [-1.0, -3.0, -4.0]
    assert targets.advantages is not None and targets.advantages.tolist() == [0.5, 1.5, 3.0]
    assert metrics["train/spied"] == pytest.approx(5.0 / 4.0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
async def test_a_bfloat16_model_is_trained_in_float32(tiny_folder: Path) -> None:
    exact, rounded = load_model(tiny_folder), load_model(tiny_folder, dtype="bfloat16")
    start = tiny_adapter("start", layers=range(2, 4))
    expected = await gradients_of(make_trainer(exact, start), make_batch())
    trainer = make_trainer(rounded, start)
    got = await gradients_of(trainer, make_batch())
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        similarity = torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
        assert similarity > 0.98
    await trainer.optim_step(learning_rate=1e-7)
    moved = trainer.adapter()
    # A step that bfloat16 could not represent is not lost.
    assert moved.version != start.version
