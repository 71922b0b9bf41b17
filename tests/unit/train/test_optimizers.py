"""8-bit moments: close to those of 32 bit, and restored exactly. torchao compiles its step, which
takes longer than all of this: here it is computed as written."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rookery.errors import TrainError
from rookery.train.schedule import OptimizerKind
from rookery.train.trainee import Trainee
from rookery.types import OptimStep

STEP = OptimStep(trainee="policy", learning_rate=1e-2)


def make_trainee(kind: OptimizerKind) -> Trainee:
    """One weight large enough to have 8-bit moments, and one that is not."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (64, 64), "small": (7,)}
    weights = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}
    return Trainee(weights, fixed={}, optimizer=kind)


def take_steps(trainee: Trainee, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=generator) for p in trainee.parameters]
        trainee.add_gradients(gradients)
        trainee.step(STEP)


@pytest.mark.filterwarnings("ignore")  # torch's compiler and torchao warn of their own code
def test_8_bit_moments_are_restored_exactly(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim", reason="torchao (the extra optim) is not installed")
    whole, first, second = (make_trainee("adamw_8bit") for _ in range(3))
    with torch.compiler.set_stance("force_eager"):
        take_steps(whole, range(4))
        take_steps(first, range(2))
        first.save(tmp_path / "state")
        second.load(tmp_path / "state")
        take_steps(second, range(2, 4))
    pairs = list(zip(whole.parameters, second.parameters, strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    plain = make_trainee("adamw")
    start = [p.detach().clone() for p in plain.parameters]
    take_steps(plain, range(4))
    for wanted, found, before in zip(plain.parameters, whole.parameters, start, strict=True):
        update, other = (wanted - before).flatten(), (found - before).flatten()
        assert torch.cosine_similarity(update, other, dim=0) > 0.98
    with pytest.raises(TrainError, match="other layers, ranks or scales"):
        make_trainee("adamw").load(tmp_path / "state")
