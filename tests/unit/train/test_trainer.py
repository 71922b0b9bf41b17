"""The LoRA trainer against itself: packed, cached, shared, and given what it cannot take."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from tiny import tiny_adapter
from tiny_training import (
    ATTENTION,
    gradients_of,
    make_batch,
    make_trainer,
    next_tokens,
    step,
    train,
)

from rookery.config import Config
from rookery.errors import AdapterError, EngineError, TrainError
from rookery.ports import Trainer
from rookery.slots import SlottedModel, load_model
from rookery.testing import FakeAdapters
from rookery.train import AdapterPublisher, LoraTrainer, TrainerConfig
from rookery.train import head as train_head
from rookery.train.losses import LOSSES, Column, LossOutput, Targets
from rookery.train.losses.loss import CrossEntropy
from rookery.train.losses.policy import ImportanceSampling
from rookery.types import Datum, Json, ModelRef, ModelWeights, OptimStep, TrainRequest


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
        metrics = (await train(trainer, batch)).metrics
        assert metrics["train/loss"] == pytest.approx(metrics["train/loss_sum"] / weight)
        assert metrics["train/num_tokens"] == sum(w != 0 for d in batch for w in d.weights)


async def test_a_cached_trunk_gives_the_same_bits(model: SlottedModel) -> None:
    """With no cache, one that holds a part and one that holds all; in other batches and alone.

    A row alone goes through another matrix product than a row among others.
    """
    whole = make_batch(seed=1)
    one_row = [datum for datum in whole if len(datum.tokens) == 1]
    batches = [whole, whole[::-1], one_row]
    some = 20 * model.shape.hidden_size * 4 / 2**30
    seen = []
    for gib in (0.0, some, 1.0):
        config = TrainerConfig(trunk_cache_gib=gib, pass_tokens=25)
        trainer = make_trainer(model, config=config)
        seen.append([await gradients_of(trainer, batch) for batch in batches])
        tokens = trainer.trunk.num_computed_tokens
        if gib == 1.0:
            assert tokens == sum(len(d.tokens) for d in batches[0])
        elif gib == 0.0:
            assert tokens == sum(len(d.tokens) for batch in batches for d in batch)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


async def test_the_trunk_cache_is_bounded(model: SlottedModel) -> None:
    token_bytes = model.shape.hidden_size * 4
    trainer = make_trainer(model, config=TrainerConfig(trunk_cache_gib=40 * token_bytes / 2**30))
    for seed in range(6):
        await train(trainer, make_batch(seed=seed))
        assert 0 < trainer.trunk.used_bytes <= 40 * token_bytes


async def test_log_probabilities_come_back_for_every_target(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of weight 0, in any packing, with logits in one chunk and in many."""
    batch = make_batch()
    whole = await train(make_trainer(model), batch)
    gradients = await gradients_of(make_trainer(model), batch)
    expected = -sum(
        weight * logprob
        for datum, logprobs in zip(batch, whole.logprobs, strict=True)
        for weight, logprob in zip(datum.weights, logprobs, strict=True)
    )
    assert whole.metrics["train/loss_sum"] == pytest.approx(expected, rel=1e-5)
    assert any(w == 0 for d in batch for w in d.weights)
    monkeypatch.setattr(train_head, "CHUNK_BYTES", 4 * model.shape.vocab_size * 3)
    for pass_tokens in (13, 1024):
        trainer = make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
        [forward] = await trainer.forward([TrainRequest(trainee="policy", data=tuple(batch))])
        assert trainer.trainee("policy").gradients is None
        output = await train(trainer, batch)
        assert output == forward
        for got, wanted in zip(output.logprobs, whole.logprobs, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5)
        found = trainer.trainee("policy").gradients
        assert found is not None
        for mine, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


async def test_several_targets_at_one_position_are_as_many_data(model: SlottedModel) -> None:
    """Soft targets: the gradient of three weighted tokens at a place is the sum of three."""
    soft = Datum(
        tokens=(5, 6, 7),
        positions=(1, 1, 1, 2),
        targets=(7, 8, 9, 4),
        weights=(0.5, 0.25, 0.25, 1.0),
    )
    apart = [
        replace(soft, positions=(p,), targets=(t,), weights=(w,))
        for p, t, w in zip(soft.positions, soft.targets, soft.weights, strict=True)
    ]
    together = make_trainer(model)
    output = await train(together, [soft])
    separate = make_trainer(model)
    alone = await train(separate, apart)
    assert output.logprobs[0] == pytest.approx([x for (x,) in alone.logprobs], abs=1e-5)
    for mine, theirs in zip(
        together.trainee("policy").gradients or (),
        separate.trainee("policy").gradients or (),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


async def test_temperature_and_kept_tokens_change_what_is_normalised(model: SlottedModel) -> None:
    """Against all log-probabilities of the vocabulary, tempered and cut by hand."""
    every = range(model.shape.vocab_size)
    plain = Datum(
        tokens=(5, 6, 7), positions=(2,) * len(every), targets=tuple(every),
        weights=(0.0,) * len(every),
    )  # fmt: skip
    [scores] = (await train(make_trainer(model), [plain])).logprobs
    tempered = torch.log_softmax(torch.tensor(scores) / 0.5, dim=-1)
    kept = (11, 40, 8)
    cut = Datum(
        tokens=(5, 6, 7), positions=(2, 2, 2), targets=(40, 8, 8), weights=(1.0, 1.0, 1.0),
        temperature=0.5, kept=(kept, kept, ()),
    )  # fmt: skip
    output = await train(make_trainer(model), [cut, make_batch((6,))[0]])
    mass = torch.logsumexp(tempered[list(kept)], dim=-1)
    expected = [tempered[40] - mass, tempered[8] - mass, tempered[8]]
    assert output.logprobs[0] == pytest.approx([float(x) for x in expected], abs=1e-4)
    one = Datum(
        tokens=(5, 6), positions=(1,), targets=(7,), weights=(1.0,), temperature=0.7, kept=((7,),)
    )
    trainer = make_trainer(model)
    [[logprob]] = (await train(trainer, [one])).logprobs
    assert logprob == pytest.approx(0.0, abs=1e-6)
    for gradient in trainer.trainee("policy").gradients or ():
        assert gradient.abs().max() < 1e-6, "the only token left cannot become likelier"


async def test_one_request_that_fails_changes_no_other(model: SlottedModel) -> None:
    """A bad datum, an unknown trainee, loss or option, an overflow in the second pass."""
    good = tuple(make_batch((18,)))
    overflowing = replace(good[0], weights=(0.0,) * 15 + (3e38, 3e38))
    bad = {
        "Datum 1 of the batch has the token 999": (*good, next_tokens((5, 999), (0.0, 1.0))),
        r"Step 1: the loss is inf.*lower the learning rate": (*good, overflowing),
    }
    requests = [TrainRequest(trainee="bad", data=data) for data in bad.values()]
    requests += [
        TrainRequest(trainee="nobody", data=good),
        TrainRequest(trainee="bad", data=good, loss="ppo_2"),
        TrainRequest(trainee="bad", data=good, loss_options={"clip": 1.0}),
        TrainRequest(trainee="bad", data=good, loss="importance_sampling"),
        TrainRequest(trainee="policy", data=good),
    ]
    messages = [
        *bad,
        "There is no trainee 'nobody'. There are: 'policy', 'bad'",
        "'ppo_2' is not a loss",
        "loss_options of cross_entropy is not a valid config: clip",
        "17 targets and 0 sampled_logprobs",
    ]
    trainer = make_trainer(model, config=TrainerConfig(pass_tokens=20))
    trainer.add("bad", tiny_adapter("bad", layers=range(3, 4)))
    before = await gradients_of(trainer, make_batch(seed=1))
    outputs = await trainer.forward_backward(requests)
    for output, message in zip(outputs, messages, strict=False):
        with pytest.raises(TrainError, match=message):
            raise TrainError(output.error)
        assert output.logprobs == () and not output.metrics
    assert trainer.trainee("bad").gradients is None
    alone = make_trainer(model, config=TrainerConfig(pass_tokens=20))
    await gradients_of(alone, make_batch(seed=1))
    assert outputs[-1] == await train(alone, good)
    after = trainer.trainee("policy").gradients or []
    assert all(
        torch.equal(a, b)
        for a, b in zip(after, alone.trainee("policy").gradients or [], strict=True)
    )
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


async def test_a_request_that_makes_no_sense_fails_alone(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(CrossEntropy):
        def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
            raise KeyError("a mistake in a loss")

    monkeypatch.setitem(LOSSES, "broken", Broken)
    trainer = make_trainer(model)
    trainer.add("bad", STARTS["a"])
    trainer.add("last", STARTS["a"])
    good = tuple(make_batch((6,)))
    nones: Any = (None,) * 5
    nothing: Any = None
    for request, message in (
        (TrainRequest(trainee="bad", data=(replace(good[0], weights=nones),)), "Datum 0"),
        (TrainRequest(trainee="bad", data=nothing), "Step 1: the request failed: 'NoneType'"),
        (TrainRequest(trainee="bad", data=good, loss="broken"), "a mistake in a loss"),
    ):
        others = [TrainRequest(trainee=name, data=good) for name in ("policy", "last")]
        outputs = await trainer.forward_backward([others[0], request, others[1]])
        assert message in outputs[1].error and not (outputs[0].error or outputs[2].error)
    assert trainer.trainee("bad").gradients is None
    rates: list[Any] = [0.1, None, 10**400, "0.1", 0.1]
    names = ("policy", "bad", "bad", "bad", "last")
    steps = [OptimStep(trainee=n, learning_rate=r) for n, r in zip(names, rates, strict=True)]
    errors = [output.error for output in await trainer.optim_step(steps)]
    assert errors[0] == errors[-1] == ""
    assert all("learning_rate is not a number" in error for error in errors[1:-1])
    assert [trainer.trainee(name).num_steps for name in ("policy", "bad", "last")] == [1, 0, 1]


async def test_steps_that_fail_change_no_weight(model: SlottedModel) -> None:
    trainer = make_trainer(model)
    before = trainer.adapter("policy").version
    for values, message in (
        ({"learning_rate": -1.0}, "learning_rate is -1; it must be 0 or more"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": 1e-3, "beta1": 1.0}, "beta1 is 1; it must be at least 0 and below 1"),
        ({"learning_rate": 1e-3, "epsilon": 0.0}, "epsilon is 0; it must be above 0"),
    ):
        [output] = await trainer.optim_step([OptimStep(trainee="policy", **values)])
        assert message in output.error
    await train(trainer, make_batch())
    gradients = trainer.trainee("policy").gradients
    assert gradients is not None
    gradients[3][0, 0] = float("nan")
    failed, unknown = await trainer.optim_step(
        [OptimStep(trainee=name, learning_rate=1e-3) for name in ("policy", "nobody")]
    )
    assert "Step 1: the gradient is nan" in failed.error and "no trainee" in unknown.error
    assert trainer.adapter("policy").version == before
    assert trainer.trainee("policy").num_steps == 0
    assert trainer.trainee("policy").gradients is None, "or every later step would fail"


async def test_no_weight_and_no_gradients_are_valid(model: SlottedModel) -> None:
    """Data without weight add zeros; a step without gradients has gradients of zero."""
    start = tiny_adapter("start", layers=range(2, 4))
    weightless = [replace(d, weights=(0.0,) * len(d.weights)) for d in make_batch()]
    one, other = make_trainer(model, start), make_trainer(model, start)
    output = await train(one, weightless)
    counts = ("train/loss_sum", "train/weight_sum", "train/num_tokens")
    assert output.metrics == dict.fromkeys(counts, 0.0)
    assert [len(x) for x in output.logprobs] == [len(d.targets) for d in weightless]
    assert (await train(one, [])).logprobs == ()
    for trainer in (one, other):
        assert (await step(trainer, 1e-2))["train/grad_norm"] == 0.0
        assert trainer.adapter("policy").version == start.version
        await train(trainer, make_batch())
        await step(trainer, 1e-2)
        moved = trainer.adapter("policy").version
        await step(trainer, 1e-2)
        assert trainer.adapter("policy").version != moved, "momentum goes on"
        assert trainer.trainee("policy").num_steps == 3
    assert one.adapter("policy").version == other.adapter("policy").version


def test_what_cannot_be_trained_is_refused(model: SlottedModel, tiny_folder: Path) -> None:
    with pytest.raises(AdapterError, match="was made for 'other'"):
        make_trainer(model, tiny_adapter("a", base="other"))
    trainer = make_trainer(model)
    with pytest.raises(TrainError, match="There is a trainee 'policy' already"):
        trainer.add("policy", tiny_adapter("a"))
    trainer.remove("policy")
    with pytest.raises(TrainError, match=r"There is no trainee 'policy'\. There are: none"):
        trainer.remove("policy")
    packed = load_model(tiny_folder)
    packed.pack()
    with pytest.raises(TrainError, match="packed for inference"):
        make_trainer(packed)


async def test_publish_hands_over_the_current_weights_and_retires_the_last(
    model: SlottedModel,
) -> None:
    shelf = FakeAdapters()
    start = tiny_adapter("start", layers=range(2, 4))
    trainer = LoraTrainer(model, config=TrainerConfig(), publisher=AdapterPublisher(shelf))
    trainer.add("policy", start)
    assert isinstance(trainer, Trainer)
    first = await trainer.publish("policy")
    assert first == ModelRef(name="policy", version=start.version)
    assert await trainer.publish("policy") == first and set(shelf.loaded) == {first}
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    second = await trainer.publish("policy")
    assert second.version != start.version and set(shelf.loaded) == {second}
    kept = shelf.loaded[second].factors["model.layers.3.mlp.up_proj"].b.clone()
    await train(trainer, make_batch())
    await step(trainer, 1e-2)
    assert torch.equal(kept, shelf.loaded[second].factors["model.layers.3.mlp.up_proj"].b)
    with pytest.raises(TrainError, match="has no publisher"):
        await make_trainer(model).publish("policy")
    whole = ModelWeights(name="m", tensors={}, version="1")
    with pytest.raises(TrainError, match="m is a whole model"):
        await AdapterPublisher(shelf).publish(whole)
    await shelf.unload(second)
    with pytest.raises(EngineError, match="not loaded"):
        await shelf.unload(second)


async def test_trainees_of_one_start_are_published_apart(model: SlottedModel) -> None:
    shelf = FakeAdapters()
    trainer = LoraTrainer(model, config=TrainerConfig(), publisher=AdapterPublisher(shelf))
    start = tiny_adapter("start", layers=range(2, 4))
    for name in ("a", "b"):
        trainer.add(name, start)
    first = [await trainer.publish(name) for name in ("a", "b")]
    assert len(set(first)) == 2 and set(shelf.loaded) == set(first)
    await trainer.forward_backward([TrainRequest(trainee="b", data=tuple(make_batch()))])
    await trainer.optim_step([OptimStep(trainee="b", learning_rate=1e-2)])
    second = await trainer.publish("b")
    assert second != first[1] and set(shelf.loaded) == {first[0], second}


STARTS = {
    "a": tiny_adapter("a", rank=2, layers=range(1, 3), seed=1),
    "b": tiny_adapter("b", rank=7, targets=ATTENTION, seed=2),
    "c": tiny_adapter("c", rank=4, layers=range(3, 4), seed=3),
}


async def test_trainers_of_one_model_at_once_do_not_touch_each_other(
    model: SlottedModel, tiny_folder: Path
) -> None:
    adapter = tiny_adapter("resident", seed=4)
    shared = load_model(tiny_folder)
    shared.bank.put(0, adapter)
    held = shared.linears["model.layers.1.mlp.up_proj"].a
    assert held is not None

    async def run(trainer: LoraTrainer) -> str:
        for seed in range(3):
            await train(trainer, make_batch(seed=seed))
            await step(trainer, 1e-2)
        return trainer.adapter("policy").version

    starts = STARTS.values()
    together = await asyncio.gather(*[run(make_trainer(shared, start)) for start in starts])
    alone = [await run(make_trainer(model, start)) for start in starts]
    assert together == alone
    assert shared.linears["model.layers.1.mlp.up_proj"].a is held and not held.requires_grad
    assert torch.equal(held[0], adapter.factors["model.layers.1.mlp.up_proj"].a)
    assert all(linear.a is None for linear in model.linears.values())


async def test_calls_are_done_in_their_order(model: SlottedModel) -> None:
    """Not awaited one by one: each waits for those before it."""
    trainer, straight = make_trainer(model), make_trainer(model)
    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(train(trainer, make_batch(seed=seed)))
            group.create_task(step(trainer, 1e-2))
    for seed in range(4):
        await train(straight, make_batch(seed=seed))
        await step(straight, 1e-2)
    assert trainer.adapter("policy").version == straight.adapter("policy").version


async def test_calls_go_to_the_trainees_there_were_when_they_began(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is removed, and another added under its name, while its calls wait for a slow one."""
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(CrossEntropy):
        def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
            has_begun.set()
            assert may_end.wait(timeout=30)
            return super().__call__(logprobs, targets)

    monkeypatch.setitem(LOSSES, "slow", Slow)
    trainer = make_trainer(model)
    trainer.add("other", STARTS["a"])
    removed = trainer.trainee("policy")
    data = tuple(make_batch())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        request = TrainRequest(trainee="other", data=data, loss="slow")
        slow = group.create_task(trainer.forward_backward([request]))
        trained = group.create_task(train(trainer, data))
        stepped = group.create_task(step(trainer, 1e-2))
        again = group.create_task(train(trainer, data))
        assert await asyncio.to_thread(has_begun.wait, 30)
        trainer.remove("policy")
        may_end.set()
        await asyncio.to_thread(trainer.add, "policy", STARTS["b"])
    assert slow.result()[0].error == "", "the removal waited for it until it gave up"
    assert trained.result().logprobs and stepped.result()["train/grad_norm"] > 0
    assert again.result().logprobs and removed.num_steps == 1 and removed.gradients is not None
    assert trainer.trainee("policy").num_steps == 0
    assert trainer.trainee("policy").gradients is None


@pytest.mark.parametrize("is_held", [False, True], ids=["advantages", "advantages and KL"])
async def test_data_without_gradient_are_read_and_no_more(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Of a group whose answers are all equally good the advantages are 0. A KL term has a gradient
    all the same."""

    def drawn(number: int, advantage: float) -> Datum:
        columns = {"sampled_logprobs": (-2.0, -3.0), "reference_logprobs": (-2.5, -2.5)}
        tokens = (5, 6 + number, 7)
        return next_tokens(tokens, (0.0, 1.0, 1.0), advantages=(advantage, advantage), **columns)

    batch = [drawn(number, number % 2) for number in range(6)]
    options: dict[str, Json] = {"kl": {"weight": 0.5}} if is_held else {}
    learned: list[int] = []
    grad = torch.autograd.grad

    def counted(losses: Any, leaves: Any, **keys: Any) -> Any:
        learned.append(len(losses))
        return grad(losses, leaves, **keys)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    found, whole = make_trainer(model), make_trainer(model)
    output = await train(found, batch, "importance_sampling", options)
    assert len(learned) == 1
    monkeypatch.setattr(ImportanceSampling, "learns_from", lambda _loss, _datum: True)
    expected = await train(whole, batch, "importance_sampling", options)
    assert found.trainee("policy").gradients is not None
    torch.testing.assert_close(
        found.trainee("policy").gradients, whole.trainee("policy").gradients, atol=1e-5, rtol=1e-5
    )
    for one, other in zip(output.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert output.metrics == pytest.approx(expected.metrics, abs=1e-4)


async def test_a_loss_sees_the_columns_of_its_targets(
    model: SlottedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Targets] = []

    class Spy(Config):
        type: Literal["spy"] = "spy"
        factor: float = 1.0
        needs: ClassVar[tuple[Column, ...]] = ("advantages",)

        def learns_from(self, datum: Datum) -> bool:
            return any(datum.advantages)

        def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
            seen.append(targets)
            loss = -(targets.advantages * logprobs).sum() * self.factor
            return LossOutput(loss=loss, sums={"spied": targets.advantages.sum() * self.factor})

    monkeypatch.setitem(LOSSES, "spy", Spy)
    batch = [
        next_tokens(
            (5, 6, 7, 8),
            (0.0, 1.0, 0.0, 1.0),
            sampled_logprobs=(-1.0, -2.0, -3.0),
            reference_logprobs=(-5.0, -6.0, -7.0),
            advantages=(0.5, 9.0, 1.5),
        ),
        next_tokens(
            (5, 9), (0.0, 2.0), sampled_logprobs=(-4.0,), reference_logprobs=(-8.0,),
            advantages=(3.0,),
        ),
    ]  # fmt: skip
    output = await train(make_trainer(model), batch, "spy", {"factor": 2.0})
    [targets] = seen
    assert targets.weights.tolist() == [2.0, 1.0, 0.0, 1.0], "short data first"
    assert targets.datum.tolist() == [0, 1, 1, 1]
    assert targets.sampled_logprobs.tolist() == [-4.0, -1.0, -2.0, -3.0]
    assert targets.reference_logprobs.tolist() == [-8.0, -5.0, -6.0, -7.0]
    assert targets.advantages.tolist() == [3.0, 0.5, 9.0, 1.5]
    assert output.metrics["train/spied"] == pytest.approx(2 * 14.0 / 4.0)
    assert [len(x) for x in output.logprobs] == [3, 1], "in the order of the request"


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
    await step(trainer, 1e-7)
    # A step that bfloat16 could not represent is not lost.
    assert trainer.adapter("policy").version != start.version
