"""The command line in this process, over the tiny model, with small files to work on."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from driving import Command, Ended, tree
from working_folder import files, place

from rookery.cli.app import main
from rookery.embedded import EmbeddedEngine
from rookery.types import SampleRequest

__all__ = ["drawn", "files", "place", "refused", "rookery"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[SampleRequest]:
    """Every request that an embedded engine was asked to continue."""
    requests: list[SampleRequest] = []
    sample = EmbeddedEngine.sample

    async def note(self: EmbeddedEngine, asked: Sequence[SampleRequest]) -> Any:
        requests.extend(asked)
        return await sample(self, asked)

    monkeypatch.setattr(EmbeddedEngine, "sample", note)
    return requests


@pytest.fixture
def rookery(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs `rookery ...` in this process; no command may end in a traceback."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ended(int(ended.value.code or 0), out, err)

    handlers = list(logging.getLogger().handlers)
    yield run
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def refused(rookery: Command, place: Path) -> Command:
    """Runs a command that must be refused: a sentence on stderr, code 2, nothing left behind."""

    def run(*words: object) -> Ended:
        before = tree(place)
        ended = rookery(*words)
        assert ended.code == 2 and ended.out == ""
        assert ended.err.splitlines()[-1].startswith("error: ")
        assert tree(place) == before
        return ended

    return run
