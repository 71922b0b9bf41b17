"""Which works are computed together: stages of one kind, each model's works in their order.

    ada:  fb fb step        stage 1   forward_backward   ada ada bob
    bob:  fb step           stage 2   optim_step         ada bob cyd
    cyd:  step

Gradients of all models come before steps, so that as many models as possible share a call. A work
that may have ended the service before is alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rookery.service.work import Command

__all__ = ["stages"]

_TOGETHER = ("forward_backward", "forward")
"""All that a model has at its head go into one call."""


def stages(
    works: Sequence[Command], *, is_alone: Callable[[Command], bool] = lambda _: False
) -> Iterator[list[Command]]:
    """Calls in order: each has works of one kind and one base model."""
    lines: dict[str, deque[Command]] = {}
    for work in works:
        lines.setdefault(work.owner, deque()).append(work)
    while lines:
        kind, base_model = min(
            ((line[0].kind, line[0].base_model) for line in lines.values()), key=_rank
        )
        heads = [line for line in lines.values() if _call(line[0]) == (kind, base_model)]
        heads.sort(key=lambda line: not is_alone(line[0]))
        if kind not in (*_TOGETHER, "optim_step") or is_alone(heads[0][0]):
            heads = heads[:1]
        stage: list[Command] = []
        for line in heads:
            stage.append(line.popleft())
            while (
                kind in _TOGETHER
                and line
                and _call(line[0]) == (kind, base_model)
                and not any(map(is_alone, (stage[0], line[0])))
            ):
                stage.append(line.popleft())
        yield stage
        lines = {owner: line for owner, line in lines.items() if line}


def _call(work: Command) -> tuple[str, str]:
    return work.kind, work.base_model


def _rank(call: tuple[str, str]) -> tuple[int, str]:
    """Making and loading first, then gradients, steps last."""
    order = {"forward_backward": 1, "forward": 2, "optim_step": 3}
    return order.get(call[0], 0), call[1]
