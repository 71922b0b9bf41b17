"""`rookery grpo`: trains a policy by group-relative policy optimisation on tasksets, games or
Atropos environments, and plans the memory beforehand.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml
from cyclopts import Parameter

from rookery.cli.terminal import (
    check_flags,
    console,
    fail,
    log_warnings,
    print_outcome,
    print_table,
    say,
)
from rookery.compat.atropos.options import AtroposOptions, translate
from rookery.config import load_config, parse_config

if TYPE_CHECKING:
    from rookery.reports import GrpoReport
from rookery.cli.loop_command import make_loop_app, read_loop_config, run_loop
from rookery.errors import ConfigError

__all__ = [
    "atropos",
    "gateway",
    "grpo",
]

# `rookery grpo atropos` has the options of Atropos's example trainer.


TIMES = {"step": "time/train_s", "sync": "time/publish_s", "fetch": "time/draw_s"}


def atropos(
    *,
    options: Annotated[AtroposOptions, Parameter(name="*")] = AtroposOptions(),  # noqa: B008
    print_config: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train on Atropos environments, with the options of its example trainer.

    Starts the server, the gateway on port 8000 (that of `run-api`) and the trainer. Prints the
    equivalent config: save it to change values that have no option.

        rookery grpo atropos --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only
        python environments/gsm8k_server.py serve --openai.base_url http://localhost:9001/v1 ...

    Parameters
    ----------
    print_config
        Only print the config, and notes on options that have no key.
    """
    log_warnings()
    from rookery.loops.grpo import GrpoConfig

    document, notes = translate(options, os.environ)
    config = parse_config(GrpoConfig, document, origin="the command line").from_folder(Path.cwd())
    text = yaml.safe_dump(document, sort_keys=False)
    say("\n".join([text, *notes]))
    if print_config:
        return 0
    from rookery.compose.grpo import GRPO

    place = options.save_path.resolve()
    outcome = GRPO.start(config, {}, name=place.name, runs_dir=place.parent)
    if options.benchmark:
        _print_times(outcome.report)
    return print_outcome(outcome)


def _print_times(report: "GrpoReport") -> None:
    """Print the mean, longest and total seconds of each stage over all steps."""
    rows = []
    for name, key in TIMES.items():
        seconds = [value for step in report.steps if (value := step.metrics.get(key)) is not None]
        if seconds:
            mean = sum(seconds) / len(seconds)
            rows.append((name, f"{mean:.3f}", f"{max(seconds):.3f}", f"{sum(seconds):.1f}"))
    columns = ("stage", "mean s", "longest s", "all s")
    print_table("Times", columns=columns, rows=rows)
    from rookery.compose.grpo.atropos import peak_memory

    for where, num_bytes in peak_memory().items():
        console.print(f"memory of {where}, at most: {num_bytes / 2**30:.2f} GiB")


def gateway(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Serve the Atropos API alone, for environments and a trainer that run elsewhere.

    An accepted group is kept until it has been trained on, even if the gateway is killed and
    restarted. Give trainers the gateway's URL as environment.url.

        rookery grpo gateway gateway.yaml --port 8000

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it.
    """
    from rookery.compose.grpo.atropos import GatewayConfig, serve_gateway

    log_warnings()
    check_flags(overrides, fields=GatewayConfig.model_fields, own_flags=())
    loaded = load_config(GatewayConfig, config, overrides=overrides).from_folder(config.parent)

    def ready(url: str) -> None:
        say(f"{url}   Ctrl-C ends it; started again, it goes on where it was.")

    serve_gateway(loaded, on_ready=ready)
    return 0


PATHS = ("init_from", "reference", "tasksets.*.path", "environment.environments.*.folder")


grpo = make_loop_app(
    "grpo",
    help="Train a policy from a reward, the engine on the newest weights.",
    summary="Train an adapter, or all weights, from a reward; report honestly what it gained.",
    examples=(
        "rookery grpo run mine/config.yaml",
        "rookery grpo run mine.yaml --seed 3 --steps 200 --staleness 1",
        "torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml",
    ),
    paths=PATHS,
)


grpo.command(atropos)
grpo.command(gateway)


@grpo.command
def sweep(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    vary: Annotated[list[str] | None, Parameter(negative="")] = None,
    seeds: int | None = None,
    name: str = "",
    runs_dir: Path = Path("runs"),
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train many adapters in one run: every combination of the values, each with several seeds.

    All adapters share one engine and one trainer: their answers are drawn in one batch, their
    gradients computed in one pass. The best is chosen on the select tasks. The report tasks are
    read once, with an interval for each adapter. Each adapter has its own run in RUN/adapters, with
    checkpoints and a report. The report of the whole run has the curves of all.

        rookery grpo sweep mine.yaml --vary learning_rate=1e-5,3e-5,1e-4 --seeds 3
        rookery grpo sweep mine.yaml --vary loss.type=grpo,dr_grpo --vary drawing.temperature=0.7,1
        rookery runs resume NAME                   # after an interruption

    Learning rate, schedule, optimizer, loss, advantages, drawing, groups, staleness and seed can
    vary. Model, tasks and the adapter's shape are the same for all. The equivalent config is
    `sweep: {vary: {learning_rate: [1e-5, 1e-4]}, seeds: 3}`.

    Parameters
    ----------
    config
        A YAML or TOML file, as for `rookery grpo run`; its other values are flags too.
    vary
        KEY=VALUE,VALUE,...: a key of the config and its values. Repeat the flag for each key.
    seeds
        Adapters per combination, with the seeds `seed`, `seed` + 1, ...
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    resume
        Resume the run of this name.
    """
    varied = [_values(text) for text in vary or ()]
    keys = [key for key, _ in varied]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--vary has {twice} twice: write all its values in one, --vary {twice}=VALUE,VALUE."
        )
    document = {"vary": dict(varied), "seeds": seeds}
    words = [f"--sweep.{key}={json.dumps(value)}" for key, value in document.items() if value]
    if not words:
        raise ConfigError(
            "There is nothing to vary: add --vary learning_rate=1e-5,1e-4, for example, or "
            "--seeds 3. `rookery grpo run` trains one adapter."
        )
    return run_loop(
        "grpo", config, [*overrides, *words], paths=PATHS, name=name, runs_dir=runs_dir,
        resume=resume,
    )  # fmt: skip


def _values(text: str) -> tuple[str, list[object]]:
    """Parse `learning_rate=1e-5,1e-4` into a key and its values."""
    key, has_values, values = text.partition("=")
    try:
        choices = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError:
        choices = []
    if not (key and has_values and choices):
        raise ConfigError(
            f"--vary got {text!r}: write a key and its values, learning_rate=1e-5,1e-4 for example."
        )
    return key.replace("-", "_"), choices


@grpo.command
def plan(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Show the memory that a training needs, and whether it fits. Loads no weights.

    Any value of the config is a flag with a dotted name, as for `rookery grpo run`.

        rookery grpo plan mine.yaml --trainer.pass_tokens 4096

    Parameters
    ----------
    config
        A YAML or TOML file.
    """
    from rookery.compose.grpo.plan import plan_grpo
    from rookery.loops.grpo import GrpoConfig

    loaded = read_loop_config(
        GrpoConfig, config, overrides, paths=PATHS, own_flags=(), runs_dir=Path("runs")
    )
    made = plan_grpo(loaded)
    rows = [(row.name, f"{row.num_bytes / 2**20:,.1f}", row.note) for row in made.rows]
    rows += [
        ("all", f"{made.total_bytes / 2**20:,.1f}", ""),
        ("there is", f"{made.available_bytes / 2**20:,.1f}", f"memory of {made.device}"),
    ]
    print_table("What is held at the same time", columns=("part", "MiB", ""), rows=rows)
    if made.complaint:
        fail(made.complaint)
        return 2
    console.print("It fits.")
    return 0
