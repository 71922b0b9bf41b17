"""The LoRA trainer against transformers + peft, and against itself packed, cached and resumed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_adapter, write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.errors import AdapterError, TrainError
from rookery.ports import Trainer
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.losses import LOSSES, LossOutput, Targets
from rookery.types import Adapter, Datum, ModelRef
from rookery.weights import write_adapter

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
NO_CLIP = TrainerConfig(max_grad_norm=0.0)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


def make_batch(lengths: Sequence[int] = (9, 4, 17, 2, 12), *, seed: int = 0) -> list[Datum]:
    """Random rows; the first half of each has no weight, the others have weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in lengths:
        tokens = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        weights = torch.rand(length, generator=generator).tolist()
        prompt = max(1, length // 2)
        batch.append(Datum(tokens=tuple(tokens), weights=tuple([0.0] * prompt + weights[prompt:])))
    return batch


def make_trainer(
    model: SlottedModel, start: Adapter | None = None, config: TrainerConfig = NO_CLIP
) -> LoraTrainer:
    return LoraTrainer(model, start or tiny_adapter("start", layers=range(2, 4)), config=config)


async def gradients_of(trainer: LoraTrainer, batch: Sequence[Datum]) -> list[torch.Tensor]:
    await trainer.forward_backward(batch, loss="cross_entropy")
    assert trainer._gradients is not None
    return [gradient.clone() for gradient in trainer._gradients]


def peft_model(folder: Path, start: Adapter, tmp_path: Path) -> PeftModel:
    write_adapter(start, tmp_path / start.name)
    base = AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(base, tmp_path / start.name, is_trainable=True).eval()


def peft_loss(model: PeftModel, batch: Sequence[Datum]) -> torch.Tensor:
    total = torch.zeros(())
    for datum in batch:
        logprobs = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        for i, weight in enumerate(datum.weights):
            if weight:
                total = total - weight * logprobs[i - 1, datum.tokens[i]]
    return total


def peft_parameters(model: PeftModel) -> list[torch.nn.Parameter]:
    """In the trainer's order: layers sorted, A then B."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [named[name] for name in sorted(named)]


STARTS = {
    "every linear layer": tiny_adapter("all"),
    "the last two layers": tiny_adapter("last", layers=range(2, 4), targets=ATTENTION, rank=3),
    "one layer in the middle": tiny_adapter("middle", layers=range(1, 2), scale=0.25),
}


@pytest.mark.parametrize("which", STARTS)
async def test_gradients_equal_those_of_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path, which: str
) -> None:
    start, batch = STARTS[which], make_batch()
    reference = peft_model(tiny_folder, start, tmp_path)
    peft_loss(reference, batch).backward()
    got = await gradients_of(make_trainer(model, start), batch)
    expected = [parameter.grad for parameter in peft_parameters(reference)]
    assert len(got) == len(expected) == 2 * len(start.factors)
    for mine, theirs in zip(got, expected, strict=True):
        assert theirs is not None and theirs.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


async def test_an_adapter_of_the_head_gets_the_gradients_of_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    config = LoraConfig(rank=2, targets=("lm_head", "up_proj"), layers=1)
    start = initial_adapter(model, config, name="head", base="tiny", seed=0)
    assert list(start.factors) == ["lm_head", "model.layers.3.mlp.up_proj"]
    batch = make_batch()
    reference = peft_model(tiny_folder, start, tmp_path)
    peft_loss(reference, batch).backward()
    got = await gradients_of(make_trainer(model, start), batch)
    for mine, theirs in zip(got, peft_parameters(reference), strict=True):
        torch.testing.assert_close(mine, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Gemma2", "Phi3"])
async def test_other_architectures_get_the_gradients_of_peft(kind: str, tmp_path: Path) -> None:
    """Gemma 2 caps its logits and slides its window; Phi 3 has fused layers."""
    extra = {"head_dim": 8, "sliding_window": 6} if kind == "Gemma2" else {"sliding_window": 6}
    folder = write_tiny_model(tmp_path / kind, kind, **extra)
    model = load_model(folder)
    config = LoraConfig(rank=2, targets=("o_proj", "down_proj"), layers=3)
    start = initial_adapter(model, config, name="start", base=kind, seed=0)
    batch = make_batch()
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    write_adapter(start, tmp_path / "start")
    reference = PeftModel.from_pretrained(reference, tmp_path / "start", is_trainable=True).eval()
    peft_loss(reference, batch).backward()
    got = await gradients_of(make_trainer(model, start), batch)
    for mine, theirs in zip(got, peft_parameters(reference), strict=True):
        torch.testing.assert_close(mine, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
async def test_steps_equal_torch_adamw_on_peft(
    model: SlottedModel, tiny_folder: Path, tmp_path: Path, max_grad_norm: float
) -> None:
    start = tiny_adapter("start", layers=range(2, 4), scale=2.0)
    config = TrainerConfig(
        # A large epsilon: without it AdamW turns the rounding of tiny gradients into whole steps.
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-2,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
    )
    trainer = make_trainer(model, start, config)
    reference = peft_model(tiny_folder, start, tmp_path)
    optimizer = torch.optim.AdamW(
        peft_parameters(reference), betas=(0.8, 0.95), eps=1e-2, weight_decay=0.1
    )
    for step, rate in enumerate((1e-2, 5e-3, 2e-2)):
        batch = make_batch(seed=step)
        metrics = await trainer.forward_backward(batch[:2], loss="cross_entropy")
        more = await trainer.forward_backward(batch[2:], loss="cross_entropy")
        total = metrics["train/loss_sum"] + more["train/loss_sum"]
        loss = peft_loss(reference, batch)
        assert total == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in peft_parameters(reference)])
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(peft_parameters(reference), max_grad_norm)
            assert norm > max_grad_norm
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        metrics = await trainer.optim_step(learning_rate=rate)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["train/learning_rate"] == rate
    mine = [t for lora in trainer.adapter().factors.values() for t in (lora.a, lora.b)]
    for got, theirs in zip(mine, peft_parameters(reference), strict=True):
        torch.testing.assert_close(got, theirs.detach(), atol=1e-5, rtol=1e-4)
    assert trainer.num_steps == 3


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
