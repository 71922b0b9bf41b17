"""Why a server did not start: the end of its log, and what to do about it."""

import re
from pathlib import Path

__all__ = ["explain_failure", "last_lines"]

NUM_LINES = 20
"""Lines of a server's log shown in an error: a traceback's end and what came before it."""
_READ_BYTES = 64 * 1024

_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"No module named '?vllm|ModuleNotFoundError: .*vllm",
        "vLLM is not installed for that Python: pip install 'rookery[vllm]', or set launch.python "
        "to the interpreter that has it.",
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
        r"Cannot allocate memory|MemoryError|Killed",
        "The machine is out of memory: lower launch.cpu_cache_gib or the number of replicas.",
    ),
    (
        r"max_lora_rank|max_loras.*must|max_cpu_loras",
        "Set launch.max_lora_rank to one of 8, 16, 32, 64, 128, 256, 320, 512 and "
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


def last_lines(log: Path, *, num: int = NUM_LINES) -> list[str]:
    """The last lines that say something, oldest first; none when there is no log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-num:]


def explain_failure(log: Path) -> str:
    """The remedy for what the log's end says, or "" when nothing in it is known."""
    text = "\n".join(last_lines(log, num=200))
    return next((remedy for sign, remedy in _REMEDIES if re.search(sign, text)), "")
