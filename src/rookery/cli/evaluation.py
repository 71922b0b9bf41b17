"""`rookery eval`: how good a model and its adapters are on a taskset, with intervals."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rookery.cli.terminal import log_warnings, print_outcome
from rookery.config import load_config
from rookery.errors import ConfigError

if TYPE_CHECKING:
    from rookery.fleet import FleetConfig

__all__ = ["evaluate"]


def evaluate(
    model: str,
    taskset: str,
    *,
    adapter: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    split: Literal["all", "search", "select", "report"] = "all",
    limit: int | None = None,
    samples: int | None = None,
    name: str = "",
    runs_dir: Path = Path("runs"),
    json_out: Annotated[bool, Parameter(name="--json", negative="")] = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    weights: Literal["auto", "int4"] = "auto",
    fleet: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> int:
    """Measure a model, and adapters of it, on a taskset: accuracy with a 95 % interval each.

    All of them are answered in one batch. The run can be interrupted and resumed.

        rookery eval smollm2 generated:arithmetic --adapter out/poet --adapter out/judge
        rookery eval Qwen/Qwen3-8B tasks.jsonl --fleet http://gpu1:8000

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    taskset
        A file of rows (FILE?KEY=VALUE), a .yaml or .toml taskset, hf://datasets/ID, generated:NAME.
    adapter
        A PEFT folder; give it once for each adapter.
    split
        Which part of the taskset to ask.
    limit
        Ask at most this many tasks of the split.
    samples
        Also draw so many answers to each task, for pass@1, pass@k and the majority's answer.
    name
        The run's name; by default the kind and the time.
    runs_dir
        Where runs are kept.
    json_out
        Print the report as JSON instead of a table.
    device
        Where to compute; `auto` takes a GPU when there is one.
    dtype
        Number type; `auto` is float32 on the CPU.
    weights
        `int4` rounds the weights of linear layers to 4 bit, on an Arm CPU.
    fleet
        URLs of vLLM servers with this model, each with its own --fleet, or a config to start some.
    """
    from rookery.compose.evaluation import evaluate as measure

    log_warnings()
    return print_outcome(measure(
        model, taskset, adapters=adapter, fleet=_read_fleet(fleet), name=name, runs_dir=runs_dir,
        progress=not json_out, report={"samples": samples}, split=split, limit=limit,
        device=device, dtype=dtype, weights=weights,
    ), as_json=json_out)  # fmt: skip


def _read_fleet(given: tuple[str, ...]) -> "FleetConfig | None":
    """The servers that the command line names, checked."""
    from rookery.fleet import FleetConfig

    if not given:
        return None
    urls = tuple(word for word in given if word.startswith(("http://", "https://")))
    if urls and len(urls) < len(given):
        raise ConfigError(
            f"--fleet is given as {' and '.join(given)}; give URLs alone, or one config file."
        )
    if not urls and len(given) > 1:
        raise ConfigError(f"--fleet names {len(given)} config files; give one.")
    return FleetConfig(urls=urls) if urls else load_config(FleetConfig, Path(given[0]))
