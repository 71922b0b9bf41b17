"""The error tree. A class names the boundary that was crossed, the message is a sentence.

    RookeryError
    ├── ConfigError    a config file, a flag or a value in them
    ├── ModelError     a base model: its folder, its tokenizer, its architecture
    ├── AdapterError   LoRA weights: a PEFT folder, its config, its shapes, its base
    ├── TaskError      a taskset, one of its rows, a scorer
    ├── RunError       a run directory: its lock, its event log, its blobs
    ├── EngineError    the embedded engine: a refused request, memory, a failed step
    │   └── EngineDownError   the engine is closed, or its driver died
    ├── FleetError     an inference server, local or remote
    │   ├── FleetDownError    no server is available: all are down, or the fleet is closed
    │   └── FleetSettingsError   a server refuses every request with this key or model
    ├── TrainError     a trainer: a loss, a batch, an optimizer step
    ├── ExecutorError  an executor: no worker can be started, or it is closed
    ├── ServiceError   a client of the HTTP service
    │   └── ServiceDownError   the service is away, or refuses every request; an EngineDownError too
    └── SandboxError   an untrusted program

Every message says what was given, what is allowed and what to write instead. The command line
prints it unchanged and exits with 2.
"""

import difflib
import errno
import json
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = [
    "AdapterError",
    "ConfigError",
    "EngineDownError",
    "EngineError",
    "ExecutorError",
    "FleetDownError",
    "FleetError",
    "FleetSettingsError",
    "ModelError",
    "RookeryError",
    "RunError",
    "SandboxError",
    "ServiceDownError",
    "ServiceError",
    "TaskError",
    "TrainError",
    "boundary",
    "did_you_mean",
    "install_extra",
    "is_of_disk",
    "missing_extra",
    "near_path",
    "signal_name",
]

# Names of signals in messages.


def signal_name(number: int) -> str:
    """Return `SIGKILL`, for example, or `signal N` for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


EXTRAS = {
    "accelerate": "hf",
    "cma": "cmaes",
    "datasets": "hf",
    "gguf": "hf",
    "jsonschema": "tasks",
    "math_verify": "tasks",
    "modal": "modal",
    "google": "serve",
    "peft": "hf",
    "prometheus_client": "serve",
    "pyrage": "serve",
    "ray": "ray",
    "sandlock": "evolve",
    "tensorboard": "track",
    "torch": "hf",
    "torchao": "optim",
    "trackio": "track",
    "transformers": "hf",
    "vllm": "vllm",
    "wandb": "track",
    "zstandard": "serve",
}
"""Import names of packages -> the extra of Rookery that installs them."""


class RookeryError(Exception):
    """The root of all errors that Rookery raises on purpose."""


class ConfigError(RookeryError):
    """A config file, a command-line override or a value in them is not usable."""


class ModelError(RookeryError):
    """A base model cannot be found, read or run."""


class AdapterError(RookeryError):
    """An adapter cannot be read, or does not fit the model it is meant for."""


class TaskError(RookeryError):
    """A taskset, one of its rows, or a scorer is not usable."""


class RunError(RookeryError):
    """A run directory cannot be created, owned, read or written."""


class EngineError(RookeryError):
    """The embedded engine cannot serve a request."""


class EngineDownError(EngineError):
    """The embedded engine is closed or dead. The loop ends, can be resumed, and records no
    failure."""


class FleetError(RookeryError):
    """An inference server cannot be started, reached or understood."""


class FleetDownError(FleetError):
    """No server is available. The loop ends, can be resumed, and records no failure."""


class FleetSettingsError(FleetDownError, ConfigError):
    """A server refuses every request because of the key, the model or the address. Waiting does not
    help: the loop ends at once."""


class TrainError(RookeryError):
    """A trainer cannot take a batch or a step."""


class ExecutorError(RookeryError):
    """No worker can run a job. The loop ends, can be resumed, and records no failure."""


class SandboxError(RookeryError):
    """An untrusted program was stopped or could not be started."""


class ServiceError(RookeryError):
    """The HTTP service refuses a request."""


class ServiceDownError(EngineDownError, ServiceError):
    """The service is away, or refuses every request with this key or session."""


def did_you_mean(
    name: str, options: Iterable[str], *, cutoff: float = 0.6, shown: Callable[[str], str] = str
) -> str:
    """Return " Did you mean X?" with the nearest option, or "" if none is near."""
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=cutoff)
    return f" Did you mean {shown(near[0])}?" if near else ""


def near_path(path: Path) -> str:
    """`did_you_mean` for a missing file, among the files of its folder."""
    folder = path.parent
    names = [other.name for other in folder.iterdir()] if folder.is_dir() else []
    return did_you_mean(path.name, names, shown=lambda name: str(folder / name))


def install_extra(extra: str) -> str:
    """The command that adds an extra, from where Rookery itself was installed.

    Never `rookery[extra]` alone: the package index has another project of that name, which pip
    takes wherever it does not see this one.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, for errors alone

    try:
        text = distribution("rookery").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    source = json.loads(text) if text else {}
    url = urlsplit(source.get("url", ""))
    path = unquote(url.path)
    if url.scheme not in ("", "file"):
        return f"pip install 'rookery[{extra}] @ {url.geturl()}'"
    if not path or not os.path.exists(path):  # a container removes it
        path = "./rookery-0.1.0-py3-none-any.whl"
    editable = "-e " if source.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{path}[{extra}]')}"


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """The error that says which extra to install; None if no extra has the module."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return ConfigError(
        f"This needs the package {package}, which is not installed: "
        f"{install_extra(EXTRAS[package])}."
    )


NO_SPACE = os.strerror(errno.ENOSPC)
"""Message of the system for a full disk; libraries repeat it in their own errors."""


def is_of_disk(error: RookeryError) -> bool:
    """Whether the disk is full or away. Some libraries say it only in their message."""
    return isinstance(error.__cause__, OSError) or NO_SPACE in str(error)


@contextmanager
def boundary(
    error: type[RookeryError],
    what: str,
    *,
    foreign: tuple[type[Exception], ...] = (Exception,),
    remedy: Mapping[type[Exception], str] | None = None,
) -> Iterator[None]:
    """Turn foreign exceptions of the block into `error`; Rookery's own pass through.

    >>> with boundary(ModelError, "reading the model folder", foreign=(OSError, ValueError)):
    ...     AutoConfig.from_pretrained(path)
    """
    try:
        yield
    except RookeryError:
        raise
    except foreign as cause:
        hint = next((text for kind, text in (remedy or {}).items() if isinstance(cause, kind)), "")
        detail = " ".join(str(cause).split()) or type(cause).__name__
        if not hint and NO_SPACE in detail:
            hint = "The disk is full: free some space, then go on"
        raise error(f"{what}: {detail}" + (f". {hint}" if hint else "")) from cause
