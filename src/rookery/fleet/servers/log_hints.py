"""Why a server did not start or died: its first error and the remedy.

A server is several processes that write to one log. When the engine fails, the processes that wait
for it fail too and say "See root cause above": the first exception counts.

A server that was ready has also logged errors of requests, which its API process survives. If it
dies later, the cause is an error of an engine or worker process, or at the log's end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import install_extra

__all__ = ["explain_failure", "first_error", "last_lines"]

NUM_LINES = 20
"""Lines of a server's log shown in an error."""
_NUM_FRAME_LINES = 4
"""Lines of a traceback shown before its exception: the raising line and its callers."""
_READ_BYTES = 64 * 1024
_FIRST_BYTES = 4 * 2**20
"""Bytes searched for the first error: vLLM writes 100 KiB before it serves."""
_LINE = re.compile(
    r"(?P<who>\([^()]* pid=\d+\) )?"
    r"(?P<level>(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?(?P<text>.*)"
)
"""`(EngineCore pid=9090) ERROR 11-16 02:05:30 [core.py:1510] ValueError: ...`"""
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above", "The above exception was")
_API_PROCESS = "(APIServer"

_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"No module named '?vllm|ModuleNotFoundError: .*vllm",
        f"vLLM is not installed for that Python: {install_extra('vllm')}, or set launch.python to "
        "the interpreter that has it.",
    ),
    (
        r"Address already in use|\[Errno 98\]",
        "Another program took the port in between: start again, or set launch.port.",
    ),
    (
        r"OutOfMemoryError|out of memory|Free memory on device",
        "The GPU is out of memory: lower launch.gpu_memory_utilization if others use it, else "
        "launch.max_model_len or launch.max_num_seqs, or raise launch.tensor_parallel.",
    ),
    (
        r"No available memory for the cache blocks|KV cache.*(larger|needed|insufficient)"
        r"|estimated maximum model length",
        "The key-value cache is too small for this context: lower launch.max_model_len, or raise "
        "launch.gpu_memory_utilization (GPU) or launch.cpu_cache_gib (CPU).",
    ),
    (
        r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer",
        "The model's weight files are damaged or not complete: fetch or convert the model again.",
    ),
    (
        r"Cannot allocate memory|MemoryError|Killed",
        "The machine is out of memory: lower launch.cpu_cache_gib or the number of replicas.",
    ),
    (
        r"max_lora_rank|max_loras.*must|max_cpu_loras",
        "Set launch.max_lora_rank to one of 1, 8, 16, 32, 64, 128, 256, 320, 512 and "
        "launch.max_cpu_loras to at least launch.max_loras.",
    ),
    (
        r"unrecognized arguments: (?P<what>.*)",
        "This vLLM does not know that flag: take it out of launch.args, or use vLLM 0.26 to 0.32.",
    ),
    (
        r"Can't load the configuration|is not a local folder|Repo id must be"
        r"|Invalid repository ID|OSError: .*config\.json",
        "The model cannot be found: give a folder with config.json, or a Hugging Face id that this "
        "machine can fetch.",
    ),
    (
        r"total number of attention heads .* must be divisible|not divisible by tensor",
        "launch.tensor_parallel must divide the model's number of attention heads.",
    ),
    (
        r"block_size|block size .* multiple",
        "On the CPU the block size must be a multiple of 32: take --block-size out of launch.args.",
    ),
    (
        r"does not support LoRA|LoRA is not supported",
        "This model takes no adapters: set launch.max_loras to 0.",
    ),
)


@dataclass(frozen=True, slots=True)
class _Line:
    who: str
    """Process that wrote the line, by vLLM's name; empty if unnamed."""
    level: str
    text: str

    @property
    def is_inside(self) -> bool:
        """True if an engine or worker process wrote it."""
        return bool(self.who) and not self.who.startswith(_API_PROCESS)


def last_lines(log: Path, *, num: int = NUM_LINES) -> list[str]:
    """Return the last lines with text, oldest first; empty without a log."""
    lines = _read(log, since=-_READ_BYTES, limit=_READ_BYTES)
    return [line.rstrip() for line in lines if line.strip()][-num:]


def first_error(log: Path, *, since: int = 0, was_ready: bool = False) -> list[str]:
    """Return the end of the first traceback with its exception, without vLLM's line prefixes. An
    engine or worker process's traceback wins over the API process's, which does not count if the
    server `was_ready`. Empty if there is none. `since` is the byte offset to begin at.
    """
    lines = [_parse(line) for line in _read(log, since=since, limit=_FIRST_BYTES)]
    begins = [i for i, line in enumerate(lines) if line.text == _TRACEBACK]
    inside = [i for i in begins if lines[i].is_inside]
    starts = inside if inside or was_ready else begins
    if not starts:
        return []
    begin = starts[0]
    record = lines[begin].who, lines[begin].level
    return _exception(
        [line.text for line in lines[begin + 1 :] if (line.who, line.level) == record]
    )


def explain_failure(log: Path, *, since: int = 0, was_ready: bool = False) -> str:
    """Return the remedy for the first error, else for the log's end; empty if unknown."""
    ending = [_parse(line) for line in last_lines(log, num=200)]
    if was_ready:
        ending = [line for line in ending if not line.who.startswith(_API_PROCESS)]
    first = first_error(log, since=since, was_ready=was_ready)
    errors = [line.text for line in ending if not line.level.startswith(("DEBUG", "INFO", "WARN"))]
    for text in ("\n".join(first), "\n".join(errors)):
        for sign, remedy in _REMEDIES:
            if re.search(sign, text):
                return remedy
    return ""


def _exception(texts: Sequence[str]) -> list[str]:
    """Return a traceback's last frames and its message, up to the next traceback or other text."""
    at = next((i for i, text in enumerate(texts) if text and not text[0].isspace()), None)
    if at is None:
        return [text for text in texts if text.strip()][-NUM_LINES:]
    shown = [text for text in texts[:at] if text.strip(" ^~")][-_NUM_FRAME_LINES:]
    for text in texts[at : at + NUM_LINES - _NUM_FRAME_LINES]:
        if not text.strip() or text == _TRACEBACK or text.startswith((*_CHAINED, "Process ")):
            break
        shown.append(text.rstrip())
    return shown


def _parse(line: str) -> _Line:
    match = _LINE.fullmatch(line)
    assert match is not None  # every part may be empty
    return _Line(match["who"] or "", match["level"] or "", match["text"])


def _read(log: Path, *, since: int, limit: int) -> list[str]:
    """Return the lines from an offset on, or from that far before the end; empty without a log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(since if since >= 0 else max(0, size + since))
            text = file.read(limit).decode("utf-8", "replace")
    except OSError:
        return []
    return re.split(r"[\r\n]+", text)
