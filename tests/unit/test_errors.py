"""The error tree: one root, a drawing that is true, and a boundary that lets nothing foreign by."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rookery.errors
from rookery.errors import (
    ConfigError,
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    ModelError,
    RookeryError,
    TaskError,
    boundary,
    install_extra,
)

CLASSES = {
    name: value
    for name, value in vars(rookery.errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}


def test_the_drawing_names_every_class() -> None:
    drawing = re.findall(
        r"^    (?:│   )?(?:[├└]── )?(\w+Error)\b", rookery.errors.__doc__ or "", re.M
    )
    assert sorted(drawing) == sorted(CLASSES)
    others = {
        "boundary", "did_you_mean", "install_extra", "is_of_disk", "missing_extra", "near_path",
        "signal_name",
    }  # fmt: skip
    assert set(CLASSES) | others == set(rookery.errors.__all__)


def test_every_class_is_a_child_of_the_root_or_says_more_than_its_parent() -> None:
    assert RookeryError.__base__ is Exception
    for name, kind in CLASSES.items():
        if kind is not RookeryError:
            parent = {
                "EngineDownError": EngineError,
                "FleetDownError": FleetError,
                "FleetSettingsError": FleetDownError,
                "ServiceDownError": EngineDownError,
            }
            assert kind.__base__ is parent.get(name, RookeryError), name
        assert str(kind("a sentence")) == "a sentence" and kind.__doc__


def test_foreign_errors_become_ours_and_keep_their_cause() -> None:
    cause = OSError("no such\n   file")
    with pytest.raises(ModelError) as caught, boundary(ModelError, "reading x"):
        raise cause
    assert str(caught.value) == "reading x: no such file"
    assert caught.value.__cause__ is cause


def test_an_error_without_words_gives_its_name() -> None:
    with pytest.raises(TaskError, match=r"^scoring: ZeroDivisionError$"):  # noqa: SIM117
        with boundary(TaskError, "scoring"):
            raise ZeroDivisionError


def test_our_own_errors_pass_untouched() -> None:
    own = ConfigError("as it was")
    with pytest.raises(ConfigError) as caught, boundary(ModelError, "reading x"):
        raise own
    assert caught.value is own and own.__cause__ is None


def test_only_the_named_errors_are_ours() -> None:
    with pytest.raises(KeyError), boundary(ModelError, "x", foreign=(OSError, ValueError)):
        raise KeyError("a bug of ours stays a bug")
    with pytest.raises(ModelError), boundary(ModelError, "x", foreign=(OSError,)):
        raise FileNotFoundError("a child of a named one")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_endings_are_no_errors(kind: type[BaseException]) -> None:
    with pytest.raises(kind), boundary(ModelError, "x"):
        raise kind


def test_the_first_remedy_that_fits_is_given() -> None:
    remedies: dict[type[Exception], str] = {FileNotFoundError: "Make it", OSError: "Mend it"}
    for error, words in [
        (FileNotFoundError("gone"), "x: gone. Make it"),
        (PermissionError("shut"), "x: shut. Mend it"),
        (ValueError("odd"), "x: odd"),
    ]:
        with pytest.raises(ModelError) as caught, boundary(ModelError, "x", remedy=remedies):
            raise error
        assert str(caught.value) == words


def test_nothing_happens_when_nothing_is_raised() -> None:
    with boundary(ModelError, "x") as nothing:
        value = 3
    assert value == 3 and nothing is None


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
WHEEL = f"rookery-{PROJECT['version']}-py3-none-any.whl"


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file://{folder}/a%20b"}, "pip install '{folder}/a b[ray]'"),
        ({"url": f"https://x.y/{WHEEL}"}, f"pip install 'rookery[ray] @ https://x.y/{WHEEL}'"),
        (
            {"url": "file://{folder}/a%20b", "dir_info": {"editable": True}},
            "pip install -e '{folder}/a b[ray]'",
        ),
        ({"url": "file:///removed", "dir_info": {}}, f"pip install './{WHEEL}[ray]'"),
        (None, f"pip install './{WHEEL}[ray]'"),
    ],
)
def test_an_extra_is_installed_from_where_rookery_came(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: dict[str, Any] | None,
    command: str,
) -> None:
    """As pip and uv record it (PEP 610); from the index it would be another project."""
    (tmp_path / "a b").mkdir()
    written = json.dumps(source).replace("{folder}", str(tmp_path)) if source else None
    installed = SimpleNamespace(read_text={"direct_url.json": written}.get)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert install_extra("ray") == command.replace("{folder}", str(tmp_path))
