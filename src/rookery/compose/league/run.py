"""`run_league`: runs every way to improve a model on one taskset, under one budget.

    taskset: tasks.jsonl
    engine: {model: smollm2}
    budget: {max_answer_tokens: 100000}

Each entrant with each seed is one or more ordinary runs beside the league's own: `LEAGUE.sft-0`.
The league resumes as a pipeline does. An entrant that fails is left out with its error, and the
others continue. If servers, workers or the disk fail, the league ends and can be resumed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rookery.compose.inputs import InputReader, RunInputs, digest, digest_scorers
from rookery.compose.league.entrants import League, LeagueConfig
from rookery.compose.league.measure import find_results, open_measurement
from rookery.compose.running import (
    ConfigSource,
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    finisher,
    on_same_inputs,
    quiet_libraries,
    require_same,
)
from rookery.compose.sft import SftRunConfig
from rookery.compose.steps import (
    StepsConfig,
    feeds,
    read_step,
    read_step_inputs,
    require_order,
    require_places,
    take_steps,
)
from rookery.engines import require_adapters, with_rank
from rookery.errors import (
    AdapterError,
    ConfigError,
    EngineDownError,
    EngineError,
    FleetDownError,
    ModelError,
    TaskError,
    TrainError,
    is_of_disk,
)
from rookery.loops.evolve.prompt_tasks import find_form
from rookery.reports import LeagueReport
from rookery.runs import Run
from rookery.ui.display import Display

__all__ = ["LEAGUE", "run_league"]

SHARED_INPUTS = "entrants.json"
"""File with the digests of all entrants' inputs. An entrant that begins later must match them."""
FAILED = "league/failed"
"""Event with the error of a step that is left out."""


def run_league(
    config: ConfigSource | LeagueConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[LeagueReport]:
    """Run every applicable method under the same budget, and rank the results.

    `run_league("league.yaml", num_seeds=5)`; `values` are keys of the config. The report tasks are
    read once, after all entrants have ended.
    """
    return LEAGUE.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: LeagueConfig, open_run: RunOpener, display: Display) -> Outcome[LeagueReport]:
    quiet_libraries()
    league = League.read(config)
    display.note(f"{name} does not take part. {why}" for name, why in league.reasons.items())
    steps = _check(league, open_run.folder or open_run.place or Path(LEAGUE.name))
    inputs = _read_inputs(league, steps)

    def begin(run: Run) -> StepsConfig:
        nonlocal steps  # made once: many seeds have thousands of steps
        league.write_files(run)
        steps = league.steps(run.path)
        return steps

    def take(run: Run, name: str, work: Callable[[], None]) -> None:
        def require_inputs() -> None:
            read = _read_step_inputs(league, steps, name, InputReader())
            require_same(run.path, inputs[name].all, read.all)

        _take(steps, display, run, name, partial(_try, work, require_inputs))

    scorers = digest_scorers([league.taskset])
    same = on_same_inputs(open_run, league.digests(), scorers, file=SHARED_INPUTS)
    again = take_steps(begin, same, display, inputs=inputs, take=take)
    return finisher(partial(_plan, league))(config, again, display)


def _check(league: League, place: Path) -> StepsConfig:
    """Return the steps, with valid settings. `place` is the folder of the league's run."""
    steps, entrants = league.steps(place), league.entrants(place)
    if not entrants:
        reasons = " ".join(f"{name}: {reason}" for name, reason in league.reasons.items())
        raise ConfigError(f"No entrant applies. {reasons}")
    require_order(steps)
    require_places(steps, place)
    if any(entrant.name == "prompt" for entrant in entrants):
        find_form(league.first_prompt, league.taskset)  # also checks the report tasks
    for name in (name for entrant in entrants if entrant.index == 0 for name in entrant.steps):
        # Other seeds have the same settings.
        settings = read_step(steps, name, place, are_made=False)
        if isinstance(settings, SftRunConfig):  # trained without asking an engine
            ranks = {f"The rank of {name}": settings.rank}
            require_adapters(with_rank(league.config.engine, settings.rank), ranks)
    return steps


def _read_inputs(league: League, steps: StepsConfig) -> dict[str, RunInputs]:
    """Digest the external inputs of every step. They are the same for all seeds of an entrant."""
    reader = InputReader()
    first: dict[tuple[str, int], RunInputs] = {}
    inputs: dict[str, RunInputs] = {}
    for entrant in sorted(league.entrants(Path.cwd()), key=lambda entrant: entrant.index):
        for place, name in enumerate(entrant.steps):
            if entrant.index == 0:
                first[entrant.name, place] = _read_step_inputs(league, steps, name, reader)
            inputs[name] = first[entrant.name, place]
    return inputs


def _read_step_inputs(
    league: League, steps: StepsConfig, name: str, reader: InputReader
) -> RunInputs:
    settings = read_step(steps, name, Path.cwd(), are_made=False)
    return read_step_inputs(steps, name, settings, reader, made=league.made)


def _take(
    steps: StepsConfig, display: Display, run: Run, name: str, try_work: Callable[[], str]
) -> None:
    """Run a step, and record its failure. A step that takes from a failed step fails too."""
    if run.get(FAILED, name) is not None:
        return
    sources = [step for _, step in feeds(steps, name)]
    missing = [step for step in sources if run.get(FAILED, step) is not None]
    error = f"It takes from {missing[0]}, which is left out." if missing else try_work()
    if error:
        display.note([f"{name} is left out. {error}"])
        run.append_blocking(FAILED, {"error": error}, key=name)


def _try(work: Callable[[], None], require_inputs: Callable[[], None]) -> str:
    """Run a step; return its error, or "" if it succeeds. Failures of servers, workers or the disk,
    and changed inputs, are raised: they end the league."""
    try:
        work()
    except (EngineDownError, FleetDownError):
        raise
    except (AdapterError, ConfigError, EngineError, ModelError, TaskError, TrainError) as error:
        if is_of_disk(error):
            raise
        require_inputs()
        return str(error)
    return ""


def _plan(
    league: League, config: LeagueConfig, open_run: RunOpener, display: Display
) -> RunPlan[LeagueReport]:
    """Plan the report, after all steps have ended."""
    del config
    assert open_run.folder is not None
    with Run.view(open_run.folder) as run:
        failed = {event.key: str(event.payload["error"]) for event in run.events(FAILED)}
    results, left_out = find_results(league, open_run.folder, failed)

    entrants = [(r.entrant.id, r.prompt, r.adapter and r.adapter.version) for r in results]
    tasks = {league.taskset.name: digest(league.taskset.split("report"))}
    return RunPlan(
        inputs=RunInputs(
            digests={**tasks, "entrants": digest(entrants)},
            models={"the model": league.folder},
            scorers=digest_scorers([league.taskset]),
        ),
        opened=open_measurement(league, results, left_out, display),
    )


LEAGUE = RunKind("league", config=LeagueConfig, finish=_finish, scored=())
