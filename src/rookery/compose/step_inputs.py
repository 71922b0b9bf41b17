"""What steps read that no other step makes: read and digested before the first one begins, so that
what is missing is refused before anything is run, and what is changed meanwhile when a step begins.

    inputs = InputReader().read("student", settings, made={"taskset"})
    inputs.digests                       # {"the model": ...}, as in inputs.json of the step's run
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rookery.compose.engine_models import digest_engine
from rookery.compose.evolve_inputs import (
    EvolveRunConfig,
    digest_evaluator,
    digest_program,
    digest_prompt_taskset,
    digest_prompts,
    read_prompt_taskset,
    read_prompts,
)
from rookery.compose.grpo.files import read_reference, require_start
from rookery.compose.running import (
    digest,
    digest_adapters,
    digest_models,
    digest_scorers,
    digest_tasks,
    join_digests,
)
from rookery.compose.sft import SftRunConfig
from rookery.config import Config
from rookery.embedded import resolve_model
from rookery.engines import AnySamplerConfig, find_model
from rookery.errors import RookeryError
from rookery.loops.evolve.problem import read_first_program
from rookery.loops.genome import GenomeConfig
from rookery.loops.genome.founders import FileInit, read_founders
from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmConfig, read_gold, read_items
from rookery.tasks.taskset import Taskset, TasksetConfig, load_taskset_file, load_tasksets
from rookery.weights import read_adapter

__all__ = ["InputReader", "StepInputs"]

IsMade = Callable[[str], bool]
"""Whether a key of a step's config names what another step makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step reads by itself, by the names that its run has for it."""

    digests: Mapping[str, str] = field(default_factory=dict)
    scorers: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, str]:
        return {**self.digests, **self.scorers}


class InputReader:
    """Reads the weights of a model once for all steps."""

    def __init__(self) -> None:
        self._models: dict[Path, str] = {}

    def read(self, name: str, settings: Config, *, made: Collection[str] = ()) -> StepInputs:
        """An error that names the step for what it cannot read; `made` are the keys of what is not
        there yet."""

        def is_made(key: str) -> bool:
            return any(each == key or each.startswith(f"{key}.") for each in made)

        try:
            match settings:
                case SftRunConfig():
                    return self._read_sft(settings, is_made)
                case GenomeConfig():
                    return self._read_genome(settings, is_made)
                case GrpoConfig():
                    return self._read_grpo(settings, is_made)
                case IcmConfig():
                    return self._read_icm(settings, is_made)
                case EvolveRunConfig():
                    return self._read_evolve(settings, is_made)
        except RookeryError as error:
            raise type(error)(f"The step {name} cannot be run: {error}") from error
        return StepInputs()

    def _digest_models(self, folders: Mapping[str, Path]) -> dict[str, str]:
        new = {str(each): each for each in folders.values() if each not in self._models}
        self._models |= {new[path]: known for path, known in digest_models(new).items()}
        return {name: self._models[folder] for name, folder in folders.items()}

    def _digest_engine(
        self, engine: AnySamplerConfig, tokenizer: str, is_made: IsMade
    ) -> dict[str, str]:
        if is_made("engine") or is_made("tokenizer"):
            return {}
        return self._digest_models({"the model": find_model(engine, tokenizer=tokenizer).path})

    def _read_sft(self, config: SftRunConfig, is_made: IsMade) -> StepInputs:
        tasks: dict[str, str] = {}
        start: dict[str, str] = {}
        models: dict[str, str] = {}
        if not is_made("taskset"):
            taskset = load_taskset_file(config.taskset)
            tasks = {taskset.name: digest_tasks(taskset.split(config.split))}
        if not is_made("model"):
            models = self._digest_models({"the model": resolve_model(config.model).path})
        if config.init_from is not None and not is_made("init_from"):
            start = {"init_from": read_adapter(config.init_from).version}
        return StepInputs(digests=join_digests(tasks, models) | start)

    def _read_genome(self, config: GenomeConfig, is_made: IsMade) -> StepInputs:
        tasksets = _load(config.tasksets, is_made)
        init = _digest_founders(config.init, is_made) if isinstance(config.init, FileInit) else {}
        tasks = {each.name: digest_tasks(each.tasks) for each in tasksets}
        models = self._digest_engine(config.engine, config.tokenizer, is_made)
        digests = join_digests(tasks, init, models)
        return StepInputs(digests=digests, scorers=digest_scorers(tasksets))

    def _read_grpo(self, config: GrpoConfig, is_made: IsMade) -> StepInputs:
        tasksets = _load(config.judged_tasksets, is_made)
        models = self._digest_engine(config.engine, config.tokenizer, is_made)
        if config.init_from is not None and not is_made("init_from"):
            if config.full is not None:
                models |= self._digest_models({"init_from": require_start(config.init_from)})
            else:
                read_adapter(config.init_from)  # which its run keeps
        reference = None if is_made("reference") else read_reference(config)
        if isinstance(reference, Path):
            models |= self._digest_models({"reference": reference})
        elif reference is not None:
            models["reference"] = reference.version
        tasks = {each.name: digest_tasks(each.tasks) for each in tasksets}
        scorers = digest_scorers(tasksets, game=config.game)
        return StepInputs(digests=join_digests(tasks, models), scorers=scorers)

    def _read_icm(self, config: IcmConfig, is_made: IsMade) -> StepInputs:
        digests = {}
        if not is_made("data.path"):
            items = read_items(config.data)
            if not is_made("data.gold"):
                read_gold(config.data, items)
            digests = {"items": digest(items)}
        start = None if config.iterate is None else config.iterate.sft.init_from
        if start is not None and not is_made("iterate"):
            digests["init_from"] = read_adapter(start).version
        return StepInputs(
            digests=digests | self._digest_engine(config.engine, config.tokenizer, is_made)
        )

    def _read_evolve(self, config: EvolveRunConfig, is_made: IsMade) -> StepInputs:
        settings, section = config.settings, config.settings.rookery
        digests: list[Mapping[str, str]] = []
        program, tasks = config.program, section.tasks
        if not (is_made("program") or is_made("settings.rookery.first_programs")):
            first = (
                digest_program(read_first_program(program, config=settings))
                if tasks is None
                else digest_prompts(read_prompts(config, settings))
            )
            digests.append({program.name: first})
        if config.evaluator is not None and not is_made("evaluator"):
            digests.append({config.evaluator.name: digest_evaluator(config.evaluator)})
        if tasks is not None and not is_made("settings.rookery.tasks"):
            digests.append(digest_prompt_taskset(read_prompt_taskset(tasks.taskset)))
        parts = ("adapters", "engine", "tokenizer")
        if section.engine is not None and not any(is_made(f"settings.rookery.{p}") for p in parts):
            known = digest_engine(section)
            digests += [known] if tasks is not None else []  # of programs they may be others
        return StepInputs(digests=join_digests(*digests))


def _digest_founders(config: FileInit, is_made: IsMade) -> dict[str, str]:
    """Of all of them; where some are made later, the others are only read."""
    is_list = isinstance(config.path, tuple)
    keys = [f"init.path.{i}" if is_list else "init.path" for i in range(len(config.paths))]
    given = zip(keys, config.paths, strict=True)
    paths = tuple(path for key, path in given if not is_made(key))
    founders = read_founders(config.model_copy(update={"path": paths})) if paths else {}
    return {"init": digest_adapters(founders.values())} if len(paths) == len(keys) else {}


def _load(tasksets: Iterable[TasksetConfig], is_made: IsMade) -> list[Taskset]:
    """Those that are there."""
    given = enumerate(tasksets)
    return load_tasksets([each for i, each in given if not is_made(f"tasksets.{i}")])
