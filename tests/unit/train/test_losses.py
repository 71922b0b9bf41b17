"""Losses against the formulas of their papers, written here a second time over padded tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_batch import (
    MAX_TOKENS,
    DrawnBatch,
    averaged_data,
    draw_batch,
    loss_and_gradient,
    targets_of,
)
from marks import long
from tiny_training import make_batch, make_trainer, train

from rookery.errors import ConfigError, TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import TrainerConfig
from rookery.train.losses import LOSSES, PolicyLoss, make_loss
from rookery.train.losses.loss import Average, averaged, merged_metrics
from rookery.types import Datum, TrainRequest

CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "ppo")
POLICY = (*CLIPPED, "cispo", "importance_sampling", "reinforce", "dro")
CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}
AVERAGES = {"grpo": "sequence", "gspo": "sequence", "dr_grpo": "constant", "bnpo": "call"}


def policy_loss(name: str, **options: Any) -> PolicyLoss:
    loss = make_loss(name, options)
    assert isinstance(loss, PolicyLoss)
    return loss


def expected(
    name: str, calls: list[DrawnBatch], options: dict[str, Any]
) -> tuple[float, torch.Tensor]:
    """The loss of a step of these calls and its gradient, [all rows, T]."""
    num_rows = sum(len(batch.mask) for batch in calls)
    num_tokens = sum(batch.mask.sum() for batch in calls)
    total = torch.zeros((), dtype=torch.float64)
    gradients: list[torch.Tensor] = []
    for batch in calls:
        current = batch.current.clone().requires_grad_()
        losses = expected_tokens(name, batch, current, options) * batch.mask
        average = options.get("average", AVERAGES.get(name, "token"))
        if average == "sequence":
            loss = (losses.sum(1) / batch.mask.sum(1)).sum() / num_rows
        elif average == "token":
            loss = losses.sum() / num_tokens
        elif average == "call":
            loss = losses.sum() / batch.mask.sum() / len(calls)
        else:
            loss = losses.sum() / (num_rows * MAX_TOKENS)
        gradients += torch.autograd.grad(loss, [current])
        total += loss.detach()
    return total.item(), torch.cat(gradients)


def expected_tokens(
    name: str, batch: DrawnBatch, current: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    advantages = batch.advantages[:, None]
    default = "current" if name == "reinforce" else "sampled"
    trainer = batch.old if options.get("ratio_to") == "old" else current.detach()
    compared = {"sampled": batch.sampled, "old": batch.old, "current": current.detach()}
    log_ratio = current - compared[options.get("ratio_to", default)]
    if name == "gspo":
        log_ratio = ((log_ratio * batch.mask).sum(1) / batch.mask.sum(1))[:, None]
    ratio = log_ratio.exp()
    low, high = CLIPS.get(name, (0.2, 0.2))
    low, high = options.get("clip_low", low), options.get("clip_high", high)
    if name in CLIPPED:
        near = torch.clamp(ratio, 1 - low, 1 + high)
        far = torch.clamp(ratio, max=options.get("max_ratio"), min=0.0)
        losses = -torch.min(far * advantages, near * advantages)
    elif name == "cispo":
        bounds = options.get("min_ratio", 0.0), options.get("max_ratio", 5.0)
        losses = -torch.clamp(ratio, *bounds).detach() * advantages * current
    elif name == "dro":
        losses = options.get("beta", 0.05) / 2 * log_ratio**2 - advantages * current
    elif name == "reinforce":
        losses = -advantages * current
    else:
        losses = -ratio * advantages
    if correction := options.get("correction"):
        mismatch = (trainer - batch.sampled) * batch.mask
        if correction.get("level") == "sequence":
            mismatch = mismatch.sum(1, keepdim=True)
        mismatch = mismatch.exp()
        low, high = correction.get("minimum", 0.0), correction.get("maximum", 3.0)
        inside = ((mismatch >= low) & (mismatch <= high)).double()
        if options.get("ratio_to", default) == "sampled":
            losses = losses * inside
        elif correction.get("mode") == "mask":
            losses = losses * inside * mismatch
        else:
            losses = losses * mismatch.clip(low, high)
    if kl := options.get("kl"):
        d = current - batch.reference
        estimates = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}
        losses = losses + kl["weight"] * estimates[kl["estimator"]]
    return losses


def token_mean(batch: DrawnBatch, values: torch.Tensor) -> float:
    return ((values * batch.mask).sum() / batch.mask.sum()).item()


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "old": {"ratio_to": "old"},
    "current": {"ratio_to": "current"},
    "k1": {"kl": {"estimator": "k1", "weight": 0.3}},
    "k2": {"kl": {"estimator": "k2", "weight": 0.3}},
    "k3": {"kl": {"estimator": "k3", "weight": 0.3}},
    "by_sequence": {"average": "sequence"},
    "by_token": {"average": "token"},
    "by_call": {"average": "call"},
    "constant": {"average": "constant"},
    "mask": {"correction": {"mode": "mask", "maximum": 1.2, "minimum": 0.8}},
}
for _to in ("old", "current"):
    for _level in ("token", "sequence"):
        for _mode in ("truncate", "mask"):
            _bounds = {"minimum": 0.8, "maximum": 1.2}
            OPTIONS[f"{_to}_{_level}_{_mode}"] = {
                "ratio_to": _to,
                "correction": {"level": _level, "mode": _mode, **_bounds},
            }


WHOLE = ("grpo", "gspo", "cispo")
"""Losses that are tried with all options, of tokens and of sequences; others with those that a loss
computes itself."""
OWN = ("defaults", "old", "current", "k3", "mask", "old_token_truncate")
CASES = [
    pytest.param(name, options, id=f"{name}-{key}", marks=[] if is_own else [long])
    for name in POLICY
    for key, options in OPTIONS.items()
    if (name, options.get("ratio_to")) not in (("reinforce", "old"), ("dro", "current"))
    for is_own in [name in WHOLE or key in OWN]
]  # what has no ratio, or is not held to anything
CASES += [
    pytest.param("cispo", {"min_ratio": 0.95, "max_ratio": 1.05}, id="cispo-bounds"),
    pytest.param("dro", {"beta": 0.7}, id="dro-beta"),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_loss_and_gradient_are_those_of_the_formula(name: str, options: dict[str, Any]) -> None:
    """Of one call, and of a step of two calls of other sizes."""
    batch = draw_batch()
    loss = policy_loss(name, **options)
    for calls in ([batch], [batch.rows(slice(0, 2)), batch.rows(slice(2, None))]):
        total, gradient = loss_and_gradient(loss, loss.average, calls)
        wanted, wanted_gradient = expected(name, calls, options)
        assert total == pytest.approx(wanted, abs=1e-9)
        torch.testing.assert_close(gradient, wanted_gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", CLIPPED)
def test_clips_are_as_chosen(name: str) -> None:
    batch = draw_batch(seed=3)
    options = {"clip_low": 0.1, "clip_high": 0.4, "max_ratio": 1.5}
    loss = policy_loss(name, **options)
    total, gradient = loss_and_gradient(loss, loss.average, [batch])
    wanted, wanted_gradient = expected(name, [batch], options)
    assert total == pytest.approx(wanted, abs=1e-9)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("average", ["sequence", "token", "constant"])
def test_a_step_in_several_calls_has_the_gradient_of_one_call(average: Any) -> None:
    batch, loss = draw_batch(), policy_loss("grpo", kl={"weight": 0.1})
    whole = loss_and_gradient(loss, average, [batch])
    for cut in (1, 3):
        parts = [batch.rows(slice(0, cut)), batch.rows(slice(cut, None))]
        total, gradient = loss_and_gradient(loss, average, parts)
        assert total == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(gradient, whole[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(1.5, 1.0, 0.0), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (0.5, -1.0, 0.0), (1.1, -1.0, 1.1)],
)
def test_the_clip_stops_what_has_moved_far_enough(
    name: str, ratio: float, advantage: float, slope: float
) -> None:
    """d loss / d log p: a token that is to become less likely is pushed until 1 - clip_low."""
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = DrawnBatch(
        mask=one, current=torch.log(ratio * one * 0.2), old=one, reference=one,
        sampled=torch.log(one * 0.2), advantages=one[0] * advantage,
    )  # fmt: skip
    _, gradient = loss_and_gradient(policy_loss(name), "token", [batch])
    assert gradient.item() == pytest.approx(slope)


def test_metrics_say_what_the_loss_saw() -> None:
    batch = draw_batch()
    loss = policy_loss("ppo", ratio_to="old", kl={"estimator": "k2"}, correction={"maximum": 1.1})
    [data] = averaged_data([batch], loss.average)
    output = loss(batch.current.flatten(), targets_of(data))
    ratio = (batch.current - batch.old).exp()
    advantages = batch.advantages[:, None]
    mismatch = batch.old - batch.sampled
    wanted = {
        "ratio": token_mean(batch, ratio),
        "clip_low": token_mean(batch, ((ratio < 0.8) & (advantages < 0)).double()),
        "clip_high": token_mean(batch, ((ratio > 1.2) & (advantages > 0)).double()),
        "mismatch": token_mean(batch, mismatch.abs()),
        "corrected": token_mean(batch, (mismatch.exp() > 1.1).double()),
        "kl": token_mean(batch, (batch.current - batch.reference) ** 2 / 2),
        "entropy": token_mean(batch, -batch.current),
    }
    assert output.sums.keys() == {"loss", *wanted}
    assert {key: output.sums[key].item() for key in wanted} == pytest.approx(wanted)
    assert 0 < wanted["clip_low"] < 1 and 0 < wanted["clip_high"] < 1
    learned = batch.mask.bool()
    assert output.maxima["ratio"].item() == pytest.approx(ratio[learned].max().item())
    assert output.maxima["mismatch"].item() == pytest.approx(mismatch[learned].abs().max().item())


def test_what_has_no_weight_is_not_read() -> None:
    """Not even where its columns would overflow."""
    batch = draw_batch()
    hidden = batch.mask == 0
    wild = DrawnBatch(
        mask=batch.mask, current=batch.current, old=batch.old.masked_fill(hidden, -1e4),
        sampled=batch.sampled.masked_fill(hidden, -1e4),
        reference=batch.reference.masked_fill(hidden, 1e4), advantages=batch.advantages,
    )  # fmt: skip
    for name in POLICY:
        loss = policy_loss(name, kl={"weight": 0.1})
        total, gradient = loss_and_gradient(loss, loss.average, [batch])
        wild_total, wild_gradient = loss_and_gradient(loss, loss.average, [wild])
        assert wild_total == total and torch.equal(wild_gradient, gradient)
        assert not gradient[hidden].any()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("grpo", {"clip": 0.2}, "clip"),
        ("grpo", {"clip_low": -0.1}, "clip_low"),
        ("grpo", {"max_ratio": 1.1}, r"max_ratio is 1.1.*more than 1 \+ clip_high = 1.2"),
        ("grpo", {"average": "words"}, "average"),
        ("grpo", {"kl": {"estimator": "k4"}}, "k4"),
        ("grpo", {"correction": {}}, "write ratio_to current or old"),
        ("grpo", {"correction": {"minimum": 4.0, "mode": "mask"}}, "below the maximum"),
        ("reinforce", {"ratio_to": "old"}, "ratio_to"),
        ("reinforce", {"clip_low": 0.1}, "clip_low"),
        ("cispo", {"max_ratio": 0.0}, "max_ratio"),
    ],
)
def test_options_that_do_not_exist_are_refused(
    name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_loss(name, options)


def test_an_unknown_loss_names_all_there_are() -> None:
    with pytest.raises(TrainError, match=r"'grppo' is not a loss.*grpo.*reinforce"):
        make_loss("grppo", {})
    assert set(LOSSES) == {"cross_entropy", "custom", *POLICY}


def test_a_loss_asks_for_the_columns_its_options_need() -> None:
    assert set(policy_loss("grpo").needs) == {"advantages", "sampled_logprobs"}
    assert set(policy_loss("grpo", ratio_to="old").needs) == {"advantages", "old_logprobs"}
    assert set(policy_loss("reinforce").needs) == {"advantages"}
    everything = policy_loss("gspo", ratio_to="old", kl={}, correction={})
    assert set(everything.needs) == {
        "advantages", "old_logprobs", "reference_logprobs", "sampled_logprobs",
    }  # fmt: skip


def test_averages_are_divided_weights() -> None:
    """Answers of 2 and 6 tokens, at most 10 drawn: in one call, and in a call each."""
    short, long = (
        Datum(tokens=(5,) * n, positions=tuple(range(n)), targets=(5,) * n, weights=(1.0,) * n)
        for n in (2, 6)
    )
    together: dict[Average, tuple[float, ...]] = {
        "sequence": (1 / 4, 1 / 12),
        "token": (1 / 8,) * 2,
        "constant": (1 / 20,) * 2,
    }
    for average, wanted in together.items():
        for calls in ([[short, long]], [[short], [long]]):
            data = [d for call in averaged(calls, average, max_tokens=10) for d in call]
            assert [d.weights[-1] for d in data] == pytest.approx(wanted)
    [[one, other]] = averaged([[short, long]], "call")
    assert (one.weights[0], other.weights[0]) == (1 / 8, 1 / 8)
    [[one], [other]] = averaged([[short], [long]], "call")
    assert (one.weights[0], other.weights[0]) == (1 / 4, 1 / 12)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TrainError, match="negative weights"):
        averaged([[Datum(tokens=(5,), positions=(0,), targets=(6,), weights=(-1.0,))]], "token")
    with pytest.raises(TrainError, match="max_tokens is None: give 1 or more"):
        averaged([[]], "constant")


def test_metrics_of_calls_merge_to_those_of_one_call() -> None:
    reports = [
        {"train/loss": 2.0, "train/ratio_max": 3.0, "train/weight_sum": 3.0, "train/num_tokens": 5},
        {"train/loss": 4.0, "train/ratio_max": 1.0, "train/weight_sum": 1.0, "train/num_tokens": 2},
        {"train/weight_sum": 0.0, "train/num_tokens": 0},
    ]
    assert merged_metrics(reports) == {
        "train/loss": 2.5, "train/ratio_max": 3.0, "train/weight_sum": 4.0, "train/num_tokens": 7,
    }  # fmt: skip


# Losses of drawn tokens through a trainer.


POLICY_LOSSES = ("grpo", "gspo", "reinforce")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


async def drawn_batch(model: SlottedModel, *, shift: float = 0.0) -> list[Datum]:
    """As if drawn by the trainer itself, at temperature 0.7 and from a few kept tokens each."""
    batch = [
        replace(
            datum,
            weights=tuple(float(weight > 0) for weight in datum.weights),
            temperature=0.7,
            kept=tuple(
                tuple(dict.fromkeys((target, 3, 50, 81))) if target % 2 else ()
                for target in datum.targets
            ),
        )
        for datum in make_batch((9, 4, 17, 12, 30))
    ]
    request = TrainRequest(trainee="policy", data=tuple(batch))
    [output] = await make_trainer(model).forward([request])
    assert output.error == ""
    generator = torch.Generator().manual_seed(1)

    def moved(logprobs: tuple[float, ...]) -> tuple[float, ...]:
        noise = torch.randn(len(logprobs), generator=generator) * shift
        return tuple((torch.tensor(logprobs) + noise).tolist())

    return [
        replace(
            datum,
            sampled_logprobs=moved(logprobs),
            old_logprobs=moved(logprobs),
            reference_logprobs=moved(logprobs),
            advantages=(float(2 * (number % 2) - 1),) * len(logprobs),
        )
        for number, (datum, logprobs) in enumerate(zip(batch, output.logprobs, strict=True))
    ]


def gradients(trainer: Any) -> list[torch.Tensor]:
    found = trainer.trainee("policy").gradients
    assert found is not None
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize("name", POLICY_LOSSES)
async def test_at_the_weights_that_drew_the_ratio_is_1(model: SlottedModel, name: str) -> None:
    data = await drawn_batch(model)
    metrics = (await train(make_trainer(model), data, name, {"kl": {}})).metrics
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/mismatch_max"] < 1e-4 and abs(metrics["train/kl"]) < 1e-6
    assert metrics.get("train/clip_low", 0.0) == 0.0


@pytest.mark.parametrize("name", POLICY_LOSSES)
async def test_passes_and_calls_do_not_change_gradients_nor_metrics(
    model: SlottedModel, name: str
) -> None:
    """A sequence's ratio and correction are whole however its step is cut up."""
    options: dict[str, Any] = {
        "ratio_to": "current" if name == "reinforce" else "old",
        "correction": {"level": "sequence", "maximum": 1.5},
        "kl": {"estimator": "k2"},
    }
    loss = make_loss(name, options)
    assert isinstance(loss, PolicyLoss)
    average = "token" if loss.average == "call" else loss.average
    data = await drawn_batch(model, shift=0.3)
    cuts: list[tuple[int, list[list[Datum]]]] = [
        (1024, [data]),
        (1, [data]),
        (25, [data[:1], data[1:3], data[3:]]),
    ]
    found = []
    for pass_tokens, calls in cuts:
        trainer = make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
        weighted = averaged(calls, average, max_tokens=30)
        outputs = [await train(trainer, call, name, options) for call in weighted]
        found.append((gradients(trainer), merged_metrics([o.metrics for o in outputs])))
    (whole, metrics), *others = found
    assert any(gradient.abs().max() > 1e-4 for gradient in whole)
    for other, other_metrics in others:
        assert other_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-4)
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


async def test_a_missing_column_is_a_sentence(model: SlottedModel) -> None:
    data = [replace(d, old_logprobs=()) for d in await drawn_batch(model)]
    request = TrainRequest(
        trainee="policy", data=tuple(data), loss="grpo", loss_options={"ratio_to": "old"}
    )
    [output] = await make_trainer(model).forward_backward([request])
    assert "targets and 0 old_logprobs; give one per target" in output.error


async def test_layers_computed_again_give_the_same_gradients(model: SlottedModel) -> None:
    data = await drawn_batch(model, shift=0.3)
    found = []
    for again in (False, True):
        trainer = make_trainer(model, config=TrainerConfig(checkpoint_layers=again))
        await train(trainer, data, "grpo")
        found.append(gradients(trainer))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
