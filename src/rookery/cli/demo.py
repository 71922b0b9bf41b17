"""`rookery demo`: a first result of every loop from installed files; `rookery new`: a project.

Each demo runs a config of `rookery.starters` as its own command would, then prints the table, the
report's path and three commands to try next.
"""

import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from rookery.cli.loop_command import read_loop_config
from rookery.cli.terminal import log_warnings, print_outcome, say
from rookery.errors import ConfigError, did_you_mean
from rookery.paths import expanded
from rookery.starters import DEMOS, PROJECTS

if TYPE_CHECKING:
    from rookery.compose.running import Outcome
    from rookery.remote import ServiceClient
    from rookery.types import Datum

__all__ = ["demo", "new"]


demo = cyclopts.App(name="demo")
_Words = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
_RUNS = Path("runs")
_OWN = ("name", "runs_dir")


@demo.default
def genome(*overrides: _Words, name: str = "", runs_dir: Path = _RUNS) -> int:
    """Get a first result in minutes, on a CPU, without a key or a file of your own.

    Evolves three adapters of SmolLM2, each of which knows one task, into one that knows all, in
    about five minutes on two cores. The first demo downloads the model, 93 MB. The winner is
    measured on 240 words that the search never saw, beside the best founder and random search. Any
    value of the config is a flag with a dotted name.

        rookery demo
        rookery demo --seed 1 --name second

    Parameters
    ----------
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    """
    _refuse_other_demos(overrides)
    outcome = _run_loop("genome", DEMOS / "genome.yaml", overrides, name=name, runs_dir=runs_dir)
    winner = shlex.quote(str(outcome.path / "winner"))
    return _say_next(
        (f"rookery eval smollm2 generated:mark-kind --adapter {winner}", "the winner on one task"),
        ("rookery new genome mine", "the same on your tasks"),
        ("rookery demo grpo", "training from a reward"),
    )


@demo.command
def grpo(*overrides: _Words, name: str = "", runs_dir: Path = _RUNS) -> int:
    """Train a tiny model to add two numbers from a reward, by group-relative policy optimisation.

    Takes about a minute on one CPU core. The first run takes half a minute more to make the model,
    which is half trained. Nothing is downloaded. The gain is measured on 196 unseen sums.

        rookery demo grpo
        rookery demo grpo --steps 80 --seed 1

    Parameters
    ----------
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    """
    config = _addition() / "grpo.yaml"
    outcome = _run_loop("grpo", config, overrides, name=name, runs_dir=runs_dir)
    return _say_next(
        (f"rookery runs show {shlex.quote(str(outcome.path))}", "what the run kept"),
        ("rookery new grpo mine", "a reward and tasks of your own"),
        ("rookery new game mine", "a reward that takes several turns"),
    )


@demo.command
def icm(*overrides: _Words, name: str = "", runs_dir: Path = _RUNS) -> int:
    """Label sixteen reviews as positive or not without a single label, by internal coherence.

    Takes up to five minutes on two CPU cores. The first demo downloads the model, 93 MB. The true
    labels are read only for the report, which counts how many were found.

        rookery demo icm
        rookery demo icm --data.limit 8 --num-chains 1

    Parameters
    ----------
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    """
    outcome = _run_loop("icm", DEMOS / "icm.yaml", overrides, name=name, runs_dir=runs_dir)
    data = shlex.quote(str(outcome.path / "sft.jsonl"))
    return _say_next(
        (f"head {shlex.quote(str(outcome.path / 'labels.jsonl'))}", "the labels"),
        (f"rookery sft smollm2 {data} adapters/labelled --split all", "an adapter from them"),
        ("rookery new icm mine", "the same on your items"),
    )


@demo.command
def evolve(*, iterations: int = 40, name: str = "", runs_dir: Path = _RUNS) -> int:
    """Evolve a program that steers a random search; candidates run in a sandbox.

    Takes a minute or two on two CPU cores. A script proposes programs by changing one number at a
    time, because the small model of the other demos writes none that work. The gain is measured on
    60 functions that do not affect the score.

        rookery demo evolve
        rookery demo evolve --iterations 100 --name longer

    Parameters
    ----------
    iterations
        The number of programs to try.
    name
        The run's name; by default its kind and start time.
    runs_dir
        Where runs are kept.
    """
    from rookery.compose.evolve import run_evolve
    from rookery.starters.number_changer import NAME, serve_number_changer
    from rookery.ui import wording

    files = PROJECTS / "evolve"
    with serve_number_changer() as url:
        outcome = run_evolve(
            files / "initial_program.py",
            files / "evaluator.py",
            files / "config.yaml",
            output=runs_dir / (name or f"evolve-{time.strftime('%Y%m%d-%H%M%S')}"),
            max_iterations=iterations,
            llm={"primary_model": NAME, "api_base": url},
            rookery={"engine": None},
        )
    print_outcome(outcome)
    best = outcome.report.best
    if best is not None:
        mean, low, high = (best.metrics.get(f"held_out_{end}") for end in ("gain", "low", "high"))
        say(
            f"On 60 functions that no choice depended on, its gain over the first program is "
            f"{wording.signed(mean)} (95 % interval {wording.signed(low)} to "
            f"{wording.signed(high)})."
        )
    say("A script proposed these programs, not a language model: give yours in the config.")
    return _say_next(
        (f"cat {shlex.quote(str(outcome.path / 'best' / 'best_program.py'))}", "the program"),
        ("rookery new evolve mine", "these files, to make your own of them"),
        ("rookery evolve run --help", "how to name your model"),
    )


@demo.command
def serve(*, model: str = "smollm2", name: str = "demo-serve", runs_dir: Path = _RUNS) -> int:
    """Start the service, train an adapter through its client, sample from it, and stop.

    Takes a minute or two on two CPU cores. The first demo downloads the model, 93 MB. The service
    listens on a free port of this machine only. The `tinker` SDK works with the same URL. The gain
    is measured on 40 unseen words.

        rookery demo serve
        rookery demo serve --model Qwen/Qwen3-0.6B

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    name
        The name of the service's folder.
    runs_dir
        Where runs are kept.
    """
    from rookery.compose.running import quiet_libraries, run_async

    log_warnings()
    quiet_libraries()
    folder = (runs_dir / name).absolute()
    run_async(_serve_and_train(model, folder))
    return _say_next(
        (
            f"rookery serve {shlex.quote(str(folder / 'config.json'))} --port 8000",
            "the service, to stay",
        ),
        ("rookery keys add ada", "a key for a user; serve then with --anonymous false"),
        ("pip install tinker", "its client, for code that runs elsewhere"),
    )


def _refuse_other_demos(words: Sequence[str]) -> None:
    """Refuse a misspelt demo name, which reaches `rookery demo` as its first override."""
    if words and not words[0].startswith("-") and "=" not in words[0]:
        names = sorted(name for name in demo if not name.startswith("-"))
        raise ConfigError(
            f"There is no demo {words[0]}.{did_you_mean(words[0], names)} There are "
            f"{', '.join(names[:-1])} and {names[-1]}; `rookery demo` alone evolves adapters."
        )


def _addition() -> Path:
    """Return the folder of the tiny model that adds. Makes the model at first use."""
    from rookery.model_names import cache_folder

    folder = cache_folder() / "demo-addition"
    if not folder.exists():
        from rookery.compose.running import quiet_libraries
        from rookery.starters.addition import make_addition

        quiet_libraries()
        say(f"Making a tiny model that adds, half trained, in {folder}: half a minute, once.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            make_addition(Path(scratch) / "made")
            (Path(scratch) / "made").rename(folder)
    return folder


def _run_loop(
    kind: str, config: Path, overrides: Sequence[str], *, name: str, runs_dir: Path
) -> "Outcome[Any]":
    """Run the config as `rookery KIND run` does, and print its table."""
    from rookery.compose.kinds import find_kind

    log_warnings()
    loop = find_kind(kind)
    loaded = read_loop_config(
        loop.config, config, overrides, paths=(), own_flags=_OWN, runs_dir=runs_dir
    )
    say(f"The config is {config}")
    outcome = loop.start(loaded, {}, name=name, runs_dir=runs_dir)
    print_outcome(outcome)
    return outcome


async def _serve_and_train(model: str, folder: Path) -> None:
    from rookery.compose.serve import ServeConfig, serving
    from rookery.remote import ServiceClientConfig, open_client

    config = ServeConfig(port=0, anonymous=True, models={model: model}, folder=folder)
    async with serving(config) as url:
        say(f"The service answers at {url}. A client anywhere would now do:")
        say(
            f"  export TINKER_BASE_URL={url} TINKER_API_KEY=tml-any\n"
            f'  trainer = tinker.ServiceClient().create_lora_training_client("{model}", rank=8)\n'
            '  trainer.forward_backward(data, "cross_entropy"); trainer.optim_step(adam)\n'
            "  sampler = trainer.save_weights_and_get_sampling_client()"
        )
        async with open_client(ServiceClientConfig(url=url, model=model)) as client:
            await _train(client, model)
    say(f"The service has stopped. Its files for the next start are in {folder}.")


async def _train(client: "ServiceClient", model: str) -> None:
    """Train five steps on 40 words. Measure answers to 40 others before and after."""
    from rookery.embedded import resolve_model
    from rookery.search.statistics import paired_difference
    from rookery.seeding import stream
    from rookery.tasks.taskset import load_taskset_file
    from rookery.tasks.template import load_template
    from rookery.train.sft import sft_data
    from rookery.types import LoraShape, OptimStep, SampleRequest, SamplingParams, TrainRequest

    tasks = load_taskset_file(str(DEMOS / "fresh" / "kind.jsonl")).tasks
    template = load_template(resolve_model(model).path)
    learned, held_out = (sft_data(tasks[start::2], template) for start in (0, 1))
    await client.trainer.create("demo", LoraShape(rank=8, seed=0))
    before = await _answer_logprobs(client, held_out)
    for step in range(5):
        rows = tuple(learned[step::5])
        request = TrainRequest(trainee="demo", data=rows)
        [output] = await client.trainer.forward_backward([request])
        await client.trainer.optim_step([OptimStep(trainee="demo", learning_rate=1e-3)])
        mean = sum(map(sum, output.logprobs)) / len(rows)
        say(f"step {step + 1}: log-probability of the answers in training {mean:.3f}")
    after = await _answer_logprobs(client, held_out)
    gain = paired_difference(after, before, rng=stream(0, "demo"))
    say(
        f"Log-probability gained by right answers, 40 words that were not trained on: "
        f"{gain.estimate:+.3f} (95 % interval {gain.low:+.3f} to {gain.high:+.3f})"
    )
    ref = await client.trainer.publish("demo")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    prompt = template.encode(tasks[1])
    [answers] = await client.engine.sample([SampleRequest(model=ref, prompt=prompt, params=params)])
    say(f"{json.dumps(str(tasks[1].prompt))} is answered {json.dumps(answers[0].text)}")


async def _answer_logprobs(client: "ServiceClient", data: "Sequence[Datum]") -> list[float]:
    from rookery.types import TrainRequest

    [output] = await client.trainer.forward([TrainRequest(trainee="demo", data=tuple(data))])
    return [sum(answer) for answer in output.logprobs]


def _say_next(*commands: tuple[str, str]) -> int:
    """Print commands to try next. Returns the exit code 0."""
    say("\nNext:")
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        say(f"  {command:<{width}}  # {what}")
    return 0


Kind = Literal[
    "genome",
    "grpo",
    "icm",
    "evolve",
    "prompt",
    "scorer",
    "game",
    "pipeline",
    "flywheel",
    "sweep",
    "league",
]
_NEXT: dict[Kind, str] = {
    "genome": "rookery genome run {0}/config.yaml",
    "grpo": "rookery grpo run {0}/config.yaml",
    "icm": "rookery icm run {0}/config.yaml",
    "evolve": "rookery evolve run {0}/initial_program.py {0}/evaluator.py -c {0}/config.yaml",
    "prompt": "rookery evolve prompt {0}/prompt.txt -c {0}/config.yaml",
    "scorer": "rookery eval smollm2 {0}/taskset.yaml",
    "game": "rookery grpo run {0}/config.yaml",
    "pipeline": "rookery pipeline run {0}/config.yaml",
    "flywheel": "rookery pipeline run {0}/config.yaml",
    "sweep": "rookery pipeline run {0}/config.yaml",
    "league": "rookery league {0}/config.yaml",
}
"""The command that runs a project of each kind."""
_SHARED: dict[Kind, tuple[str, ...]] = {
    "genome": ("scorer.py", "tasks.jsonl"),
    "grpo": ("scorer.py", "tasks.jsonl"),
    "prompt": ("scorer.py", "tasks.jsonl"),
    "scorer": ("scorer.py", "tasks.jsonl"),
    "game": ("tasks.jsonl",),
    "sweep": ("words.jsonl",),
    "league": ("words.jsonl",),
}
"""Files shared by several kinds of projects."""


def new(kind: Kind, folder: Path) -> int:
    """Write a small project: a config with comments, ten rows of data, and a scorer if needed.

    It runs unchanged in some minutes on a CPU. The next command is printed. Ten rows prove nothing:
    put in your own. All projects use `smollm2`; the first run downloads it, 93 MB.

        rookery new genome mine
        rookery new scorer judge

    genome: evolve adapters. grpo: train from a reward. icm: label without labels. evolve: evolve a
    program. prompt: evolve a prompt on tasks. scorer: a reward of your own, measured. game: grpo
    with several turns. pipeline: labels, then adapters trained on them, then a search among these.
    flywheel: evolve a prompt, train on the proposals that won, evolve on with that adapter.
    sweep: train several adapters from a reward, then a search among them.
    league: all ways to improve a model on one taskset, ranked under one budget.

    Parameters
    ----------
    kind
        The kind of project.
    folder
        The folder to write, new or empty.
    """
    if expanded(folder).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there and not an empty folder: give the name of a new one, such as "
            f"`rookery new {kind} my-{kind}`."
        )
    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECTS / kind, folder, ignore=ignored, dirs_exist_ok=True)
        for name in _SHARED.get(kind, ()):
            shutil.copyfile(PROJECTS / "shared" / name, folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error
    names = sorted(path.name for path in folder.iterdir())
    command = _NEXT[kind].format(shlex.quote(str(folder)))
    say(f"{folder}: {', '.join(names)}\nNext: {command}")
    return 0
