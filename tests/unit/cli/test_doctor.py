"""`rookery doctor`: what is there, what is not, and the line to type."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from driving import Command

from rookery.cli.doctor import Finding, examine


def test_a_sound_machine_is_ready(
    rookery: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rookery.cli.doctor._MIN_FREE_GB", 0)
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
    assert "✗ peft         not installed\n  → pip install 'rookery[hf]'\n" in ended.out
    assert "· Ray          not installed\n  → pip install 'rookery[ray]'\n" in ended.out
    assert "· serve        not installed: zstandard\n  → pip install 'rookery[serve]'" in ended.out


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
    assert "apt-get install bubblewrap or pip install sandlock" in finding.remedy


def test_a_full_disk_is_no_good_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROOKERY_CACHE", raising=False)
    monkeypatch.setattr("rookery.cli.doctor._MIN_FREE_GB", 10**9)
    findings: dict[str, Finding] = {finding.thing: finding for finding in examine()}
    assert not findings["disk"].is_fine and "free some room" in findings["disk"].remedy
    assert findings["cache"].seen == str(tmp_path / "rookery")
    assert all(finding.is_fine or finding.remedy for finding in findings.values())
