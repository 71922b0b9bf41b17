"""Names of base models: one model has several, and adapters, folders and servers each use another.

canonical_model("smollm2")                                -> "smollm2-135m-instruct"
canonical_model("HuggingFaceTB/SmolLM2-135M-Instruct")    -> "smollm2-135m-instruct"
canonical_model("/models/SmolLM2-135M-Instruct/")         -> "smollm2-135m-instruct"
loadable_model("smollm2")                                 -> "HuggingFaceTB/SmolLM2-135M-Instruct"
"""

import re

__all__ = ["canonical_model", "loadable_model"]

_HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Rookery's own names, and what transformers, peft and vLLM load as the same model."""

_HUB_CACHE = re.compile(r"(?:^|/)models--(?P<model>[^/]+)/snapshots/[^/]+$")
"""Where the Hugging Face cache keeps a model: .../models--Qwen--Qwen3-8B/snapshots/9c925d64."""


def canonical_model(name: str) -> str:
    """The same text for all names of one model: Rookery's own, a Hugging Face id, a folder.

    It is the model's name without owner and folders, in lower case; "" stays "", not known.
    """
    path = loadable_model(name).rstrip("/")
    cached = _HUB_CACHE.search(path)
    if cached is not None:
        path = cached["model"].rpartition("--")[2]
    return path.rpartition("/")[2].lower()


def loadable_model(name: str) -> str:
    """A name that other programs can load; names that are not Rookery's own stay as they are."""
    return _HUB_IDS.get(name.lower(), name)
