"""A particle's step against its formula, on delta W and on the factors."""

import pytest
import torch
from weights.made import dense, made

from rookery.seeding import bulk_stream
from rookery.types import Adapter
from rookery.weights.move import Guides, MoveConfig, move

X, OWN, BEST, WORST = made(0), made(1), made(2), made(3)


def strengths(method: MoveConfig, key: tuple[int, ...]) -> list[float]:
    """The four strengths times their draws, divided by the sum."""
    drawn = bulk_stream("move", *key).random(4)
    four = [method.inertia, method.cognitive, method.social, method.repel]
    parts = [float(d) * s for d, s in zip(drawn, four, strict=True)]
    return [part / sum(parts) for part in parts]


def test_a_step_in_delta_space() -> None:
    method, key = MoveConfig(step=0.4), (1, 2)
    first = move(
        X, guides=Guides(own_best=OWN, best=BEST, worst=WORST), method=method, key=key, rank=12
    )
    _, c, s, r = strengths(method, key)
    x, own, best, worst = (dense(adapter) for adapter in (X, OWN, BEST, WORST))
    for layer in x:
        v = (
            c * (own[layer] - x[layer])
            + s * (best[layer] - x[layer])
            - r * (worst[layer] - x[layer])
        )
        assert torch.allclose(dense(first.velocity)[layer], v, atol=1e-4)
        assert torch.allclose(dense(first.adapter)[layer], x[layer] + 0.4 * v, atol=1e-4)


def test_inertia_carries_the_velocity_on() -> None:
    method = MoveConfig(cognitive=0, social=0, repel=0, step=1.0)
    guides = Guides(own_best=OWN, best=BEST, worst=WORST, velocity=made(4))
    moved = move(X, guides=guides, method=method, key=(1,), rank=12)
    for layer, delta in dense(X).items():
        speed = dense(made(4))[layer]
        assert torch.allclose(dense(moved.velocity)[layer], speed, atol=1e-4)
        assert torch.allclose(dense(moved.adapter)[layer], delta + speed, atol=1e-4)


def test_a_step_in_factor_space_and_the_next() -> None:
    method = MoveConfig(space="factor")
    guides = Guides(own_best=OWN, best=BEST, worst=WORST)
    one = move(X, guides=guides, method=method, key=(1,))
    two = move(
        one.adapter,
        guides=Guides(own_best=OWN, best=BEST, worst=WORST, velocity=one.velocity),
        method=method,
        key=(2,),
    )
    for layer in X.factors:
        for factor in "ab":
            x, own, best, worst = (
                getattr(adapter.factors[layer], factor) for adapter in (X, OWN, BEST, WORST)
            )
            v = torch.zeros_like(x)
            for key, moved in (((1,), one), ((2,), two)):
                i, c, s, r = strengths(method, key)
                v = i * v + c * (own - x) + s * (best - x) - r * (worst - x)
                x = x + 0.5 * v
                assert torch.allclose(getattr(moved.adapter.factors[layer], factor), x, atol=1e-5)
                assert torch.allclose(getattr(moved.velocity.factors[layer], factor), v, atol=1e-5)


@pytest.mark.parametrize("space", ["delta", "factor"])
def test_where_all_guides_are_here_nothing_moves(space: str) -> None:
    method = MoveConfig.model_validate({"space": space})
    moved = move(X, guides=Guides(own_best=X, best=X, worst=X), method=method, key=(1,))
    for layer, delta in dense(X).items():
        assert torch.allclose(dense(moved.adapter)[layer], delta, atol=1e-4)
    assert moved.adapter.name == X.name and moved.adapter.rank == X.rank


def test_no_strength_at_all_stays_and_keys_decide() -> None:
    guides = Guides(own_best=OWN, best=BEST, worst=WORST)
    still = MoveConfig(inertia=0, cognitive=0, social=0, repel=0)
    moved = move(X, guides=guides, method=still, key=(1,))
    assert all(torch.allclose(dense(moved.adapter)[k], v, atol=1e-4) for k, v in dense(X).items())
    versions = [_version(guides, key) for key in (1, 1, 2)]
    assert versions[0] == versions[1] != versions[2]


def _version(guides: Guides, key: int) -> str:
    adapter: Adapter = move(X, guides=guides, method=MoveConfig(), key=(key,)).adapter
    return adapter.version
