"""Names of base models: adapters, folders and servers name one model differently.

canonical_model("smollm2")                               # "smollm2-135m-instruct"
canonical_model("HuggingFaceTB/SmolLM2-135M-Instruct")   # the same
canonical_model("/models/SmolLM2-135M-Instruct/")        # the same
loadable_model("smollm2")                                # "HuggingFaceTB/SmolLM2-135M-Instruct"
is_named("smollm2", model_names("/models/SmolLM2-135M-Instruct"))       # True
"""

import os
import re
from pathlib import Path

__all__ = [
    "SMOLLM2",
    "cache_folder",
    "canonical_model",
    "is_named",
    "loadable_model",
    "model_names",
]

# The cache folder: models, and the registry of servers that Rookery started.


def cache_folder() -> Path:
    """`$ROOKERY_CACHE`, else `rookery` under the user's cache folder."""
    if chosen := os.environ.get("ROOKERY_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rookery"


SMOLLM2 = "SmolLM2-135M-Instruct"
"""The published name of the model that Rookery calls `smollm2`."""

_HUB_IDS = {"smollm2": f"HuggingFaceTB/{SMOLLM2}"}
"""Rookery's short names -> Hugging Face ids."""

_HUB_CACHE = re.compile(r"(?:^|/)models--(?P<model>[^/]+)/snapshots/[^/]+$")
"""A model in the Hugging Face cache: .../models--Qwen--Qwen3-8B/snapshots/9c925d64."""


def canonical_model(name: str) -> str:
    """Return one text for all names of a model: a short name, a Hugging Face id, a folder.

    It is the name without owner and folders, in lower case. "" (unknown) stays "".
    """
    path = name.rstrip("/")
    cached = _HUB_CACHE.search(path)
    last = cached["model"].rpartition("--")[2] if cached else path.rpartition("/")[2]
    return loadable_model(last).rpartition("/")[2].lower()


def loadable_model(name: str) -> str:
    """Return the Hugging Face id of a short name, and any other name unchanged."""
    return _HUB_IDS.get(name.lower(), name)


def model_names(*names: str) -> frozenset[str]:
    """The canonical forms of a model's folders and ids."""
    return frozenset(canonical_model(name) for name in names if name)


def is_named(name: str, names: frozenset[str]) -> bool:
    """Whether `name` (a folder, an id, a short name) is one of a model's `model_names`."""
    return canonical_model(name) in names
