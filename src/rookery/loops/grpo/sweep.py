"""A sweep: many adapters trained in lockstep on one engine and one trainer.

    adapters = swept(config)                       # config.sweep: {vary: ..., seeds: 3}
    report = await train_sweep(inputs, engine=engine, run=run, observer=observer)

    policy-0   draw | gradients, step | publish | draw | ...      each has its own run,
    policy-1   draw | with all others | publish | draw | ...      in adapters/NAME of the run

| stage     | consumes                     | produces                | waits for               |
|-----------|------------------------------|-------------------------|-------------------------|
| draw      | groups of all adapters       | a batch of each         | the engine, the scorer  |
| gradients | the batches of all adapters  | gradients, in one call  | all active adapters     |
| step      | the gradients of all         | new weights, in one     | all active adapters     |
| report    | the best checkpoint of each  | one ranking             | the report tasks, once  |

Every adapter is trained by the loop for a single one (`loop.py`). On the CPU its weights are
bit-identical to training it alone: in engine and trainer, no row depends on the rows beside it.
"""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rookery.config import Config, assign, parse_config
from rookery.errors import RookeryError, TaskError, TrainError
from rookery.loops.comparison import mean_rewards
from rookery.loops.grpo.checkpoints import Selection
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import STEP, Step, write_report
from rookery.loops.grpo.loop import GrpoInputs, Parts, assemble, train
from rookery.loops.grpo.policy_weights import AdapterTrainer, SavedWeights
from rookery.ports import UNOBSERVED, Engine, Evaluator, Observer
from rookery.reports import GrpoReport, ReportRow, SettingRow, SweepRecord, SweptAdapter
from rookery.runs import NewEvent, Run
from rookery.runtime.concurrency import run_to_end, task_group
from rookery.types import Adapter, ModelRef, OptimStep, StepOutput, TrainOutput, TrainRequest

__all__ = [
    "ADAPTERS",
    "AdapterInputs",
    "JointTrainer",
    "PolicyOfMany",
    "SweepInputs",
    "Swept",
    "SweptStep",
    "swept",
    "train_sweep",
]

ADAPTERS = "adapters"
"""Folder of the run that holds one run per adapter."""
ADAPTER = "adapter"
"""Event kind: one adapter of the sweep."""
FAILED = "adapter_failed"
"""Event kind: an adapter that can no longer be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    name: str
    """Name of the adapter's folder."""
    setting: str
    """Varied values: `learning_rate=1e-5 loss.type=grpo`. Seeds of a setting share it."""
    config: GrpoConfig
    """The config that `rookery grpo run` would train it with alone."""


def swept(config: GrpoConfig) -> list[Swept]:
    """Return the adapters in the order of the sweep's values. ConfigError if one does not fit."""
    assert config.sweep is not None, "asked of sweeps only"
    vary, adapters = config.sweep.vary, list[Swept]()
    for values in itertools.product(*vary.values()):
        chosen = dict(zip(vary, values, strict=True))
        setting = " ".join(f"{key}={value}" for key, value in chosen.items() if key != "seed")
        for number in range(config.sweep.seeds):
            varied = _varied(config, chosen, seed=config.seed + number)
            name = _folder_name(f"{setting} seed={varied.seed}")
            if name in {other.name for other in adapters}:
                name = f"{len(adapters)}_{name}"
            adapters.append(Swept(name=name, setting=setting or "as configured", config=varied))
    return adapters


def _varied(config: GrpoConfig, values: Mapping[str, Any], *, seed: int) -> GrpoConfig:
    document: dict[str, Any] = config.model_dump(mode="json", exclude={"sweep"})
    document["seed"] = seed
    for key, value in sorted(values.items(), key=lambda one: one[0] != "loss.type"):
        if key == "loss.type":
            document["loss"] = {**_without_defaults(config.loss), "type": value}
        else:
            assign(document, key.replace("-", "_").split("."), value)
    return parse_config(GrpoConfig, document, origin="The sweep")


def _without_defaults(section: Config) -> dict[str, Any]:
    """Return the values that differ from their defaults: another type has other defaults."""
    document = section.model_dump(mode="json")
    defaults = type(section)().model_dump(mode="json")
    return {key: value for key, value in document.items() if value != defaults[key]}


def _folder_name(text: str) -> str:
    """`learning_rate=1e-5 loss.type=grpo seed=0` -> `learning_rate-1e-5_loss.type-grpo_seed-0`."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", text.strip().replace(" ", "_"))
    return name if len(name) <= 100 else f"{name[:80]}_{name[-19:]}"


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of one adapter, and the future of its answer."""

    method: str
    asked: Sequence[Any]
    answer: asyncio.Future[list[Any]]


class JointTrainer:
    """Waits until every active adapter has called, then computes calls of one method together."""

    def __init__(self, trainer: AdapterTrainer, *, num_adapters: int) -> None:
        self.trainer = trainer
        self._num_adapters = num_adapters
        self._waiting: list[_Call] = []
        self._methods: dict[str, Callable[[Sequence[Any]], Awaitable[list[Any]]]] = {
            "forward": trainer.forward,
            "forward_backward": trainer.forward_backward,
            "optim_step": trainer.optim_step,
        }

    async def call(self, method: str, asked: Sequence[Any]) -> list[Any]:
        """Return the answers to `asked`. The last adapter to call computes for all."""
        call = _Call(method, asked, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        try:
            await self._answer_all()
            return await call.answer
        except asyncio.CancelledError:  # its draw failed, for example
            if call in self._waiting:
                self._waiting.remove(call)
            raise

    async def leave(self) -> None:
        """Remove an adapter that has finished, so that the others no longer wait for it."""
        self._num_adapters -= 1
        await self._answer_all()

    async def _answer_all(self) -> None:
        if not self._waiting or len(self._waiting) < self._num_adapters:
            return
        calls, self._waiting = self._waiting, []
        # Calls of other adapters are in here: finish even if this task is cancelled.
        await run_to_end(self._compute(calls))

    async def _compute(self, calls: Sequence[_Call]) -> None:
        for method, compute in self._methods.items():
            same = [call for call in calls if call.method == method]
            if not same:
                continue
            try:
                answers = iter(await compute([one for call in same for one in call.asked]))
            except Exception as error:  # noqa: BLE001 (all callers get the error)
                for call in same:
                    if not call.answer.done():
                        call.answer.set_exception(error)
                continue
            for call in same:
                outputs = [next(answers) for _ in call.asked]
                if not call.answer.done():  # its caller may be cancelled
                    call.answer.set_result(outputs)


class PolicyOfMany:
    """The trainer as seen by one adapter, whose trainees have their usual names."""

    def __init__(self, joint: JointTrainer, number: int) -> None:
        self._joint, self._trainer, self._number = joint, joint.trainer, number

    def _name(self, trainee: str) -> str:
        return f"{trainee}-{self._number}"

    def add(self, trainee: str, start: Adapter) -> None:
        self._trainer.add(self._name(trainee), start)

    def adapter(self, trainee: str) -> Adapter:
        return self._trainer.adapter(self._name(trainee))

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._joint.call("forward_backward", self._renamed(requests))

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._joint.call("forward", self._renamed(requests))

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        return await self._joint.call(
            "optim_step", [replace(step, trainee=self._name(step.trainee)) for step in steps]
        )

    def _renamed(self, requests: Sequence[TrainRequest]) -> list[TrainRequest]:
        return [replace(request, trainee=self._name(request.trainee)) for request in requests]

    async def save(self, trainee: str, path: Path) -> None:
        await self._trainer.save(self._name(trainee), path)

    async def load(self, trainee: str, path: Path) -> None:
        await self._trainer.load(self._name(trainee), path)

    async def publish(self, trainee: str) -> ModelRef:
        return await self._trainer.publish(self._name(trainee))

    async def export(self, trainee: str, folder: Path) -> None:
        await self._trainer.export(self._name(trainee), folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInputs:
    """The training of one adapter, and its run."""

    swept: Swept
    inputs: GrpoInputs
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepInputs:
    adapters: Sequence[AdapterInputs]
    joint: JointTrainer
    """Trainer of all adapters."""
    evaluator: Evaluator
    """Evaluator of the report tasks. It logs to the run of the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptStep:
    """A step that all adapters have taken."""

    step: int
    rewards: Mapping[str, float]
    """Mean reward by adapter; adapters without one are left out."""
    num_tokens: int
    """Tokens drawn by all adapters."""


async def train_sweep(
    inputs: SweepInputs, *, engine: Engine, run: Run, observer: Observer[SweptStep] = UNOBSERVED
) -> GrpoReport:
    """Run or resume all trainings. Leaves the best adapter as `trained` and one report in `run`."""
    base = engine.base.version
    progress = _Progress(run, inputs.adapters, observer)
    all_parts = [
        assemble(
            adapter.inputs,
            engine=engine,
            run=adapter.run,
            observer=_AdapterObserver(adapter, progress),
        )
        for adapter in inputs.adapters
    ]
    await run.append_many([_adapter_event(adapter.swept) for adapter in inputs.adapters])
    trained = list(zip(inputs.adapters, all_parts, strict=True))
    failures = await _train_together(trained, inputs.joint, progress, run)
    observer.on_phase("report")
    ranked = _rank(trained, failures)
    record, rows = await _measure(inputs, ranked, run)
    failed = tuple(_describe_failed(adapter, failures) for adapter in inputs.adapters)
    adapters = (*record.adapters, *(one for one in failed if one.error))
    record = record.model_copy(update={"adapters": adapters})
    for adapter, parts in ranked:
        summary = parts.summary(base, engine=engine, rows=rows[adapter.swept.name])
        await asyncio.to_thread(write_report, adapter.run, summary)
    chosen, parts = ranked[0]
    summary = parts.summary(base, engine=engine, rows=rows[chosen.swept.name])
    return await asyncio.to_thread(write_report, run, summary, sweep=record)


def _adapter_event(swept: Swept) -> NewEvent:
    payload = {"setting": swept.setting, "seed": swept.config.seed}
    return NewEvent(kind=ADAPTER, key=swept.name, payload=payload, first_wins=True)


Trained = tuple[AdapterInputs, Parts]


async def _train_together(
    trained: Sequence[Trained], joint: JointTrainer, progress: "_Progress", run: Run
) -> dict[str, str]:
    """Train all adapters to their ends and return the errors of failed ones by name, from earlier
    processes too. An adapter that cannot go on, for example because of a NaN loss, ends alone. If
    all fail, the first error ends the run, and resuming it tries all again."""
    known = {event.key: str(event.payload["error"]) for event in run.events(FAILED)}
    failures, errors = dict(known), list[RookeryError]()

    async def train_one(adapter: AdapterInputs, parts: Parts) -> None:
        name = adapter.swept.name
        try:
            if name not in failures:
                await train(parts)
        except (TaskError, TrainError) as error:
            errors.append(error)
            failures[name] = str(error)
            if len(failures) == len(trained):
                raise errors[0] from None
        if name in failures:
            progress.drop(name)
            await asyncio.to_thread(adapter.run.finish, "failed", message=failures[name])
        await joint.leave()

    async with task_group() as tasks:
        for adapter, parts in trained:
            tasks.create_task(train_one(adapter, parts))
    for name in failures.keys() - known.keys():
        await run.append(FAILED, {"error": failures[name]}, key=name)
    return failures


def _rank(trained: Sequence[Trained], failures: Collection[str]) -> list[Trained]:
    """Return the adapters that did not fail, best first, by select tasks alone: settings by the
    mean of their adapters, with settings that lost one last; then adapters within a setting."""
    broken = {adapter.swept.setting for adapter, _ in trained if adapter.swept.name in failures}
    whole = [one for one in trained if one[0].swept.name not in failures]
    settings = _settings(whole)

    def merit(one: Trained) -> tuple[bool, float, float]:
        setting, alone = _select_mean(settings[one[0].swept.setting]), _select(one[1])
        low = float("-inf")
        return (
            one[0].swept.setting not in broken,
            low if setting is None else setting,
            low if alone is None else alone,
        )

    return sorted(whole, key=merit, reverse=True)


def _settings(trained: Sequence[Trained]) -> dict[str, list[Trained]]:
    by_setting: dict[str, list[Trained]] = {}
    for one in trained:
        by_setting.setdefault(one[0].swept.setting, []).append(one)
    return by_setting


def _select(parts: Parts) -> float | None:
    """Return the mean select reward of the best checkpoint."""
    return parts.selection.means[parts.selection.best]


def _select_mean(trained: Sequence[Trained]) -> float | None:
    means = [_select(parts) for _, parts in trained]
    known = [mean for mean in means if mean is not None]
    return fmean(known) if len(known) == len(means) else None


async def _measure(
    inputs: SweepInputs, ranked: Sequence[Trained], run: Run
) -> tuple[SweepRecord, dict[str, list[ReportRow]]]:
    """Measure the best checkpoint of every adapter on the report tasks, once. Returns the ranking
    and each adapter's rows with baselines, empty if the tasks are another run's."""
    first, parts = ranked[0]
    selection = Selection(
        inputs.evaluator,
        tasksets=parts.tasksets,
        weights=first.inputs.weights,
        run=run,
        samples=parts.config.samples,
    )
    saved: dict[str, SavedWeights | None] = {first.swept.name: parts.trained, **parts.baselines}
    saved |= {adapter.swept.name: other.trained for adapter, other in ranked[1:]}
    seed = first.swept.config.seed
    rewards = await selection.rewards(saved, seed=seed)
    compared = selection.compare(rewards, seed=seed) if rewards else []
    by_name = {row.name: row for row in compared}
    named: dict[str, list[ReportRow]] = {adapter.swept.name: [] for adapter, _ in ranked}
    baselines = [by_name[name] for name in parts.baselines if rewards]
    for name in named if rewards else ():
        named[name] = [_as_trained(by_name[name]), *baselines]
        baselines = [row.model_copy(update={"lead": None}) for row in baselines]
    record = SweepRecord(
        settings=_setting_rows(ranked, rewards, selection, list(parts.baselines), seed),
        adapters=tuple(_describe(one, by_name, is_chosen=one is ranked[0]) for one in ranked),
        num_rollouts=_total(ranked, "grpo/num_rollouts"),
        num_tokens=_total(ranked, "grpo/num_drawn_tokens"),
    )
    return record, named


def _as_trained(row: ReportRow) -> ReportRow:
    return row.model_copy(update={"name": "trained", "is_winner": True, "lead": None})


def _setting_rows(
    ranked: Sequence[Trained],
    rewards: Mapping[str, Mapping[str, float]],
    selection: Selection,
    baselines: Sequence[str],
    seed: int,
) -> tuple[SettingRow, ...]:
    """Return one row per setting, from the mean of its adapters' rewards, task by task."""
    settings = _settings(ranked)
    if not rewards:
        return tuple(
            SettingRow(name=setting, num_seeds=len(trained), select=_select_mean(trained))
            for setting, trained in settings.items()
        )
    earned = {
        setting: mean_rewards([rewards[adapter.swept.name] for adapter, _ in trained])
        for setting, trained in settings.items()
    }
    first = next(iter(settings))
    all_earned = {first: earned[first], **{name: rewards[name] for name in baselines}} | earned
    rows = {row.name: row for row in selection.compare(all_earned, seed=seed)}
    return tuple(
        SettingRow(
            **rows[setting].model_dump(),
            num_seeds=len(trained),
            select=_select_mean(trained),
        )
        for setting, trained in settings.items()
    )


def _describe(one: Trained, rows: Mapping[str, ReportRow], *, is_chosen: bool) -> SweptAdapter:
    adapter, parts = one
    return SweptAdapter(
        name=adapter.swept.name,
        setting=adapter.swept.setting,
        seed=adapter.swept.config.seed,
        select=_select(parts),
        chosen_step=parts.selection.best,
        is_chosen=is_chosen,
        row=rows.get(adapter.swept.name),
        rewards=tuple(step.metrics.get("reward/mean") for step in parts.log.read()),
    )


def _describe_failed(adapter: AdapterInputs, failures: Mapping[str, str]) -> SweptAdapter:
    swept, error = adapter.swept, failures.get(adapter.swept.name, "")
    rewards = tuple(
        event.payload["metrics"].get("reward/mean") for event in adapter.run.events(STEP)
    )
    return SweptAdapter(
        name=swept.name,
        setting=swept.setting,
        seed=swept.config.seed,
        rewards=rewards if error else (),
        error=error,
    )


def _total(trained: Sequence[Trained], name: str) -> int:
    return int(
        sum(step.metrics.get(name) or 0 for _, parts in trained for step in parts.log.read())
    )


class _Progress:
    """Steps of all adapters, in earlier processes too. Logs a step once all have taken it."""

    def __init__(
        self, run: Run, adapters: Sequence[AdapterInputs], observer: Observer[SweptStep]
    ) -> None:
        self._run = run
        self.observer = observer
        self._names = [adapter.swept.name for adapter in adapters]
        self._num_steps = {adapter.swept.name: adapter.swept.config.steps for adapter in adapters}
        self._taken: dict[int, dict[str, Mapping[str, float]]] = {}
        for adapter in adapters:
            for event in adapter.run.events(STEP):
                self._note(adapter.swept.name, event.payload["step"], event.payload["metrics"])

    def _note(self, name: str, step: int, metrics: Mapping[str, float]) -> bool:
        """Record a step. Return True if all adapters that reach it have taken it."""
        taken = self._taken.setdefault(step, {})
        keys = ("reward/mean", "grpo/num_drawn_tokens")
        taken[name] = {key: metrics[key] for key in keys if key in metrics}
        return all(other in taken for other, num in self._num_steps.items() if num > step)

    def drop(self, name: str) -> None:
        """Stop waiting for further steps of an adapter."""
        self._num_steps[name] = 0

    def take(self, name: str, step: Step) -> None:
        if not self._note(name, step.step, step.metrics):
            return
        taken = self._taken[step.step]
        means = {other: taken[other].get("reward/mean") for other in self._names if other in taken}
        rewards = {other: reward for other, reward in means.items() if reward is not None}
        shown = {f"reward/{other}": reward for other, reward in rewards.items()}
        if rewards:
            shown["reward/mean"] = fmean(rewards.values())
        tokens = sum(int(metrics.get("grpo/num_drawn_tokens", 0)) for metrics in taken.values())
        self._run.log_metrics(step.step, {**shown, "grpo/num_drawn_tokens": float(tokens)})
        self.observer.on_step(SweptStep(step=step.step, rewards=rewards, num_tokens=tokens))


class _AdapterObserver(Observer[Step]):
    """The observer of one adapter."""

    def __init__(self, adapter: AdapterInputs, progress: _Progress) -> None:
        self._name, self._progress = adapter.swept.name, progress

    def on_phase(self, name: str) -> None:
        self._progress.observer.on_phase(name)

    def on_step(self, step: Step) -> None:
        self._progress.take(self._name, step)
