"""The commands that run one loop: `run` of every loop, `rookery sft`, `rookery eval`.

    genome = make_loop_app("genome", help="Evolve ...", summary="...", ...)

A loop is imported only when its command is called.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import check_flags, console, log_warnings, paths_from_here, print_outcome
from rookery.config import load_config
from rookery.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rookery.compose.running import Outcome
    from rookery.fleet import FleetConfig

__all__ = [
    "evaluate",
    "genome",
    "icm",
    "league",
    "make_loop_app",
    "pipeline",
    "read_loop_config",
    "run_loop",
    "sft",
]


_REST = """
    Any value of the config is a flag with a dotted name. Resume an interrupted run
    with `--resume --name NAME` or `rookery runs resume NAME`: no request is sent twice.

{examples}

    Parameters
    ----------
    config
        A YAML or TOML file. Its paths are relative to it, those of flags to the current folder.
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    resume
        Resume the run of this name.
"""
_OWN = ("name", "runs_dir", "resume")


def make_loop_app(
    kind: str,
    *,
    help: str,
    summary: str,
    examples: Sequence[str] = (),
    paths: Sequence[str] = ("tasksets.*.path",),
    is_group: bool = True,
) -> cyclopts.App:
    """Make the command group of a loop with its `run` or, unless `is_group`, that command itself.
    `paths` are the flags that name files."""

    def run(
        config: Path,
        *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
        name: str = "",
        runs_dir: Path = Path("runs"),
        resume: Annotated[bool, Parameter(negative="")] = False,
    ) -> int:
        return run_loop(
            kind, config, overrides, paths=paths, name=name, runs_dir=runs_dir, resume=resume
        )

    lines = "\n".join(f"        {example}" for example in examples)
    run.__doc__ = f"{summary}\n{_REST.format(examples=lines)}"
    app = cyclopts.App(name=kind, help=help)
    if is_group:
        app.command(run, name="run")
    else:
        app.default(run)
    return app


def run_loop(
    kind: str,
    config: Path,
    overrides: Sequence[str],
    *,
    paths: Sequence[str],
    name: str,
    runs_dir: Path,
    resume: bool,
) -> int:
    """Start or resume a run of this kind, and finish it. Returns the exit code."""
    from rookery.compose.kinds import find_kind

    loop = find_kind(kind)
    if resume and not name:
        raise RunError("--resume needs the run: add --name NAME, see `rookery runs list`.")
    loaded = read_loop_config(
        loop.config, config, overrides, paths=paths, own_flags=_OWN, runs_dir=runs_dir
    )
    if resume:
        return _resume(runs_dir / name, loaded.model_dump(mode="json"))
    return _print_once(loop.start(loaded, {}, name=name, runs_dir=runs_dir))


def read_loop_config(
    model: Any,
    config: Path,
    overrides: Sequence[str],
    *,
    paths: Sequence[str],
    own_flags: Sequence[str],
    runs_dir: Path,
) -> Any:
    """Read a config file and apply flags. `own_flags` are the command's own. `run:NAME/PART`
    refers to the output of a run in `runs_dir`."""
    from rookery.runs.run_folder import in_folder, resolve_references

    log_warnings()
    check_flags(overrides, fields=model.model_fields, own_flags=own_flags)
    words = paths_from_here(overrides, paths=paths)
    find = in_folder(runs_dir)
    resolve = partial(resolve_references, find=find, later=model.resolved_later)
    loaded = load_config(model, config, overrides=words, resolve=resolve)
    return loaded.from_folder(config.parent)


def _print_once(outcome: "Outcome[Any]") -> int:
    """Print the outcome; under torchrun, only in the first process."""
    from rookery.compose.running import is_first_process

    return print_outcome(outcome) if is_first_process() else 0


def _resume(path: Path, config: Mapping[str, Any]) -> int:
    """Resume a run. The file and the flags must give the config that it was made with."""
    from rookery.compose.kinds import resume
    from rookery.runs import Run
    from rookery.runs.run_folder import find_changes

    with Run.view(path) as run:
        changes = find_changes(run.config, config)
    if changes:
        key, (old, new) = next(iter(changes.items()))
        raise ConfigError(
            f"The run was made with another config: {key} is {old!r} there and {new!r} here. Give "
            f"the flags it was started with, or go on with its own config by `rookery runs resume "
            f"{shlex.quote(str(path))}`."
        )
    return _print_once(resume(path))


# `rookery genome`, `icm`, `pipeline` and `league`.


genome = make_loop_app(
    "genome",
    help="Evolve a population of LoRA adapters, no gradients.",
    summary="Evolve adapters as the config says, and report honestly how good the best one is.",
    examples=(
        "rookery genome run mine/config.yaml",
        "rookery genome run mine.yaml --seed 3 --stages.1.generations 20",
    ),
    paths=("init.path", "tasksets.*.path"),
)
icm = make_loop_app(
    "icm",
    help="Label data without labels, by internal coherence.",
    summary="Label the items of a file, and say honestly what the labels are worth.",
    examples=(
        "rookery icm run mine/config.yaml",
        "rookery icm run mine.yaml --data.path claims.jsonl --num-chains 4",
    ),
    paths=("data.path", "data.gold.path", "iterate.sft.init_from"),
)
pipeline = make_loop_app(
    "pipeline",
    help="Run loops that feed each other, with one report over all of them.",
    summary="Run the steps of the config, each as a run of its own, and measure what each left on "
    "tasks that none has seen.",
    examples=(
        "rookery pipeline run flywheel.yaml --name flywheel",
        "rookery runs resume flywheel                   # after an interruption",
    ),
    paths=("report.taskset",),
)
league = make_loop_app(
    "league",
    help="Every way to make a model better, under one budget: which should I use?",
    summary="Run sft, grpo, es, genome, prompt evolution, best-of-n and icm on one taskset, each "
    "under the\n    same budget with several seeds, and rank what they left on tasks that none has "
    "seen.",
    examples=(
        "rookery league mine/config.yaml --name mine",
        "rookery league mine.yaml --num-seeds 5 --budget.max-answer-tokens 200000",
    ),
    paths=("taskset", "founders", "prompt"),
    is_group=False,
)

_SFT_OWN = ("config", "split", "device", "service", "name", "runs_dir")


def sft(
    model: str,
    taskset: str,
    out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path | None = None,
    split: Literal["all", "search", "select", "report"] = "search",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    service: str = "",
    name: str = "",
    runs_dir: Path = Path("runs"),
) -> None:
    """Train a LoRA adapter on the answers of a taskset and write it as a PEFT folder.

    The training is a run: its page shows the curves, and RUN/trained holds the adapter. Any value
    of the training config is a flag: --rank, --epochs, --learning-rate, --init-from. To resume an
    interrupted training, use `rookery runs resume` or, without --name, repeat the command.

        rookery sft smollm2 generated:label-kind out/kind --steps 40 --layers 4
        rookery sft smollm2 gsm8k.jsonl out/gsm8k --learning-rate 0.0005

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    taskset
        A file of rows (FILE?KEY=VALUE), a .yaml or .toml taskset, hf://datasets/ID, generated:NAME.
    out
        A second PEFT folder to write.
    config
        A YAML or TOML file with the training config.
    split
        The part of the taskset to train on.
    device
        The device to compute on; `auto` takes a GPU if there is one.
    service
        The URL of a service (`rookery serve`) to train on; the key is in TINKER_API_KEY.
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    """
    from rookery.compose.sft import start_sft
    from rookery.train.sft import SftConfig
    from rookery.weights import read_adapter

    if str(out).startswith("--"):  # `out` is omitted: this is a flag of the training config
        overrides, out = (str(out), *overrides), None
    check_flags(overrides, fields=SftConfig.model_fields, own_flags=_SFT_OWN)
    settings = load_config(SftConfig, config, overrides=overrides)
    log_warnings()
    outcome = start_sft(
        model, taskset, out, config=settings, name=name, runs_dir=runs_dir, split=split,
        device=device, engine=_read_service(service),
    )  # fmt: skip
    adapter = read_adapter(outcome.path / "trained")
    shape = f"rank {adapter.rank}, {_describe(adapter.factors)}"
    line = f"{out or adapter.name}: {shape}, version {adapter.version}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_outcome(outcome)


def _describe(modules: Collection[str]) -> str:
    """Return `16 modules in 4 layers`, from names like model.layers.3.self_attn.q_proj."""
    layers = {match[1] for name in modules if (match := re.search(r"\blayers\.(\d+)\.", name))}
    return f"{len(modules)} modules in {len(layers)} layer{'s' * (len(layers) != 1)}"


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
    service: str = "",
) -> int:
    """Measure a model and its adapters on a taskset: accuracy with a 95 % interval each.

        rookery eval smollm2 generated:arithmetic --adapter out/poet --adapter out/judge
        rookery eval Qwen/Qwen3-8B tasks.jsonl --fleet http://gpu1:8000

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    taskset
        A file of rows (FILE?KEY=VALUE), a .yaml or .toml taskset, hf://datasets/ID, generated:NAME.
    adapter
        A PEFT folder. Repeat the flag for each adapter.
    split
        The part of the taskset to answer.
    limit
        Answer at most this many tasks of the split.
    samples
        Also draw this many answers to each task, for pass@1, pass@k and the majority's answer.
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    json_out
        Print the report as JSON instead of a table.
    device
        The device to compute on; `auto` takes a GPU if there is one.
    dtype
        Number type; `auto` is float32 on the CPU and the model's own type on a GPU.
    weights
        `int4` rounds the weights of linear layers to 4 bit, on a CPU under Linux.
    fleet
        URLs of vLLM servers with this model, each with its own --fleet, or a config to start some.
    service
        The URL of a service (`rookery serve`) to ask; the key is in TINKER_API_KEY.
    """
    from rookery.compose.evaluation import evaluate as measure

    log_warnings()
    return print_outcome(measure(model, taskset, adapters=adapter, fleet=_read_fleet(fleet),
        name=name, runs_dir=runs_dir, progress=not json_out, report={"samples": samples},
        split=split, limit=limit, device=device, dtype=dtype, weights=weights,
        engine=_read_service(service)), as_json=json_out)  # fmt: skip


def _read_service(url: str) -> dict[str, str] | None:
    """Return the config of the service at this URL; None without one."""
    return {"type": "service", "url": url} if url else None


def _read_fleet(words: tuple[str, ...]) -> "FleetConfig | None":
    """Return the servers of --fleet, which takes URLs or one config file."""
    from rookery.fleet import FleetConfig

    if not words:
        return None
    urls = tuple(word for word in words if word.startswith(("http://", "https://")))
    if urls and len(urls) < len(words):
        raise ConfigError(
            f"--fleet is given as {' and '.join(words)}; give URLs alone, or one config file."
        )
    if not urls and len(words) > 1:
        raise ConfigError(f"--fleet names {len(words)} config files; give one.")
    return FleetConfig(urls=urls) if urls else load_config(FleetConfig, Path(words[0]))
