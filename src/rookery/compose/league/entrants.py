"""The config of a league, and its entrants as steps: ordinary runs with default settings.

| entrant   | steps                             | applies where                              |
|-----------|-----------------------------------|--------------------------------------------|
| sft       | sft                               | every search task has an answer            |
| grpo      | grpo                              | answers are drawn, not chosen              |
| es        | genome, from an adapter of zeros  | always                                     |
| genome    | founders by sft or grpo; genome   | founders are given, or can be trained      |
| prompt    | evolve, from the prompt as it is  | the model takes chats, or another proposes |
| best_of_n | none: answers to the report tasks | answers are drawn, not chosen              |
| icm       | icm, then sft on its labels       | the tasks are texts with the same choices  |

An entrant with several steps splits its budget: founders to train get half, and so do labels.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rookery.compose.evaluation import anchored
from rookery.compose.inputs import digest, digest_adapters, digest_models, join_digests
from rookery.compose.running import merge
from rookery.compose.steps import StepConfig, StepsConfig
from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import (
    EngineChoice,
    engine_from_folder,
    find_model,
    local_model,
    opened_model,
)
from rookery.errors import TaskError
from rookery.loops.evolve.program import read_program
from rookery.runs import Run
from rookery.runs.budget import BudgetConfig
from rookery.tasks.scorers import ChoiceConfig
from rookery.tasks.taskset import (
    Taskset,
    load_taskset_file,
    options_start,
    taskset_config,
)
from rookery.tasks.template import Template, load_template
from rookery.train.sft import sft_data
from rookery.weights import read_adapter

__all__ = [
    "BEST_OF_N",
    "Entrant",
    "EntrantName",
    "League",
    "LeagueConfig",
]

EntrantName = Literal["sft", "grpo", "es", "genome", "prompt", "best_of_n", "icm"]
ENTRANTS: tuple[EntrantName, ...] = ("sft", "grpo", "es", "genome", "prompt", "best_of_n", "icm")
BEST_OF_N = "best_of_n"
SHARED = (
    "budget",
    "data.path",
    "engine",
    "init.path",
    "model",
    "split",
    "taskset",
    "tasksets",
    "tokenizer",
)
SHARED_BY_PROMPTS = (
    "rookery.budget",
    "rookery.engine",
    "rookery.tasks.model",
    "rookery.tasks.taskset",
    "rookery.tokenizer",
)
SEEDS = ("random_seed", "seed")
"""Seed keys. Like SHARED keys, entrants get them from the league, so that results compare."""
ITEMS, PROMPT = "items.jsonl", "prompt.txt"
"""Files in the league's run that entrants read."""
AS_IT_IS = "{{ prompt }}"
"""The first prompt that leaves tasks unchanged."""
MANY = 1_000_000
"""Number of steps of a search that only its budget limits."""


class LeagueConfig(Config):
    """Config of a league: one taskset, one model, one budget."""

    engine: EngineChoice = EngineConfig()
    """The engine: the model, and where it runs."""
    tokenizer: str = ""
    """A model folder or Hugging Face id; empty: the engine's model. Required for servers by URL,
    where it is also the model that is trained."""
    taskset: str
    """A file of rows, a taskset's file, hf://datasets/ID, or generated:NAME. Entrants see its
    search and select tasks. Its report tasks are read once, at the end."""
    budget: BudgetConfig
    """The budget of each seed of an entrant."""
    num_seeds: int = Field(default=3, ge=1)
    """Number of runs of each entrant, with the seeds `seed`, `seed` + 1, ..."""
    seed: int = 0
    """The first seed."""
    entrants: tuple[EntrantName, ...] = Field(default=ENTRANTS, min_length=1)
    """The entrants. One that does not apply is listed in the report with the reason."""
    settings: dict[EntrantName, dict[str, Any]] = Field(default_factory=dict)
    """Settings of entrants that replace the defaults: {sft: {learning_rate: 3e-4}}. `prompt` takes
    the keys of an evolve config. Founders are trained with the settings of sft or grpo, icm's
    adapter with those of sft."""
    founders: tuple[Path, ...] = ()
    """Adapters that genome starts with, not counted in its budget. Empty: it trains its own."""
    num_founders: int = Field(default=3, ge=2)
    """Number of founders to train if `founders` is empty."""
    prompt: Path | None = None
    """The prompt that evolution starts with; null: the prompts of the tasks."""
    num_answers: int = Field(default=8, ge=2)
    """Answers per task of which best_of_n takes the most frequent; fewer if the budget ends."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if not self.budget.has_limit:
            raise ValueError(
                "budget has no limit, and a league compares what the same spending gives: write "
                "budget: {max_answer_tokens: 100000}, or {max_hours: 0.5}"
            )
        if len(set(self.entrants)) < len(self.entrants):
            raise ValueError(f"entrants are {list(self.entrants)}: name each once")
        return self

    @field_validator("settings")
    @classmethod
    def _are_own(cls, settings: dict[EntrantName, Any]) -> dict[EntrantName, Any]:
        for name, entrant_settings in settings.items():
            shared = SHARED_BY_PROMPTS if name == "prompt" else SHARED
            for key in (*shared, *SEEDS):
                if _has(entrant_settings, key):
                    raise ValueError(
                        f"settings.{name}.{key} is the league's: all entrants have the same model, "
                        "tasks and budget, and the seeds of the league; leave it out"
                    )
        return settings

    def from_folder(self, folder: Path) -> Self:
        place = folder.absolute()
        return self.model_copy(
            update={
                "engine": engine_from_folder(self.engine, place),
                "tokenizer": local_model(self.tokenizer, place),
                "taskset": anchored(self.taskset, place),
                "founders": tuple(place / path.expanduser() for path in self.founders),
                "prompt": None if self.prompt is None else place / self.prompt.expanduser(),
            }
        )

    @property
    def model(self) -> str:
        """The model that is trained in this process."""
        return self.tokenizer or opened_model(self.engine) or EngineConfig().model


def _has(document: Any, key: str) -> bool:
    """True if the document has this dotted key."""
    for part in key.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return False
        document = document[part]
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One entrant with one seed."""

    name: EntrantName
    index: int
    """Position of the seed; 0 for the first."""
    steps: Mapping[str, StepConfig]
    """Steps by name, of which the last makes the result. Empty for best_of_n."""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.index}"


@dataclass(frozen=True)
class League:
    """A league whose taskset and tokenizer have been read."""

    config: LeagueConfig
    taskset: Taskset
    """Includes the fields of its rows."""
    folder: Path
    """The model's folder."""
    template: Template

    @classmethod
    def read(cls, config: LeagueConfig) -> Self:
        taskset = load_taskset_file(config.taskset, with_fields=True)
        for name in ("search", "select", "report"):
            if not taskset.split(name):
                raise TaskError(
                    f"splits.{name} is 0, and a league searches, selects and reports: raise it."
                )
        folder = find_model(config.engine, tokenizer=config.tokenizer).path
        return cls(config, taskset, folder, load_template(folder))

    @cached_property
    def first_prompt(self) -> str:
        """The prompt that evolution begins with. Only the fields that it names are filled in."""
        return AS_IT_IS if self.config.prompt is None else read_program(self.config.prompt).strip()

    def digests(self) -> dict[str, str]:
        """Return the digests of the inputs of all entrants."""
        rows = [*self.taskset.tasks, sorted(self.taskset.fields.items())]
        founders = [read_adapter(path) for path in self.config.founders]
        return join_digests(
            {self.taskset.name: digest(rows)},
            {"the first prompt": digest([self.first_prompt])},
            {"founders": digest_adapters(founders)},
            digest_models({"the model": self.folder}),
        )

    @property
    def is_choice(self) -> bool:
        return isinstance(self.taskset.scorer, ChoiceConfig)

    @cached_property
    def reasons(self) -> dict[EntrantName, str]:
        """Entrants that do not apply, with the reason."""
        known = {
            "sft": self._unlabelled,
            "grpo": CHOSEN if self.is_choice else "",
            "best_of_n": CHOSEN if self.is_choice else "",
            "prompt": self._unproposed,
            "icm": self._unlabellable,
        }
        known["genome"] = ""
        if known["sft"] and known["grpo"] and not self.config.founders:
            known["genome"] = (
                "No founders are given, and none can be trained: neither sft nor grpo applies."
            )
        return {name: known[name] for name in self.config.entrants if known.get(name)}

    @property
    def founders_by(self) -> EntrantName:
        """The entrant that trains founders if none are given."""
        return "grpo" if self._unlabelled else "sft"

    @cached_property
    def _unlabelled(self) -> str:
        try:
            sft_data(self.taskset.split("search"), self.template)
        except TaskError as error:
            return str(error)
        return ""

    @property
    def _unproposed(self) -> str:
        settings = self._settings("prompt")
        is_named = _has(settings, "llm.models") or _has(settings, "llm.primary_model")
        return "" if is_named or self.template.chat else MUTE

    @cached_property
    def _unlabellable(self) -> str:
        tasks = self.taskset.split("search")
        if not all(isinstance(task.prompt, str) for task in tasks):
            return "Prompts are chats, and icm asks for a label after a text."
        choices = {frozenset(task.choices) for task in tasks}
        if len(choices) > 1 or not tasks[0].choices:
            return "The tasks have no choices in common, which labels would be."
        return ""

    def entrants(self, place: Path) -> list[Entrant]:
        """Return the entrants that apply, with every seed. `place` is the league's folder."""
        makers: dict[EntrantName, Callable[[int], dict[str, StepConfig]]] = {
            "sft": self._sft,
            "grpo": self._grpo,
            "es": self._es,
            "genome": self._genome,
            "prompt": partial(self._prompt, place),
            "best_of_n": lambda _: {},
            "icm": partial(self._icm, place),
        }
        return [
            Entrant(name=name, index=index, steps=makers[name](index))
            for name in self.config.entrants
            if name not in self.reasons
            for index in range(self.config.num_seeds)
        ]

    def steps(self, place: Path) -> StepsConfig:
        """Return all steps, ordered by seed: the first seeds show how long the others take."""
        entrants = sorted(self.entrants(place), key=lambda entrant: entrant.index)
        every = {name: step for entrant in entrants for name, step in entrant.steps.items()}
        return StepsConfig(steps=every, folder=place)

    def _step(self, loop: Any, values: dict[str, Any], *sections: Mapping[str, Any]) -> StepConfig:
        for settings in sections:
            values = merge(values, settings)
        return StepConfig(loop=loop, values=values)

    def _seed(self, index: int) -> int:
        return self.config.seed + index

    def _share(self, parts: int = 1) -> dict[str, Any]:
        """Return an equal part of the budget."""
        budget = self.config.budget
        tokens, hours = budget.max_answer_tokens, budget.max_hours
        return {
            "max_answer_tokens": tokens and max(1, tokens // parts),
            "max_hours": hours and hours / parts,
        }

    @property
    def _hidden(self) -> str:
        """The taskset's name with an option that hides its report tasks."""
        taskset = self.config.taskset
        mark = "?" if options_start(taskset) == len(taskset) else "&"
        return f'{taskset}{mark}splits.hidden=["report"]'

    @property
    def _engine_keys(self) -> dict[str, Any]:
        """Config keys of every loop that asks an engine."""
        return {
            "engine": self.config.engine.model_dump(mode="json"),
            "tokenizer": self.config.tokenizer,
        }

    @property
    def _tasksets(self) -> list[dict[str, Any]]:
        return [taskset_config(self._hidden).model_dump(mode="json")]

    def _settings(self, name: EntrantName) -> Mapping[str, Any]:
        return self.config.settings.get(name, {})

    def _train(self, seed: int, budget: Mapping[str, Any], **data: Any) -> StepConfig:
        engine = self.config.engine
        place: dict[str, Any] = {}
        if engine.type == "embedded":
            place = {"device": engine.device}
        elif engine.type == "service":
            place = {"engine": engine.model_dump(mode="json")}
        values = {"model": self.config.model, **place, **data, "seed": seed, "budget": budget}
        return self._step("sft", values, self._settings("sft"))

    def _sft(self, index: int) -> dict[str, StepConfig]:
        data = {"taskset": self._hidden, "split": "search"}
        return {f"sft-{index}": self._train(self._seed(index), self._share(), **data)}

    def _reinforce(self, seed: int, budget: Mapping[str, Any]) -> StepConfig:
        sampling = self.taskset.sampling
        drawing = {"max_tokens": sampling.max_tokens, "stop": list(sampling.stop)}
        values = {**self._engine_keys, "tasksets": self._tasksets, "drawing": drawing}
        return self._step(
            "grpo", {**values, "seed": seed, "budget": budget}, self._settings("grpo")
        )

    def _grpo(self, index: int) -> dict[str, StepConfig]:
        return {f"grpo-{index}": self._reinforce(self._seed(index), self._share())}

    def _search(self, seed: int, parts: int, name: EntrantName, **values: Any) -> StepConfig:
        shared = {
            **self._engine_keys,
            "tasksets": self._tasksets,
            "finals": {"random_search": False},
        }
        spending = {"seed": seed, "budget": self._share(parts)}
        return self._step("genome", {**shared, **values, **spending}, self._settings(name))

    def _es(self, index: int) -> dict[str, StepConfig]:
        init = {"type": "zero", "count": 1}
        stages = [{"type": "es", "rank": 1, "steps": MANY}]
        step = self._search(self._seed(index), 1, "es", init=init, stages=stages)
        return {f"es-{index}": step}

    def _genome(self, index: int) -> dict[str, StepConfig]:
        seed, founders = self._seed(index), self.config.founders
        steps: dict[str, StepConfig] = {}
        if not founders:
            num = self.config.num_founders
            for number in range(num):
                founder_seed, budget = seed * num + number, self._share(2 * num)
                name = f"genome-{index}-founder-{number}"
                steps[name] = (
                    self._train(founder_seed, budget, taskset=self._hidden, split="search")
                    if self.founders_by == "sft"
                    else self._reinforce(founder_seed, budget)
                )
        paths = list(map(str, founders)) or [f"run:{name}/trained" for name in steps]
        init = {"type": "file", "path": paths}
        parts = 1 if founders else 2
        return {**steps, f"genome-{index}": self._search(seed, parts, "genome", init=init)}

    def _prompt(self, place: Path, index: int) -> dict[str, StepConfig]:
        section = {
            **self._engine_keys,
            "tasks": {"taskset": self._hidden},
            "budget": self._share(),
            "mode": "deterministic",
        }
        settings = {
            "max_iterations": MANY,
            "random_seed": self._seed(index),
            "llm": {"temperature": 1.0, "max_tokens": 1024},
            "rookery": section,
        }
        program = str(self.config.prompt or place / PROMPT)
        values = {"program": program, "settings": merge(settings, self._settings("prompt"))}
        return {f"prompt-{index}": StepConfig(loop="evolve", values=values)}

    def _icm(self, place: Path, index: int) -> dict[str, StepConfig]:
        labels, seed = f"icm-{index}-labels", self._seed(index)
        data = {
            "path": str(place / ITEMS),
            "prompt": AS_IT_IS,
            "labels": list(self.taskset.split("search")[0].choices),
            "id": "id",
            "group": "group",
        }
        values = {**self._engine_keys, "data": data, "seed": seed, "budget": self._share(2)}
        labelled = {"taskset": f"run:{labels}/sft.jsonl?fields.weight=weight", "split": "all"}
        return {
            labels: self._step("icm", values, self._settings("icm")),
            f"icm-{index}": self._train(seed, self._share(2), **labelled),
        }

    @property
    def made(self) -> set[str]:
        """Config keys whose files `write_files` writes."""
        return {"data.path", *(() if self.config.prompt else ("program",))}

    def write_files(self, run: Run) -> None:
        """Write the entrants' files: search tasks without answers, and the first prompt."""
        rows = (
            {
                **self.taskset.fields.get(task.id, {}),
                "id": task.id,
                "group": task.group or task.id,
                "prompt": str(task.prompt).rstrip(),
            }
            for task in self.taskset.split("search")
        )
        if self._unlabellable == "":
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            run.write_text(ITEMS, "".join(lines))
        run.write_text(PROMPT, AS_IT_IS + "\n")


MUTE = (
    "The model has no chat template, so that it proposes no prompts: take the instruct version, or "
    "name who proposes as settings.prompt.llm.primary_model."
)
CHOSEN = (
    "Answers are chosen among choices, not drawn: with a scorer that reads drawn answers (exact, "
    "numeric, python, ...) it would apply."
)
