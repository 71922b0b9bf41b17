"""Rookery installed without extras: every command works, or says which extra it needs."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from driving import Ended

import rookery
from rookery.cli.app import app
from rookery.errors import EXTRAS, install_extra

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

NEEDS = {
    "demo": ["demo"],
    "demo grpo": ["demo", "grpo"],
    "demo icm": ["demo", "icm"],
    "demo serve": ["demo", "serve"],
    "eval": ["eval", "model", "tasks.jsonl"],
    "eval on servers": ["eval", "model", "tasks.jsonl", "--fleet", "http://127.0.0.1:9"],
    "evolve prompt": ["evolve", "prompt", "p.txt", "--taskset", "tasks.jsonl", "--model", "model"],
    "genome run": ["genome", "run", "genome.yaml"],
    "grpo atropos": ["grpo", "atropos", "--model-name", "model"],
    "grpo gateway": ["grpo", "gateway", "gateway.yaml"],
    "grpo plan": ["grpo", "plan", "grpo.yaml"],
    "grpo run": ["grpo", "run", "grpo.yaml"],
    "grpo sweep": ["grpo", "sweep", "grpo.yaml", "--seeds", "2"],
    "icm run": ["icm", "run", "icm.yaml"],
    "pipeline run": ["pipeline", "run", "pipeline.yaml"],
    "sft": ["sft", "model", "tasks.jsonl", "out"],
    "fleet up": ["fleet", "up", "smollm2"],
    "fleet verify": ["fleet", "verify", "http://127.0.0.1:9", "--adapter", "poet"],
    "runs resume": ["runs", "resume", "old"],
    "serve": ["serve", "serve.yaml"],
}
"""Commands that need an extra, at least with these words."""
WORKS = {
    "fleet status": (["fleet", "status", "http://127.0.0.1:9"], 2, "can't be reached"),
    "fleet restore": (["fleet", "restore", "http://127.0.0.1:9"], 2, "can't be reached"),
    "fleet up on Ray": (
        ["fleet", "up", "model", "--placement", "ray", "--launch.replicas", "1"],
        2, install_extra("ray"),
    ),
    "new": (["new", "genome", "mine"], 0, "Next: rookery genome run mine/config.yaml"),
    "evolve run": (["evolve", "run", "none.py", "e.py"], 2, "There is no program"),
    "evolve check": (["evolve", "check", "none.py", "e.py"], 2, "There is no program"),
    "evolve export": (["evolve", "export", "runs/old", "x.jsonl"], 2, "kind 'eval', not of evolve"),
    "keys add": (["keys", "add", "ada", "--file", "keys.json"], 0, "tml-"),
    "keys list": (["keys", "list", "--file", "keys.json"], 0, "ada"),
    "keys remove": (["keys", "remove", "ada", "--file", "keys.json"], 0, "Removed 1 key"),
    "runs list": (["runs", "list"], 0, "old"),
    "runs export": (["runs", "export", "old", "events.jsonl"], 0, "events written"),
    "runs show": (["runs", "show", "old"], 0, "old"),
    "doctor": (["doctor"], 2, f"torch        not installed\n  → {install_extra('hf')}"),
}  # fmt: skip
UNTRIED = {"demo evolve", "fleet down"}
"""Would evolve programs, and stop servers of this machine."""

SCRIPT = """
import contextlib, importlib.metadata, io, json, sys

blocked, commands = json.loads(sys.argv[1])

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(package, known=importlib.metadata.version):
    if package.replace("-", "_") in blocked:
        raise importlib.metadata.PackageNotFoundError(package)
    return known(package)

import importlib.util
def find_spec(name, package=None, known=importlib.util.find_spec):
    return None if name in blocked else known(name, package)

sys.meta_path.insert(0, Missing())
importlib.metadata.version, importlib.util.find_spec = version, find_spec

from rookery.cli import main
from rookery.runs import Run
from pathlib import Path

config = {"model": "model", "taskset": "tasks.jsonl"}
with Run.create(Path("runs"), kind="eval", name="old", config=config):
    pass
ended = {}
for name, words in commands.items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    ended[name] = [code, out.getvalue(), err.getvalue()]
try:
    import rookery
    rookery.run_genome
except Exception as error:
    ended["from Python"] = [1, "", str(error)]
print(json.dumps(ended))
"""


def core_distributions() -> set[str]:
    """What `pip install rookery` brings, and what that needs itself."""
    found: set[str] = set()
    left = list(PROJECT["dependencies"])
    while left:
        name = re.split(r"[^\w.-]", left.pop())[0]
        if name not in found:
            found.add(name)
            try:
                requires = distribution(name).requires or []
            except ModuleNotFoundError:  # for another platform or version of Python
                continue
            left += [line for line in requires if "extra ==" not in line]
    return {_normal(name) for name in found} | {"rookery"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    place = tmp_path_factory.mktemp("bare")
    rows = [{"prompt": f"p{i}", "answer": "a"} for i in range(40)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("model", "founders", "poet"):
        (place / name).mkdir()
    (place / "genome.yaml").write_text(
        "engine: {model: model}\ninit: {type: file, path: founders}\n"
        "tasksets: [{type: jsonl, path: tasks.jsonl}]\n"
    )
    (place / "pipeline.yaml").write_text(
        "steps: {a: {loop: sft, values: {model: model, taskset: tasks.jsonl}}}\n"
        "report: {model: model, taskset: tasks.jsonl}\n"
    )
    (place / "icm.yaml").write_text(
        "engine: {model: model}\ndata: {path: tasks.jsonl, labels: [a, b]}\n"
    )
    core = core_distributions()
    extra = [
        package
        for package, owners in packages_distributions().items()
        if not {_normal(owner) for owner in owners} & core
    ]
    commands: dict[str, Any] = NEEDS | {name: words for name, (words, _, _) in WORKS.items()}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([[*extra, "vllm", "ray"], commands])],
        cwd=place, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return {name: Ended(*how) for name, how in json.loads(answer.stdout).items()}


@pytest.mark.parametrize("name", NEEDS)
def test_a_command_that_needs_an_extra_names_it(ended: dict[str, Ended], name: str) -> None:
    how, extra = ended[name], "serve" if name == "serve" else "hf"
    assert how.code == 2, how
    command = re.escape(install_extra(extra))
    assert re.fullmatch(
        rf"error: This needs the package \w+, which is not installed: {command}\.\n", how.err
    )


@pytest.mark.parametrize("name", WORKS)
def test_the_others_work_without(ended: dict[str, Ended], name: str) -> None:
    _, code, said = WORKS[name]
    assert ended[name].code == code and said in ended[name].out + ended[name].err, ended[name]


def test_no_command_is_left_out() -> None:
    leaves = {
        name if not list(app[name]) else f"{name} {own}"
        for name in app
        if not name.startswith("-")
        for own in (list(app[name]) or [""])
        if not own.startswith("-")
    }
    assert leaves <= set(NEEDS) | set(WORKS) | UNTRIED, leaves


def test_every_package_of_an_extra_is_known() -> None:
    declared = {
        re.split(r"[^\w-]", line)[0].replace("-", "_"): extra
        for extra, lines in PROJECT["optional-dependencies"].items()
        for line in lines
        if not line.startswith("rookery[")
    }
    declared["google"] = declared.pop("protobuf")  # the name it is imported by
    assert declared == EXTRAS


def test_the_front_door_says_what_to_install(ended: dict[str, Ended]) -> None:
    """From Python as from the command line."""
    said = ended["from Python"].err
    assert f"which is not installed: {install_extra('hf')}." in said


def test_the_version_is_that_of_the_project() -> None:
    assert rookery.__version__ == PROJECT["version"]
