"""A whole grpo training on the tiny model, for tests in this process and in one that is killed.

python training.py FOLDER RUN      # FOLDER/inputs.json says what; goes on with FOLDER/RUN
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rookery.embedded import EngineConfig, run_engine
from rookery.environments import Game, GameEvaluator, GameSampler
from rookery.loops.grpo import GrpoConfig, GrpoInputs, GrpoResult, Watcher, train_policy
from rookery.loops.grpo.checkpoints import read_start
from rookery.ports import Engine, Evaluator, GroupDrawer
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.train import AdapterPublisher, LoraTrainer, initial_adapter
from rookery.types import Completion, Task

REWARDS = f"{Path(__file__)}:reward"
GUESS = f"{Path(__file__).parents[1] / 'environments' / 'games.py'}:guess"
SILENT = Watcher()


async def reward(task: Task, completion: Completion) -> float:
    """The share of even tokens: answers of the untrained model differ in it."""
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
    watcher: Watcher = SILENT,
    **changes: object,
) -> GrpoResult:
    """Run or resume. `wrap` is given the engine and the trainer and returns what the loop uses."""
    config = GrpoConfig.model_validate(inputs.document(**changes))
    tasksets = load_tasksets(config.judged_tasksets)
    template = load_template(inputs.model)
    async with run_engine(
        model,
        config=EngineConfig(model=str(inputs.model), cache_gib=0.01),
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name="tiny",
    ) as opened:
        engine = wrap(opened)
        start = read_start(run) or initial_adapter(
            model, config.lora, name="policy", base="tiny", seed=config.seed
        )
        trainer = LoraTrainer(model, config=config.trainer, publisher=AdapterPublisher(engine))
        drawer, evaluator = _drawing(config, engine, template, tasksets, RolloutLog(run))
        parts = GrpoInputs(
            config=config,
            start=replace(start, name="policy"),
            tasksets=tasksets,
            engine=engine,
            trainer=wrap(trainer),
            drawer=drawer,
            evaluator=evaluator,
        )
        return await train_policy(parts, run=run, watcher=watcher)


def _drawing(
    config: GrpoConfig,
    engine: Engine,
    template: Template,
    tasksets: Sequence[Taskset],
    log: RolloutLog,
) -> tuple[GroupDrawer, Evaluator]:
    params = config.drawing.params(group_size=config.group_size)
    if config.environment is None:
        return (
            GroupSampler(engine, template=template, tasksets=tasksets, params=params),
            TasksetEvaluator(engine, template=template, tasksets=tasksets, log=log),
        )
    game = Game(config.environment, template=template)
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


class Telling:
    """Says a line on standard output before and after every awaited call: a place to be killed."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def told(*args: Any, **values: Any) -> Any:
            os.write(1, b"call\n")
            result = await found(*args, **values)
            os.write(1, b"done\n")
            return result

        return told


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    options = json.loads((folder / "inputs.json").read_text())
    inputs = Inputs(*(Path(path) for path in options["inputs"]))
    model = load_model(inputs.model)
    with Run.open(folder / name) as run:
        asyncio.run(run_training(run, inputs, model=model, wrap=Telling, **options["changes"]))
        run.finish("finished")


if __name__ == "__main__":
    main()
