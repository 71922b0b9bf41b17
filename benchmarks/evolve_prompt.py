"""Prompt evolution beside GEPA: the same tasks, model, scorer and number of rollouts.

    pip install gepa
    python benchmarks/evolve_prompt.py                                  # SmolLM2 in this process
    python benchmarks/evolve_prompt.py --fleet http://127.0.0.1:8000 --model FOLDER_OR_ID
    python benchmarks/evolve_prompt.py --gepa VENV/lib/python3.11/site-packages    # GEPA elsewhere

One model answers and reflects. Rookery finds prompts on the search tasks and chooses one on the
select tasks. GEPA, with its defaults, trains on the search tasks and validates on the select tasks
with as many rollouts as Rookery used for both. Answers are greedy and come from one engine. Every
seed's prompts answer the report tasks, which neither side has seen. The interval of the difference
is a bootstrap over tasks, each with its mean over seeds.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.compat import openevolve
from rookery.embedded import EngineConfig
from rookery.engines import AnyEngineConfig, model_folder, open_engine
from rookery.fleet import FleetConfig
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.loop import EvolveInputs, evolve
from rookery.loops.evolve.parts import Models
from rookery.loops.evolve.problem import FirstProgram
from rookery.loops.evolve.prompt_tasks import Answerer, PromptTasks, TaskAnswers, find_form
from rookery.rollout import EngineTextModel
from rookery.runs import Run
from rookery.search.statistics import bootstrap_mean, paired_difference
from rookery.seeding import stream
from rookery.tasks.taskset import Taskset, load_taskset_file
from rookery.tasks.template import load_template
from rookery.types import Group, Message, Task, TextRequest

__all__: list[str] = []

LIMITS = (0.0, 1.0)
Result = dict[str, Any]
"""One side and seed: side, seed, prompt, rewards on the report tasks, rollouts."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings shared by both sides."""

    taskset: Taskset
    answerer: Answerer
    model: EngineTextModel
    first: str
    rollouts: int
    minibatch: int
    max_tokens: int
    folder: Path

    def config(self, seed: int) -> EvolveConfig:
        own = {
            "engine": {"model": "given"},
            "tasks": {"taskset": self.taskset.name, "minibatch": self.minibatch},
            "budget": {"max_rollouts": self.rollouts},
            "mode": "deterministic",
            "in_flight": 4,
        }
        llm = {"temperature": 1.0, "max_tokens": self.max_tokens, "timeout": 600}
        return EvolveConfig.model_validate(
            {"max_iterations": 10_000, "random_seed": seed, "llm": llm, "rookery": own}
        )

    def answers(self, run: Run) -> TaskAnswers:
        config = self.config(0).rookery.tasks
        assert config is not None
        form, _ = find_form(self.first, self.taskset)
        tasks = PromptTasks(taskset=self.taskset, form=form)
        return TaskAnswers(tasks, config, answerer=self.answerer, run=run)


async def run_ours(setting: Setting, seed: int) -> tuple[str, int]:
    """The chosen prompt, and the rollouts of search and choice."""
    config, (form, _) = setting.config(seed), find_form(setting.first, setting.taskset)
    inputs = EvolveInputs(
        config=config,
        programs=[FirstProgram(code=setting.first, language="text", suffix=".txt")],
        tasks=PromptTasks(taskset=setting.taskset, form=form),
        output_format=openevolve,
    )
    engine = Models(models={"base": setting.model}, answerer=setting.answerer)
    document = config.model_dump(mode="json")
    with Run.create(setting.folder, kind="evolve", name=f"ours-{seed}", config=document) as run:
        report = await evolve(inputs, engine=engine, run=run)
    assert report.best is not None and report.tasks is not None
    num_select = len(report.tasks.finalists) * report.tasks.taskset.num_select
    return report.best.code, report.tasks.num_rollouts + num_select


class GepaAdapter:
    """Presents our tasks, answers and scorer to GEPA, which calls from its own thread."""

    propose_new_texts = None

    def __init__(self, setting: Setting, answers: TaskAnswers, loop: Any) -> None:
        self._answers = answers
        self._loop = loop
        self._setting = setting
        self._num_asked = 0

    def evaluate(
        self, batch: Sequence[Task], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> Any:
        from gepa import EvaluationBatch

        work = self._answers.answer(candidate["prompt"], batch)
        groups: list[Group] = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        described = [self._answers.describe(*pair) for pair in zip(batch, groups, strict=True)]
        scores = [rewards_of([group])[group.task.id] for group in groups]
        return EvaluationBatch(
            outputs=[one["answer"] for one in described],
            scores=scores,
            trajectories=described if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        del candidate
        records = [
            {
                "Inputs": one["task"],
                "Generated Outputs": one["answer"],
                "Feedback": f"It earned {score:g}. Expected: {one['expected']}",
            }
            for one, score in zip(eval_batch.trajectories, eval_batch.scores, strict=True)
        ]
        return dict.fromkeys(components_to_update, records)

    def reflect(self, prompt: Any) -> str:
        """Answer the reflection prompt of GEPA."""
        self._num_asked += 1
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        request = TextRequest(
            messages=(Message(role="user", content=text),),
            max_tokens=self._setting.max_tokens,
            temperature=1.0,
            seed=self._num_asked,
        )
        reply = self._setting.model.reply(request)
        return asyncio.run_coroutine_threadsafe(reply, self._loop).result().text


class Quiet:
    """Discards GEPA's log."""

    def log(self, message: str) -> None: ...


async def run_gepa(setting: Setting, seed: int, rollouts: int) -> tuple[str, int]:
    """GEPA's best prompt on its validation tasks, and the rollouts that it counted."""
    import gepa

    with Run.create(setting.folder, kind="bench", name=f"gepa-{seed}", config={}) as run:
        answers = setting.answers(run)
        adapter = GepaAdapter(setting, answers, asyncio.get_running_loop())

        def optimize() -> Any:
            return gepa.optimize(
                seed_candidate={"prompt": setting.first},
                trainset=list(answers.search),
                valset=list(answers.split("select")),
                adapter=adapter,
                reflection_lm=adapter.reflect,
                reflection_minibatch_size=setting.minibatch,
                max_metric_calls=rollouts,
                seed=seed,
                raise_on_exception=True,
                logger=Quiet(),
            )

        result = await asyncio.to_thread(optimize)
    return result.best_candidate["prompt"], int(result.total_metric_calls or 0)


def rewards_of(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards by task. An answer that the scorer cannot judge earns 0, for both sides."""
    return {
        group.task.id: sum(rollout.reward or 0.0 for rollout in group.rollouts)
        / len(group.rollouts)
        for group in groups
    }


async def measure(setting: Setting, prompts: Mapping[str, str], seed: int) -> list[Result]:
    """Measure each prompt on the report tasks."""
    with Run.create(setting.folder, kind="bench", name=f"report-{seed}", config={}) as run:
        answers = setting.answers(run)
        tasks = answers.split("report")
        found = []
        for side, prompt in prompts.items():
            rewards = rewards_of(await answers.answer(prompt, tasks))
            own = [rewards[task.id] for task in tasks]
            found.append({"side": side, "seed": seed, "prompt": prompt, "rewards": own})
    return found


async def run_seed(setting: Setting, seed: int) -> list[Result]:
    ours, spent = await run_ours(setting, seed)
    gepa, spent_by_gepa = await run_gepa(setting, seed, spent)
    results = await measure(setting, {"first": setting.first, "ours": ours, "gepa": gepa}, seed)
    rollouts = {"first": 0, "ours": spent, "gepa": spent_by_gepa}
    return [{**one, "rollouts": rollouts[one["side"]]} for one in results]


def read_results(file: str) -> list[Result]:
    is_there = bool(file) and Path(file).exists()
    return [json.loads(line) for line in Path(file).read_text().splitlines()] if is_there else []


def write_results(file: str, results: Sequence[Result]) -> None:
    if file:
        Path(file).write_text("".join(f"{json.dumps(one)}\n" for one in results))


def sum_up(results: Sequence[Result]) -> None:
    """Print each side's mean on the report tasks and the paired differences."""
    for one in results:
        mean = sum(one["rewards"]) / len(one["rewards"])
        print(f"{one['side']} {one['seed']}: {mean:.3f}, {one['rollouts']} rollouts")

    def mean_of(side: str) -> list[float]:
        every = [one["rewards"] for one in results if one["side"] == side]
        return [sum(column) / len(column) for column in zip(*every, strict=True)]

    sides = {side: mean_of(side) for side in ("first", "ours", "gepa")}
    for side, own in sides.items():
        found = bootstrap_mean(own, rng=stream(0, "bench", side), limits=LIMITS)
        print(f"{side:6} {found.estimate:.3f} ({found.low:.3f} to {found.high:.3f})")
    for ours, theirs in (("ours", "first"), ("gepa", "first"), ("ours", "gepa")):
        rng = stream(0, "bench", ours, theirs)
        gain = paired_difference(sides[ours], sides[theirs], rng=rng, limits=LIMITS)
        print(f"{ours} - {theirs}: {gain.estimate:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2", help="who answers and reflects")
    parser.add_argument("--fleet", default="", help="the URL of a vLLM server with the model")
    parser.add_argument("--taskset", default="generated:arithmetic?size=80&sampling.max_tokens=24")
    parser.add_argument("--first", default="You are a helpful assistant.", help="the first prompt")
    parser.add_argument("--rollouts", type=int, default=300, help="of the search")
    parser.add_argument("--minibatch", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160, help="of a proposal")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--results", default="", help="a .jsonl file: seeds in it are not run again"
    )
    parser.add_argument("--gepa", default="", help="a folder to import gepa from")
    args = parser.parse_args()
    if args.gepa:
        sys.path.append(args.gepa)
    config: AnyEngineConfig = (
        FleetConfig(urls=(args.fleet,)) if args.fleet else EngineConfig(model=args.model)
    )
    results = read_results(args.results)
    template = load_template(model_folder(config, tokenizer=args.model))
    taskset = load_taskset_file(args.taskset, with_fields=True)
    async with open_engine(config) as engine:
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(
                taskset=taskset,
                answerer=Answerer(sampler=engine, model=engine.base, template=template),
                model=EngineTextModel(engine, model=engine.base, template=template),
                first=args.first,
                rollouts=args.rollouts,
                minibatch=args.minibatch,
                max_tokens=args.max_tokens,
                folder=Path(folder),
            )
            for seed in range(args.seeds):
                if seed not in {one["seed"] for one in results}:
                    results += await run_seed(setting, seed)
                    write_results(args.results, results)
    sum_up(results)


if __name__ == "__main__":
    asyncio.run(main())
