"""A small code model as a real proposer: evolve beside best_of_n and sequential at equal tokens.

    python benchmarks/evolve_gpu.py --model FOLDER [--python PYTHON]          # starts a vLLM server
    python benchmarks/evolve_gpu.py --model NAME --base-url http://127.0.0.1:8000/v1

Meant for Qwen2.5-Coder-1.5B-Instruct on one GPU. The tasks are function_minimization and
circle_packing (26 circles, zero tolerance) from `evolve_tasks/`. If OPENEVOLVE_EXAMPLES names the
`examples` folder of an OpenEvolve checkout, its files of these names are used instead. Every task
runs with three seeds, with and without `tune`. A run is the command `rookery evolve run` with both
baselines: the evolution, then best_of_n and sequential, each until it has spent the evolution's
tokens. All runs share the one server at the same time.

The form of the prompt (diff or whole program, with or without another program) is chosen on the
unreported task `bin_packing`: best mean score of two seeds, then fewest failures. `--ask` sets it
instead.

`--learn N` adds an evolution to each of these that trains an adapter of the model every N
iterations (`rookery.learn`) on the GPU of the server: leave it room with `--gpu-share 0.5`.
`--tokens` ends all evolutions at the same number of tokens, trained ones included; the baselines
then spend as many.

Generated programs run in the sandbox; if none works, the output says so and they run without it.
`--minutes` ends unfinished runs; the table has their results so far, marked `cut`.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolve_arms import ARMS, LEARN, WITH_TUNE, Arm, Result, read_result, show_results, to_document

from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.sandbox import SandboxConfig, probe
from rookery.search.es import load_library

OWN_TASKS = Path(__file__).parent / "evolve_tasks"
UNREPORTED = "bin_packing"
MESSAGES = {
    "bin_packing": (
        "You are an expert in Python and in packing problems. The function pack(sizes, capacity) "
        "puts items into bins. It is scored by how few bins it needs."
    ),
    "function_minimization": (
        "You are an expert in Python and in optimization. The function search looks for the lowest "
        "point of a function of two variables that has many dips, with few calls. It is scored by "
        "how low the point is that it returns. Use the standard library and numpy only."
    ),
    "circle_packing": (
        "You are an expert in Python and in geometry. The function pack() places 26 circles that "
        "do not overlap in the unit square. It is scored by the sum of their radii; the best known "
        "is 2.635. An overlap of any size makes it invalid, so shrink radii by a factor of "
        "0.9999999 at the end. Use the standard library "
        "and numpy only."
    ),
}
"""Task descriptions for the model."""
TUNED = (
    " After you answer, the numbers written in your program are tuned automatically: write what "
    "matters as numbers, also long lists of numbers, rather than computing it."
)
"""Addition to the description for runs that tune numbers."""

SHOWN = """It scores {score}.
```{language}
{program_snippet}
```
"""
TEMPLATES = {
    "diff_user": """The program below scores {fitness_score}. Higher is better.
HISTORY
# Current Program
```{language}
{current_program}
```

# Task
Change the current program so that it scores higher. Answer with one SEARCH/REPLACE block:

<<<<<<< SEARCH
lines of the current program, copied exactly
=======
the lines that take their place
>>>>>>> REPLACE
""",
    "full_rewrite_user": """The program below scores {fitness_score}. Higher is better.
HISTORY
# Current Program
```{language}
{current_program}
```

# Task
Write a better version of the current program, with another idea. Keep the names and arguments of
its functions. Answer with the complete program in one block:

```{language}
the whole new program
```
""",
    "evolution_history": "{top_programs}",
    "top_program": f"\n# Another Program\n{SHOWN}",
    "inspirations_section": "",
}
"""Prompt templates, shorter than the shipped ones, which confuse a model of this size."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Form of the prompt."""

    is_diff: bool
    has_history: bool


WAYS = {
    "whole": Way(is_diff=False, has_history=False),
    "whole+history": Way(is_diff=False, has_history=True),
    "diff": Way(is_diff=True, has_history=False),
    "diff+history": Way(is_diff=True, has_history=True),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings shared by all runs."""

    url: str
    model: str
    folder: Path
    sandbox: Mapping[str, Any]
    in_flight: int
    workers: int
    tune: Mapping[str, float]
    model_folder: str
    """Folder of the model that adapters are trained on."""
    max_tokens: int | None
    """Tokens at which an evolution ends."""
    max_answer: int
    learn: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    task: str
    seed: int
    way: str
    iterations: int
    has_baselines: bool
    is_tuned: bool = False
    learns: bool = False

    @property
    def name(self) -> str:
        kind = f"{'-learn' if self.learns else ''}{'-tune' if self.is_tuned else ''}"
        return f"{self.task}-{self.way}{kind}-{self.seed}"

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the run's searches in the config."""
        arms = ARMS if self.has_baselines else (LEARN if self.learns else ARMS[0],)
        return tuple(f"{arm}{WITH_TUNE}" for arm in arms) if self.is_tuned else arms


def task_folder(task: str) -> Path:
    examples = os.environ.get("OPENEVOLVE_EXAMPLES", "")
    return Path(examples) / task if examples and task != UNREPORTED else OWN_TASKS / task


def write_config(case: Case, setting: Setting) -> Path:
    way = WAYS[case.way]
    folder = setting.folder / case.name
    (folder / "templates").mkdir(parents=True)
    for name, text in TEMPLATES.items():
        history = "{evolution_history}" if way.has_history else ""
        (folder / "templates" / f"{name}.txt").write_text(text.replace("HISTORY", history))
    config = {
        "max_iterations": case.iterations,
        "random_seed": case.seed,
        "diff_based_evolution": way.is_diff,
        "llm": {
            "api_base": setting.url,
            "models": [{"name": "base" if case.learns else setting.model, "weight": 1.0}],
            "temperature": 0.8,
            "top_p": 0.95,
            "max_tokens": setting.max_answer,
            "timeout": 120,
        },
        "prompt": {
            "system_message": MESSAGES[case.task] + (TUNED if case.is_tuned else ""),
            "template_dir": str(folder / "templates"),
            "num_top_programs": 1,
            "num_diverse_programs": 0,
        },
        "evaluator": {"timeout": 10},
        "rookery": {
            "in_flight": setting.in_flight,
            "workers": setting.workers,
            "baselines": list(case.arms[1:]),
            "sandbox": dict(setting.sandbox),
            "budget": {"max_tokens": setting.max_tokens},
            **({"tune": dict(setting.tune)} if case.is_tuned else {}),
            **(learning(setting) if case.learns else {}),
        },
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def learning(setting: Setting) -> dict[str, Any]:
    """Config that trains adapters and loads them into the same server."""
    url = setting.url.removesuffix("/v1")
    return {
        "engine": {"type": "fleet", "urls": [url]},
        "tokenizer": setting.model_folder,
        "learn": dict(setting.learn),
    }


def start(case: Case, setting: Setting) -> "subprocess.Popen[bytes]":
    """Start the command of a case, with its output in a file."""
    folder, problem = write_config(case, setting), task_folder(case.task)
    command = [
        sys.executable, "-m", "rookery", "evolve", "run",
        str(problem / "initial_program.py"), str(problem / "evaluator.py"),
        "-c", str(folder / "config.yaml"), "-o", str(folder / "run"),
    ]  # fmt: skip
    # Do not send this server a key that is meant for another one.
    environment = {**os.environ, "OPENAI_API_KEY": os.environ.get("VLLM_API_KEY", "")}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def run_all(cases: Sequence[Case], setting: Setting, *, limit_s: float) -> list[Result]:
    """Run all cases at the same time; end those not done after `limit_s`."""
    end = time.monotonic() + limit_s
    processes = [start(case, setting) for case in cases]
    results = []
    try:
        for case, process in zip(cases, processes, strict=True):
            is_cut = False
            try:
                process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                is_cut = True
                end_all(processes)
                process.wait()
            folder = setting.folder / case.name
            if process.returncode and not is_cut:
                said = (folder / "output.txt").read_text(errors="replace")[-2000:]
                print(f"{case.name} ended with {process.returncode}:\n{said}", flush=True)
                is_cut = True
            if not (folder / "run" / "events.db").exists():
                continue
            found = read_result(folder / "run", arms=case.arms)
            results.append(found.named(case.task, seed=case.seed, is_cut=is_cut))
            print(show_results(results[-1:]), flush=True)
    finally:
        for process in processes:
            process.kill()
    return results


def end_all(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask all processes to end, then kill those that remain."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 30
    for process in processes:
        try:
            process.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def choose_way(setting: Setting, *, iterations: int, limit_s: float) -> str:
    """Choose the best way on the unreported task."""
    cases = [
        Case(task=UNREPORTED, seed=seed, way=way, iterations=iterations, has_baselines=False)
        for way in WAYS
        for seed in (101, 102)
    ]
    results = run_all(cases, setting, limit_s=limit_s)
    arms: dict[str, list[Arm]] = {}
    for case, result in zip(cases, results, strict=True):  # fails if a run left no events
        arms.setdefault(case.way, []).append(result.arms[ARMS[0]])

    def merit(way: str) -> tuple[float, int]:
        return sum(arm.best for arm in arms[way]), -sum(arm.num_failed for arm in arms[way])

    for way, tried in arms.items():
        bests = ", ".join(f"{arm.best:.4f}" for arm in tried)
        failed = ", ".join(f"{arm.num_failed} of {arm.num_iterations}" for arm in tried)
        print(f"{UNREPORTED:22} {way:14} best {bests}  failed {failed}", flush=True)
    return max(arms, key=merit)


def python_paths() -> list[str]:
    """Folders of PYTHONPATH as absolute paths."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(Path(path).absolute()) for path in given if Path(path).exists()]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return paths


async def sandbox_settings(shown: Sequence[str]) -> dict[str, Any]:
    """Sandbox settings that show the package folders. If no sandbox works, say so and use none."""
    variables = ("PYTHONPATH",) if shown else ()
    config = SandboxConfig(variables=variables, readable=tuple(map(Path, shown)))
    probes = await probe(config)
    settings: dict[str, Any] = {"variables": list(variables), "read_paths": list(shown)}
    if works := [each.backend for each in probes if each.works]:
        print(f"generated programs run in {works[0]}", flush=True)
        return settings
    reasons = "; ".join(f"{each.backend}: {each.reason}" for each in probes)
    print(f"generated programs run WITHOUT A SANDBOX (--unsafe). {reasons}", flush=True)
    return settings | {"backend": "none"}


@asynccontextmanager
async def open_server(options: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """Open a server if needed; yields its URL and the model's name there."""
    if options.base_url:
        yield options.base_url.rstrip("/"), options.model
        return
    launch = LaunchConfig(
        model=options.model,
        python=options.python,
        replicas=1,
        max_loras=8 if options.learn else 0,
        max_model_len=options.max_model_len,
        max_num_seqs=256,
        gpu_memory_utilization=options.gpu_share,
        env={"HF_HUB_OFFLINE": "1"},
    )
    began = time.monotonic()
    async with open_fleet(FleetConfig(launch=launch)) as fleet:
        [replica] = fleet.pool.replicas
        print(f"the server is up after {time.monotonic() - began:.0f} s", flush=True)
        yield f"{replica.url}/v1", replica.capabilities.model


def measure(setting: Setting, options: argparse.Namespace) -> None:
    began = time.monotonic()
    way = options.ask
    if way == "chosen":
        limit_s = 20 * options.minutes
        way = choose_way(setting, iterations=options.choose_iterations, limit_s=limit_s)
    print(f"asked this way: {way}", flush=True)
    cases = [
        Case(
            task=task,
            seed=seed,
            way=way,
            iterations=options.iterations,
            has_baselines=not learns,
            is_tuned=is_tuned,
            learns=learns,
        )
        for task in options.tasks
        for seed in options.seeds
        for is_tuned in ([True, False] if options.untuned else [True])
        for learns in ([False, True] if options.learn else [False])
    ]
    left_s = 60 * options.minutes - (time.monotonic() - began)
    results = run_all(cases, setting, limit_s=left_s)
    print(show_results(results))
    print(f"{time.monotonic() - began:.0f} s without the server's start")
    if options.out:
        document = {"asked": way, "model": setting.model, "results": to_document(results)}
        options.out.write_text(json.dumps(document, indent=1))


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, or its name at --base-url")
    parser.add_argument("--base-url", help="of a server that is up, with /v1")
    parser.add_argument("--python", default=sys.executable, help="that has vLLM")
    parser.add_argument("--gpu-share", type=float, default=0.9, help="of memory, for the server")
    parser.add_argument("--ask", default="chosen", choices=("chosen", *WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=80, help="of an evolution")
    parser.add_argument("--choose-iterations", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=16, help="model calls of one run")
    parser.add_argument("--workers", type=int, default=2, help="evaluations of one run")
    parser.add_argument("--tasks", nargs="+", default=list(MESSAGES)[1:], choices=list(MESSAGES))
    parser.add_argument("--untuned", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tune-evaluations", type=int, default=60)
    parser.add_argument("--tune-seconds", type=float, default=30.0, help="for each new best")
    parser.add_argument("--tune-children", type=int, default=30, help="evaluations of the others")
    parser.add_argument("--learn", type=int, default=0, help="iterations between trainings")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--tokens", type=int, help="of an evolution, at most")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-answer", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all runs")
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--out", type=Path, help="the results as JSON")
    options = parser.parse_args()
    load_library()  # raises with the package to install for tuning
    sandbox = await sandbox_settings(python_paths())
    with tempfile.TemporaryDirectory() as scratch:
        async with open_server(options) as (url, model):
            setting = Setting(
                url=url,
                model=model,
                folder=(options.folder or Path(scratch)).absolute(),
                sandbox=sandbox,
                in_flight=options.in_flight,
                workers=options.workers,
                tune={
                    "evaluations": options.tune_evaluations,
                    "seconds": options.tune_seconds,
                    "children": options.tune_children,
                },
                model_folder=options.model,
                max_tokens=options.tokens,
                learn={"every": options.learn, "learning_rate": options.learning_rate},
                max_answer=options.max_answer,
            )
            await asyncio.to_thread(measure, setting, options)


if __name__ == "__main__":
    asyncio.run(main())
