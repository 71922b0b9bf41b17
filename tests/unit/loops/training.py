"""A whole grpo training on the tiny model, for tests in this process and in one that is killed."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, run_engine
from rookery.environments import Game, GameEvaluator, GameSampler
from rookery.loops.grpo import GrpoConfig, GrpoInputs, Step, train_policy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.policy_weights import AdapterPolicy, BaseModel, FullPolicy, PolicyWeights
from rookery.ports import UNOBSERVED, Engine, Evaluator, GroupDrawer, Observer
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.runs import run as run_directory
from rookery.runs.blobs import BlobStore
from rookery.slots import SlottedModel, load_model
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.train import (
    AdapterPublisher,
    FullConfig,
    FullTrainer,
    LoraTrainer,
    ModelPublisher,
    initial_adapter,
)
from rookery.types import Completion, Task

REWARDS = f"{Path(__file__)}:reward"
GUESS = f"{Path(__file__).parents[1] / 'environments' / 'games.py'}:guess"


class Killer:
    """Kills this process, as the machine would, the n-th time that a point is passed."""

    def __init__(self, point: str, number: int) -> None:
        self._point = point
        self._left = number

    def pass_by(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, *, is_by_kind: bool = False) -> None:
        """Make a function of a class or a module pass points: "before append batch"."""
        function = getattr(owner, name)

        def passing(*args: Any, **values: Any) -> Any:
            what = f"{name} {args[1]}" if is_by_kind else name
            self.pass_by(f"before {what}")
            result = function(*args, **values)
            if not asyncio.iscoroutine(result):
                self.pass_by(f"after {what}")
                return result

            async def awaited() -> Any:
                answer = await result
                self.pass_by(f"after {what}")
                return answer

            return awaited()

        setattr(owner, name, passing)


SCORING = Killer("reward", int(os.environ.get("KILL_IN_REWARD", "0")))


async def reward(task: Task, completion: Completion) -> float:
    """The share of even tokens: answers of the untrained model differ in it."""
    SCORING.pass_by("reward")
    if task.id in os.environ.get("FAILING_TASKS", "").split():
        raise ValueError("no judge today")
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)


@dataclass(frozen=True)
class Inputs:
    """The files that a training reads."""

    model: Path
    tasks: Path

    def game(self, tasks: Path, **changes: object) -> dict[str, Any]:
        """What makes a training one of guessing numbers, in two turns of a token each."""
        return {
            "tasksets": [{"type": "jsonl", "path": str(tasks), "sampling": {"max_tokens": 1}}],
            "environment": {"function": GUESS, "max_turns": 2},
            "drawing": {"max_tokens": 1},
            **changes,
        }

    def document(self, **changes: object) -> dict[str, Any]:
        """A config; keyword arguments change it."""
        return {
            "engine": {"model": str(self.model), "cache_gib": 0.01},
            "tasksets": [
                {"type": "jsonl", "path": str(self.tasks), "sampling": {"max_tokens": 4},
                 "scorer": {"type": "python", "function": REWARDS}}
            ],
            "lora": {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]},
            "steps": 5,
            "groups_per_step": 2,
            "group_size": 3,
            "drawing": {"max_tokens": 4},
            "learning_rate": 1e-2,
            "save_every": 2,
            "keep": 1,
            **changes,
        }  # fmt: skip


def _same(part: Any) -> Any:
    return part


async def run_training(
    run: Run,
    inputs: Inputs,
    *,
    model: SlottedModel,
    wrap: Callable[[Any], Any] = _same,
    observer: Observer[Step] = UNOBSERVED,
    **changes: object,
) -> GrpoReport:
    """Run or resume. `wrap` is given the engine and the trainer and returns what the loop uses.

    An adapter is trained over `model`, which the engine shares. With `full` the model is read anew.
    """
    config = GrpoConfig.model_validate(inputs.document(**changes))
    tasksets = load_tasksets(config.judged_tasksets)
    template = load_template(inputs.model)
    own = model if config.full is None else load_model(inputs.model, is_exact=config.share)
    async with _open(inputs, own, config, template) as opened:
        engine = wrap(opened)
        make = _adapter if config.full is None else _full
        drawer, evaluator = _drawing(config, engine, template, tasksets, RolloutLog(run))
        parts = GrpoInputs(
            config=config,
            weights=make(run, inputs, own, engine, config, wrap),
            tasksets=tasksets,
            drawer=drawer,
            evaluator=evaluator,
        )
        return await train_policy(parts, engine=engine, run=run, observer=observer)


@asynccontextmanager
async def _open(
    inputs: Inputs, model: SlottedModel, config: GrpoConfig, template: Template
) -> AsyncIterator[EmbeddedEngine]:
    settings = EngineConfig(model=str(inputs.model), cache_gib=0.01)
    if config.full is not None and not config.share:
        async with open_engine(settings) as packed:
            yield packed
        return
    async with run_engine(
        model,
        config=settings,
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name="tiny",
    ) as plain:
        yield plain


def _adapter(
    run: Run, inputs: Inputs, model: SlottedModel, engine: Any, config: GrpoConfig, wrap: Any
) -> PolicyWeights:
    del inputs
    start = read_start(run) or initial_adapter(
        model, config.lora, name="policy", base="tiny", seed=config.seed
    )
    trainer = LoraTrainer(model, config=config.trainer, publisher=AdapterPublisher(engine))
    return AdapterPolicy(
        wrap(trainer),
        start=replace(start, name="policy"),
        engine=engine,
        reference=start if "reference_logprobs" in config.loss.needs else None,
    )


def _full(
    run: Run, inputs: Inputs, model: SlottedModel, engine: Any, config: GrpoConfig, wrap: Any
) -> PolicyWeights:
    del run
    assert config.full is not None
    publisher = ModelPublisher(engine.replace_base)
    trainer = FullTrainer(
        model,
        name="policy",
        config=FullConfig(**config.trainer.model_dump(), **config.full.model_dump()),
        like=inputs.model,
        publisher=publisher,
    )
    if config.share:
        trainer.share_with(engine)
    return FullPolicy(
        wrap(trainer),
        reference=None,
        start=inputs.model,
        base=BaseModel(folder=inputs.model, ref=engine.base, dtype=model.dtype),
        publisher=publisher,
    )


def _drawing(
    config: GrpoConfig,
    engine: Engine,
    template: Template,
    tasksets: Sequence[Taskset],
    log: RolloutLog,
) -> tuple[GroupDrawer, Evaluator]:
    params = config.drawing.params(group_size=config.group_size)
    if config.game is None:
        return (
            GroupSampler(engine, template=template, tasksets=tasksets, params=params),
            TasksetEvaluator(engine, template=template, tasksets=tasksets, log=log),
        )
    game = Game(config.game, template=template)
    return (
        GameSampler(game, engine=engine, params=params),
        GameEvaluator(game, sampler=engine, tasksets=tasksets, log=log),
    )


def clockless(report: GrpoReport) -> dict[str, Any]:
    """A report without what the clock says, and without the run's name."""
    document = report.model_dump(mode="json", exclude={"run", "seconds"})
    for step in document["steps"]:
        step["metrics"] = {k: v for k, v in step["metrics"].items() if not k.startswith("time/")}
    return document


def arm(point: str, number: int) -> None:
    """Have this process killed where a grpo run draws, trains, publishes or writes."""
    killer = Killer(point, number)
    killer.around(Run, "append", is_by_kind=True)
    killer.around(Run, "append_many")
    killer.around(Run, "remove_folder")
    killer.around(BlobStore, "prune")
    killer.around(run_directory, "replace_folder")
    for name in ("sample", "load", "replace_base"):
        killer.around(EmbeddedEngine, name)
    for trainer in (LoraTrainer, FullTrainer):
        for name in ("forward_backward", "optim_step", "save", "export", "publish"):
            killer.around(trainer, name)


def main(folder: Path, name: str) -> None:
    """Go on with a run, as FOLDER/inputs.json says, and be killed at the point that it names."""
    options = json.loads((folder / "inputs.json").read_text())
    inputs = Inputs(*(Path(path) for path in options["inputs"]))
    arm(*options["kill"])
    model = load_model(inputs.model)
    with Run.open(folder / name) as run:
        asyncio.run(run_training(run, inputs, model=model, **options["changes"]))
        run.finish("finished")
