"""`run_grpo`: trains a policy from a reward, from its config to its report and page.

    settle, read_setup    setup.py    read all inputs; fill in what the config leaves open
    plan_servers          plan.py     refuse what does not fit into memory; servers on this GPU
    open_beside           bridge.py   open the engine, the trainer's model and the bridge
    _ready                            make what is trained; refuse what would make the run fail
    train_policy          loops/grpo  create the run and train; `train_sweep` for a sweep

A service trains by itself, so it has no plan, no bridge and no model here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rookery.compose.grpo.bridge import Opened, open_beside
from rookery.compose.grpo.plan import plan_servers
from rookery.compose.grpo.policy import (
    MakePolicy,
    PolicyParts,
    adapter_policy,
    check_service,
    compute_for_first_process,
    end_processes,
    full_policy,
    make_reference,
    policy_on_service,
    start_adapter,
)
from rookery.compose.grpo.setup import (
    GrpoSetup,
    LaunchSettings,
    find_inputs,
    read_setup,
    read_step_inputs,
    settle,
)
from rookery.compose.running import (
    ConfigSource,
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    finisher,
    is_first_process,
    is_run,
    num_processes,
    quiet_libraries,
    write_page,
)
from rookery.environments import Game, GameEvaluator, GameSampler
from rookery.errors import ConfigError
from rookery.loops.grpo import GrpoConfig, GrpoInputs, Step, train_policy
from rookery.loops.grpo.group_source import BatchDrawer
from rookery.loops.grpo.loop import BatchSource
from rookery.loops.grpo.policy_trainer import check_inputs
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights
from rookery.loops.grpo.sweep import (
    ADAPTERS,
    AdapterInputs,
    JointTrainer,
    PolicyOfMany,
    SweepInputs,
    Swept,
    SweptStep,
    swept,
    train_sweep,
)
from rookery.ports import Engine, Evaluator, GroupDrawer, Observer
from rookery.remote import open_client
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.tasks.taskset import Taskset
from rookery.train import LoraConfig, LoraTrainer, initial_adapter, new_adapter
from rookery.train.processes import Processes, join_processes
from rookery.types import Adapter, SampleRequest, SamplingParams
from rookery.ui.display import Bar, Display

__all__ = ["GRPO", "Measurements", "TrainBar", "run_grpo"]

Train = Callable[[Run], Awaitable[GrpoReport]]


def run_grpo(
    config: ConfigSource | GrpoConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[GrpoReport]:
    """Train a policy from a reward, and measure its gain on tasks that the training never saw.

    `run_grpo("mine.yaml", seed=3)`; `values` are keys of the config. The folder of the outcome
    holds `trained` (a PEFT folder, or a model folder with `full`), `checkpoints`, `report.html`,
    `report.json` and everything to resume.
    """
    return GRPO.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: GrpoConfig, open_run: RunOpener, display: Display) -> Outcome[GrpoReport]:
    config = settle(config, open_run.folder)
    if not is_first_process():
        quiet_libraries()
        return compute_for_first_process(read_setup(config))
    if config.game is not None and open_run.rescored:
        # A game is rewarded while it is played, and the weights of old checkpoints are gone.
        open_run = replace(open_run, rescored=())
    return finisher(_plan, track=lambda config: config.track)(config, open_run, display)


GRPO = RunKind(
    "grpo", config=GrpoConfig, finish=_finish, inputs=read_step_inputs, scored=("select",)
)


def _plan(config: GrpoConfig, open_run: RunOpener, display: Display) -> RunPlan[GrpoReport]:
    """Plan the run. Checks without weights come first, because reading weights takes minutes."""
    if config.atropos is not None:
        from rookery.compose.grpo.atropos import gateway_key  # needs the extra `serve`

        gateway_key(config.atropos)
    if config.sweep is not None:
        _check_sweep(config, open_run)
    setup = read_setup(config)
    if setup.engine.type == "service":
        check_service(setup)
        opened = _open_on_service(config, setup, display, is_new=open_run.is_new)
    else:
        launch = plan_servers(config, setup)
        opened = _open(config, setup, launch, display, is_new=open_run.is_new)
    return RunPlan(inputs=find_inputs(setup), opened=opened)


def _check_sweep(config: GrpoConfig, open_run: RunOpener) -> None:
    swept(config)  # refuses values that do not fit
    if num_processes() > 1:
        raise ConfigError(
            f"A sweep computes in one process, and torchrun started {num_processes()}: start it "
            "without torchrun."
        )
    if open_run.rescored is not None:
        raise ConfigError(
            "--rescore is for one training, and this run has many: leave it out, or score the "
            f"runs in {open_run.folder}/{ADAPTERS} again one by one."
        )


@asynccontextmanager
async def _open(
    config: GrpoConfig, setup: GrpoSetup, launch: LaunchSettings, display: Display, *, is_new: bool
) -> AsyncIterator[Train]:
    display.note(note for taskset in setup.tasksets for note in taskset.notes)
    if setup.full is not None and setup.lora != LoraConfig():
        display.note(["lora has no effect: full trains all weights of the model."])
    display.say(f"loading {setup.folder.name}")
    outcomes: list[Outcome[GrpoReport]] = []
    with display.launching() as show:
        async with open_beside(setup, launch=launch, on_launch=show) as opened:
            display.say(f"bridge {opened.bridge.name}: {opened.bridge.why}")
            processes = await asyncio.to_thread(join_processes, opened.model.device.type)
            ready = await _ready(config, setup, opened, processes, display)
            if is_new and setup.atropos is None:
                is_merge = opened.bridge.is_merge
                await _try_drawing(config, setup, opened.engine, is_merge=is_merge)

            async def train(run: Run) -> GrpoReport:
                outcomes.append(Outcome(await ready(run), run.path))
                return outcomes[0].report

            yield train
            await asyncio.to_thread(end_processes, processes, outcomes[0])


@asynccontextmanager
async def _open_on_service(
    config: GrpoConfig, setup: GrpoSetup, display: Display, *, is_new: bool
) -> AsyncIterator[Train]:
    """Open a service that has the model, draws the answers and trains the adapter."""
    assert setup.engine.type == "service"
    display.note(note for taskset in setup.tasksets for note in taskset.notes)
    async with open_client(setup.engine, has_last_states=True) as client:
        engine = client.engine
        new = partial(new_adapter, engine.linear_layers)
        start = start_adapter(setup, new, seed=config.seed)
        _check(config, setup, engine, start=start)
        await engine.unload(await engine.load(start))
        if is_new:
            await _try_drawing(config, setup, engine, is_merge=False)

        async def train(run: Run) -> GrpoReport:
            async with policy_on_service(
                setup, client, run, start, needs_reference=config.needs_reference
            ) as weights:
                inputs = _inputs(config, setup, run, engine=engine, weights=weights)
                return await _train(inputs, engine, run, display)

        yield train


async def _ready(
    config: GrpoConfig, setup: GrpoSetup, opened: Opened, processes: Processes, display: Display
) -> Train:
    """Return the loop from a run to its report. Refuses everything that would make it fail."""
    adapters = [] if config.sweep is None else swept(config)
    configs = [adapter.config for adapter in adapters] or [config]
    if setup.full is not None:
        _check(config, setup, opened.engine, start=None)
    starts = [] if setup.full is not None else [_start(each, setup, opened) for each in configs]
    reference = await asyncio.to_thread(make_reference, setup, opened.model)
    parts = PolicyParts(opened=opened, processes=processes, reference=reference)
    if setup.full is not None:
        return partial(_train_here, config, setup, opened, full_policy(setup, parts), display)
    trainer = LoraTrainer(opened.model, config=setup.trainer, processes=processes)
    opened.publish_adapters(trainer)
    if config.sweep is None:
        only = trainer.publisher if opened.bridge.is_merge else None
        policy = adapter_policy(
            starts[0], parts, trainer=trainer, needs_reference=config.needs_reference, only=only
        )
        return partial(_train_here, config, setup, opened, policy, display)
    joint = JointTrainer(trainer, num_adapters=len(adapters))
    trainings = []
    for number, (adapter, start) in enumerate(zip(adapters, starts, strict=True)):
        needs, one = adapter.config.needs_reference, PolicyOfMany(joint, number)
        policy = adapter_policy(start, parts, trainer=one, needs_reference=needs)
        trainings.append((adapter, policy))
    return partial(_train_all, config, setup, opened.engine, joint, trainings, display)


def _start(config: GrpoConfig, setup: GrpoSetup, opened: Opened) -> Adapter:
    """Return the adapter to begin with. Refuses one that does not fit the model."""
    start = start_adapter(setup, partial(initial_adapter, opened.model), seed=config.seed)
    opened.model.bank.check(start, max_rank=max(start.rank, 1))
    _check(config, setup, opened.engine, start=None if opened.bridge.is_merge else start)
    return start


def _check(config: GrpoConfig, setup: GrpoSetup, engine: Engine, *, start: Adapter | None) -> None:
    tasksets, template = setup.tasksets, setup.template
    evaluator = (
        None
        if setup.game is not None
        else TasksetEvaluator(engine, template=template, tasksets=tasksets)
    )
    if setup.atropos is None:
        _drawer(setup, engine, _params(config))  # refuses choices and unplayable games
    check_inputs(config, start=start, tasksets=tasksets, engine=engine, evaluator=evaluator)


async def _try_drawing(
    config: GrpoConfig, setup: GrpoSetup, engine: Engine, *, is_merge: bool
) -> None:
    """Draw some of the first groups with the first policy, to refuse rewards that never differ."""
    params = _params(config)
    if params.is_cut:  # servers may not report the kept tokens of top_p, top_k, min_p
        one = replace(params, n=1, max_tokens=1)
        prompt = setup.template.encode(setup.tasksets[0].tasks[0])
        await engine.sample([SampleRequest(model=engine.base, prompt=prompt, params=one)])
    tasks = [task for taskset in setup.tasksets for task in taskset.split("search")]
    drawer = BatchDrawer(_drawer(setup, engine, params), tasks=tasks, config=config)
    if setup.init is not None and not is_merge:
        start = await engine.load(replace(setup.init, name=POLICY))
        try:
            await drawer.check(start)
        finally:
            await engine.unload(start)
    elif setup.is_shared or setup.start == setup.folder.path:
        await drawer.check(engine.base)


def _params(config: GrpoConfig) -> SamplingParams:
    return config.drawing.params(group_size=config.group_size)


def _drawer(setup: GrpoSetup, engine: Engine, params: SamplingParams) -> GroupDrawer:
    if setup.game is not None:
        game = Game(setup.game, template=setup.template)
        return GameSampler(game, engine=engine, params=params)
    return GroupSampler(engine, template=setup.template, tasksets=setup.tasksets, params=params)


def _evaluator(setup: GrpoSetup, engine: Engine, run: Run) -> Evaluator:
    log = RolloutLog(run)
    if setup.game is not None:
        game = Game(setup.game, template=setup.template)
        return GameEvaluator(game, sampler=engine, tasksets=setup.tasksets, log=log)
    return TasksetEvaluator(engine, template=setup.template, tasksets=setup.tasksets, log=log)


# The loop: one training, or many adapters, each with its own run in `adapters`.


def _inputs(
    config: GrpoConfig,
    setup: GrpoSetup,
    run: Run,
    *,
    engine: Engine,
    weights: PolicyWeights,
    source: BatchSource | None = None,
) -> GrpoInputs:
    """Make the inputs of the loop. `source` makes batches from environments elsewhere."""
    return GrpoInputs(
        config=config,
        weights=weights,
        tasksets=setup.tasksets,
        drawer=source or _drawer(setup, engine, _params(config)),
        evaluator=_evaluator(setup, engine, run),
        decode=setup.template.decode,
    )


async def _train_here(
    config: GrpoConfig,
    setup: GrpoSetup,
    opened: Opened,
    make_policy: MakePolicy,
    display: Display,
    run: Run,
) -> GrpoReport:
    engine, weights = opened.engine, make_policy(run)
    opening: AbstractAsyncContextManager[BatchSource | None] = nullcontext()
    if setup.atropos is not None:
        from rookery.compose.grpo.atropos import open_source  # as above

        opening = open_source(config, setup, opened, run=run, say=display.say)
    async with opening as source:
        inputs = _inputs(config, setup, run, engine=engine, weights=weights, source=source)
        return await _train(inputs, engine, run, display)


async def _train(inputs: GrpoInputs, engine: Engine, run: Run, display: Display) -> GrpoReport:
    config = inputs.config
    with display.bar("train", total=config.steps, noun="step", run=run) as bar:
        shown = TrainBar(bar, display, Measurements(config, inputs.tasksets))
        return await train_policy(inputs, engine=engine, run=run, observer=shown)


async def _train_all(
    config: GrpoConfig,
    setup: GrpoSetup,
    engine: Engine,
    joint: JointTrainer,
    trainings: Sequence[tuple[Swept, MakePolicy]],
    display: Display,
    run: Run,
) -> GrpoReport:
    with ExitStack() as stack:
        adapters = []
        for adapter, make_policy in trainings:
            own_run = stack.enter_context(await asyncio.to_thread(_open_own_run, run, adapter))
            weights = make_policy(own_run)
            inputs = _inputs(adapter.config, setup, own_run, engine=engine, weights=weights)
            adapters.append(AdapterInputs(swept=adapter, inputs=inputs, run=own_run))
        evaluator = _evaluator(setup, engine, run)
        sweep = SweepInputs(adapters=adapters, joint=joint, evaluator=evaluator)
        num_steps = max(adapter.config.steps for adapter, _ in trainings)
        with display.bar("train", total=num_steps, noun="step", run=run) as bar:
            longest = config.model_copy(update={"steps": num_steps})
            measured = Measurements(longest, setup.tasksets, num_adapters=len(adapters))
            shown = SweepBar(bar, display, measured)
            report = await train_sweep(sweep, engine=engine, run=run, observer=shown)
        for each in adapters:
            if not (each.run.path / "report.json").is_file():
                continue  # the adapter failed
            await write_page(each.run)
    return report


def _open_own_run(run: Run, adapter: Swept) -> Run:
    """Create or resume the run of one adapter."""
    root = run.path / ADAPTERS
    if is_run(root / adapter.name):
        return Run.open(root / adapter.name)
    document = adapter.config.model_dump(mode="json")
    return Run.create(root, kind="grpo", config=document, name=adapter.name)


# Progress bars, which count measurements too.


ANSWER, BETWEEN = "answer", "between"
"""Kinds of work beside steps: measured answers, and phases between trainings."""


class Measurements:
    """Counts the answers that measure a training: those of each checkpoint, and of the report."""

    def __init__(
        self, config: GrpoConfig, tasksets: Sequence[Taskset], *, num_adapters: int = 1
    ) -> None:
        self._config, self._num_adapters = config, num_adapters
        self.select, report = (
            sum(len(taskset.split(name)) for taskset in tasksets) for name in ("select", "report")
        )
        num_policies = num_adapters + (1 if config.init_from is None else 2)
        num_drawn = 0 if config.samples is None else config.samples.num
        self._report = num_policies * report * (1 + num_drawn)
        self.worth = 1 / (config.groups_per_step * config.group_size * num_adapters)
        """Cost of an answer, in steps."""

    def left(self, *, step: int) -> int:
        """Return the answers left after `step` steps, if the last step is not measured yet."""
        num_checkpoints = -(-(self._config.steps - step + 1) // self._config.save_every)
        return self._report + num_checkpoints * self._num_adapters * self.select


AnyStep = TypeVar("AnyStep", contravariant=True)


class _MeasuredBar(Observer[AnyStep]):
    """Shows steps on a progress bar. The time left includes the measurements."""

    def __init__(self, bar: Bar, display: Display, measurements: Measurements) -> None:
        self._bar, self._display, self._measurements = bar, display, measurements
        self._expect(step=0)

    def on_phase(self, name: str) -> None:
        if name == "train":  # behind a measurement
            self._bar.left.did(self._measurements.select, ANSWER)
        else:
            self._bar.left.did(0, BETWEEN)
        self._bar.update(name=name)

    def on_budget(self, share: float) -> None:
        self._bar.left.limit(share)

    def _expect(self, *, step: int) -> None:
        num_left, worth = self._measurements.left(step=step), self._measurements.worth
        self._bar.left.expect(num_left, ANSWER, worth=worth)

    def _took(self, step: int, *, num_tokens: int) -> None:
        self._expect(step=step + 1)
        self._bar.advance(0, tokens=num_tokens)
        self._bar.update(done=step + 1)


class SweepBar(_MeasuredBar[SweptStep]):
    """Shows a sweep on a progress bar, with a line per step."""

    def on_step(self, step: SweptStep) -> None:
        self._took(step.step, num_tokens=step.num_tokens)
        if not step.rewards:
            return
        best = max(step.rewards, key=step.rewards.__getitem__)
        low, mean = min(step.rewards.values()), fmean(step.rewards.values())
        self._display.say(
            f"step {step.step:>4}   reward {mean:.3f} ({low:.3f} to {step.rewards[best]:.3f} of "
            f"{len(step.rewards)} adapters)   highest {best}"
        )


class TrainBar(_MeasuredBar[Step]):
    """Shows a training on a progress bar, with a line per step."""

    def on_step(self, step: Step) -> None:
        self._took(step.step, num_tokens=int(step.metrics["grpo/num_drawn_tokens"]))
        self._display.say(_step_line(step))


def _step_line(step: Step) -> str:
    def show(name: str, digits: str) -> str:
        value = step.metrics.get(name)
        return "-" if value is None else format(value, digits)

    return (
        f"step {step.step:>4}   reward {show('reward/mean', '.3f')}   "
        f"gap {show('grpo/logprob_gap', '.1e')}   "
        f"{show('grpo/num_groups', '.0f')} groups, {show('grpo/num_equal_groups', '.0f')} equal"
    )
