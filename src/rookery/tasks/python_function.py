"""User functions, named in a config as `file.py:function` or `package.module:function`.

    reward = find_function("my_rewards.py:politeness", what="scorer")

This is the only place where a config value becomes an import, since no dict can list user code.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from rookery.errors import TaskError, boundary
from rookery.paths import expanded

__all__ = [
    "LARGEST",
    "FunctionName",
    "exits_as_errors",
    "find_function",
    "finite_number",
    "function_from_folder",
    "read_source",
    "shown",
]


LARGEST = 1e100
"""Largest number a user function may return: sums and squares stay finite."""


def _check_name(value: str) -> str:
    module, _, name = value.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(
            f"{value!r} does not name a function: write file.py:function or module:function"
        )
    return value


FunctionName = Annotated[str, AfterValidator(_check_name)]
"""`path/to/file.py:function`, or `package.module:function` of an installed package."""


def function_from_folder(name: str, folder: Path) -> str:
    """Resolve the file in a function name, if any, relative to a folder."""
    place, _, function = name.rpartition(":")
    return f"{expanded(place, folder).resolve()}:{function}" if place.endswith(".py") else name


def find_function(spec: str, *, what: str) -> Callable[..., Any]:
    """Import the function; TaskError if that fails. `what` ("scorer", "game") is for messages."""
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place), what) if place.endswith(".py") else _import(place, what)
    function = vars(module).get(name)
    if not callable(function):
        names = sorted(
            n
            for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__
        )
        known = f"its functions are {', '.join(names)}" if names else "it has no functions"
        raise TaskError(f"The {what} {spec} cannot be used: {place} has no {name}; {known}.")
    return function  # type: ignore[no-any-return]


def read_source(spec: str, *, what: str) -> bytes:
    """Return the present bytes of the file that holds the function; b"" if there is no file."""
    place, _, _ = spec.rpartition(":")
    path = place if place.endswith(".py") else getattr(_import(place, what), "__file__", None)
    if path is None:
        return b""
    _require_file(Path(path), what)
    with boundary(TaskError, f"Reading the {what} file {path}", foreign=(OSError,)):
        return Path(path).read_bytes()


def finite_number(returned: object) -> float | None:
    """Convert a returned value to float; None unless it is a number from -LARGEST to LARGEST."""
    if not isinstance(returned, Real):
        return None
    try:
        number = float(returned)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if abs(number) <= LARGEST else None  # False for NaN too


@contextmanager
def exits_as_errors(what: str) -> Iterator[None]:
    """Turn a call of exit() in user code into a TaskError, so that it cannot end the program."""
    try:
        yield
    except SystemExit as error:
        raise TaskError(
            f"{what} called exit({error.code}): raise an error that says what is wrong."
        ) from error


def shown(returned: object) -> str:
    """Format a returned value for an error message: `nan (float)`."""
    kind = type(returned).__name__
    if isinstance(returned, int) and returned.bit_length() > 1024:
        return f"a number of more than 300 digits ({kind})"  # repr refuses more than 4300 digits
    return f"{returned!r:.80} ({kind})"


def _require_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise TaskError(
            f"There is no {what} file {path} (looked in {path.absolute().parent}). "
            "Write file.py:function with a path from the current folder, or an absolute one."
        )


def _load_file(path: Path, what: str) -> ModuleType:
    _require_file(path, what)
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"rookery_{what}_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up there
    with boundary(TaskError, f"Reading the {what} file {path}"):
        spec.loader.exec_module(module)
    return module


def _import(name: str, what: str) -> ModuleType:
    with boundary(
        TaskError,
        f"Importing the {what} module {name}",
        remedy={ModuleNotFoundError: "Install it, or name its file: path/to/file.py:function"},
    ):
        return importlib.import_module(name)
