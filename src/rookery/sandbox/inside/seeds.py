"""Random generators start from one seed in every process of a candidate.

`random`, `numpy.random` and `torch` are seeded if they are imported, else as soon as they are:
what a candidate draws does not depend on the worker, nor on what the server has drawn before.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

__all__ = ["seed_generators"]

Note = Callable[[str, tuple[Any, ...]], None]


def seed_generators(seed: int, note: Note | None = None) -> None:
    """`note` is told of every later call of `seed`, as (module, arguments)."""
    load = SourceFileLoader.exec_module

    def seed_if_known(module: ModuleType) -> None:
        if module.__name__ in _SEED:
            _SEED[module.__name__](module, seed)
            if note is not None and module.__name__ != "torch":
                vars(module)["seed"] = _noting(module, note)

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        load(loader, module)
        seed_if_known(module)

    for name in _SEED:
        if name in sys.modules:
            seed_if_known(sys.modules[name])
    vars_of_loader: Any = SourceFileLoader
    vars_of_loader.exec_module = exec_module


def _noting(module: ModuleType, note: Note) -> Callable[..., None]:
    seed = vars(module)["seed"]

    @functools.wraps(seed)
    def noting(*args: Any, **options: Any) -> None:
        seed(*args, **options)
        note(module.__name__, (*args, *options.values()))

    return noting


def _seed_random(module: ModuleType, seed: int) -> None:
    vars(module)["seed"](seed)


def _seed_numpy(module: ModuleType, number: int) -> None:
    """Also generators that a program makes without a seed, each with one of its own."""
    vars(module)["seed"](number % 2**32)
    numbers = itertools.count()
    default_rng = vars(module)["default_rng"]

    @functools.wraps(default_rng)
    def seeded(seed: Any = None) -> Any:
        return default_rng((number, next(numbers)) if seed is None else seed)

    vars(module)["default_rng"] = seeded


def _seed_torch(module: ModuleType, seed: int) -> None:
    vars(module)["manual_seed"](seed)


_SEED: dict[str, Callable[[ModuleType, int], None]] = {
    "random": _seed_random,
    "numpy.random": _seed_numpy,
    "torch": _seed_torch,
}
