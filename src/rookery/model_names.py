"""The names a base model goes by: one rule for the embedded engine, the fleet and adapters.

    model_names("/models/SmolLM2-135M-Instruct")      # {"smollm2-135m-instruct"}
    is_named("smollm2", model_names(...))             # True: an adapter for one fits the other

A model is known by the last part of its folder or Hugging Face id, in lower case. A folder of
Hugging Face's cache counts as the id it was fetched by.
"""

import re

__all__ = ["SMOLLM2", "is_named", "model_names"]

SMOLLM2 = "SmolLM2-135M-Instruct"
"""What `smollm2`, Rookery's short name for it, is called everywhere else."""
_SHORT_NAMES = {"smollm2": SMOLLM2.lower()}
_HUB_FOLDER = re.compile(r"(?:^|/)models--[^/]*?--([^/]+)/snapshots/[^/]+$")


def model_names(*names: str) -> frozenset[str]:
    """The same model's folders and ids, each as the name that adapters are compared by."""
    return frozenset(_plain(name) for name in names if name)


def is_named(name: str, names: frozenset[str]) -> bool:
    """Whether `name` (a folder, an id, a short name) is one of a model's `model_names`."""
    return _plain(name) in names


def _plain(name: str) -> str:
    path = name.rstrip("/")
    cached = _HUB_FOLDER.search(path)
    last = cached[1] if cached else path.rsplit("/", 1)[-1]
    return _SHORT_NAMES.get(last.lower(), last.lower())
