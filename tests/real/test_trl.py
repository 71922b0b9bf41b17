"""Losses beside TRL's own `_compute_loss`, on the same batches, in the same run.

ROOKERY_TRL_PYTHON names a Python that has TRL 1.16.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_batch import MAX_TOKENS, DrawnBatch, averaged_data, draw_batch, targets_of

from rookery.train.losses import PolicyLoss, make_loss

TRL_PYTHON = os.environ.get("ROOKERY_TRL_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not TRL_PYTHON, reason="set ROOKERY_TRL_PYTHON to a Python that has TRL 1.16"
)

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: our loss, our options, TRL's options
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ("bnpo", {}, {"loss_type": "bnpo"}),
    "ppo": ("ppo", {}, {"loss_type": "dapo"}),
    "gspo": ("gspo", {}, {"level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo_low_bound": ("cispo", {"max_ratio": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "kl": ("grpo", {"kl": {"estimator": "k3", "weight": 0.04}}, {"beta": 0.04}),
    "max_ratio": ("grpo", {"max_ratio": 1.5}, {"delta": 1.5}),
    "current": ("grpo", {"ratio_to": "current"}, {}),
    **{
        f"{level}_{mode}_{loss}": (
            loss,
            {"correction": {"level": level, "mode": mode, "maximum": 1.2}, "kl": {}},
            {"loss_type": loss, "beta": 0.04, "epsilon_high": 0.28 if loss == "dapo" else 0.2},
        )
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
        for loss in ("grpo", "dapo")
    },
}


def our_loss(name: str) -> PolicyLoss:
    kind, options, _ = CASES[name]
    loss = make_loss(kind, {"ratio_to": "old", **options})
    assert isinstance(loss, PolicyLoss)
    return loss


def correction_factor(batch: DrawnBatch, correction: dict[str, Any]) -> torch.Tensor:
    """As TRL computes it when it makes a batch of what vLLM answered."""
    difference = (batch.old - batch.sampled) * batch.mask
    if correction["level"] == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if correction["mode"] == "truncate":
        return torch.clamp(ratio, max=correction["maximum"])
    return ratio.masked_fill(ratio > correction["maximum"], 0.0)


def trl_case(name: str, batch: DrawnBatch, calls: list[DrawnBatch]) -> dict[str, Any]:
    _, options, theirs = CASES[name]
    names = ("mask", "current", "reference", "advantages", "old")
    tables = {key: getattr(batch, key).tolist() for key in names}
    if options.get("ratio_to") == "current":
        del tables["old"]
    if "correction" in options:
        factor = correction_factor(batch, options["correction"])
        tables["importance_sampling_ratio"] = factor.tolist()
    return {
        "tables": tables,
        "options": {
            "loss_type": "grpo", "level": "token", "beta": 0.0, "delta": None,
            "epsilon": 0.2, "epsilon_high": 0.2, "max_completion_length": MAX_TOKENS,
            "num_calls": len(calls),
            "num_tokens": sum(call.mask.sum().item() for call in calls), **theirs,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def calls() -> list[DrawnBatch]:
    """Two calls of one step, of as many sequences and other numbers of tokens."""
    batch = draw_batch(seed=1, num_rows=8)
    return [batch.rows(slice(0, 4)), batch.rows(slice(4, None))]


@pytest.fixture(scope="module")
def trl(calls: list[DrawnBatch]) -> dict[tuple[str, int], dict[str, Any]]:
    """What TRL makes of each call of each case."""
    keys = [(name, index) for name in CASES for index in range(len(calls))]
    cases = [trl_case(name, calls[index], calls) for name, index in keys]
    script = Path(__file__).with_name("trl_compute_loss.py")
    done = subprocess.run(
        [TRL_PYTHON, str(script)], input=json.dumps(cases), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(keys, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(
    name: str, calls: list[DrawnBatch], trl: dict[tuple[str, int], dict[str, Any]]
) -> None:
    loss = our_loss(name)
    for index, data in enumerate(averaged_data(calls, loss.average)):
        current = calls[index].current.clone().requires_grad_()
        output = loss(current.flatten(), targets_of(data))
        [gradient] = torch.autograd.grad(output.loss, [current])
        theirs = trl[name, index]
        assert output.loss.item() == pytest.approx(theirs["loss"], abs=1e-9)
        wanted = torch.tensor(theirs["gradient"], dtype=torch.float64)
        torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)
        assert gradient.abs().max() > 1e-3


def test_clip_fractions_are_those_of_trl(
    calls: list[DrawnBatch], trl: dict[tuple[str, int], dict[str, Any]]
) -> None:
    loss = our_loss("ppo")
    for index, batch in enumerate(calls):
        [data] = averaged_data([batch], "token")
        sums = loss(batch.current.flatten(), targets_of(data)).sums
        theirs = trl["ppo", index]["metrics"]
        assert sums["clip_low"].item() == pytest.approx(theirs["clip_ratio/low_mean"])
        assert sums["clip_high"].item() == pytest.approx(theirs["clip_ratio/high_mean"])
