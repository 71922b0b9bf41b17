"""`run_grpo`: a policy trained from a reward, from its config to its report and page."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rookery.compose.grpo.bridge import (
    Bridged,
    InProcess,
    Opened,
    attach,
    bridged_engine,
    choose_bridge,
    is_merged,
)
from rookery.compose.grpo.files import GrpoFiles, find_inputs, read_files, read_step_inputs
from rookery.compose.grpo.plan import MemoryPlan, check_plan, has_one_gpu, server_share
from rookery.compose.grpo.policy import (
    MakePolicy,
    PolicyParts,
    adapter_policy,
    compute_for_first_process,
    end_processes,
    full_policy,
    make_reference,
)
from rookery.compose.grpo.progress import Measurements, SweepBar, TrainBar
from rookery.compose.grpo.service import check_service, own_states, service_policy, service_start
from rookery.compose.running import (
    ConfigSource,
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    carry_out,
    is_first_process,
    is_run,
    num_processes,
    quiet_libraries,
    run_async,
    tracked,
    write_page,
)
from rookery.concurrency import task_group
from rookery.embedded import open_engine as open_embedded
from rookery.embedded import run_engine
from rookery.engines import OnLaunch, base_name, open_servers
from rookery.environments import Game, GameEvaluator, GameSampler
from rookery.errors import ConfigError
from rookery.fleet.residency import claim_folder
from rookery.fleet.staging import memory_folder
from rookery.loops.grpo import GrpoConfig, GrpoInputs, train_policy
from rookery.loops.grpo.checkpoints import START, read_start
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
    swept,
    train_sweep,
)
from rookery.ports import Engine, Evaluator, GroupDrawer
from rookery.remote import open_client
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, initial_adapter
from rookery.train.processes import Processes, join_processes
from rookery.types import Adapter, SampleRequest
from rookery.ui.display import Display

__all__ = ["GRPO", "run_grpo"]


def run_grpo(
    config: ConfigSource | GrpoConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[GrpoReport]:
    """Train a policy from a reward, and report honestly how much better it has become.

    `run_grpo("mine.yaml", seed=3)`; `values` are keys of the config. The folder of
    the outcome holds `trained` (a PEFT folder, or a model folder with `full`), `checkpoints`,
    `report.html`, `report.json` and everything to resume.
    """
    return GRPO.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: GrpoConfig, open_run: RunOpener, display: Display) -> Outcome[GrpoReport]:
    """What needs no weights is refused first, as reading them takes minutes."""
    config = _with_own_start(config, open_run.folder)
    if config.staleness is None and config.atropos is None and has_one_gpu(config.engine):
        config = config.model_copy(update={"staleness": 1})
    if not is_first_process():
        return compute_for_first_process(config)
    if config.game is not None and open_run.rescored:
        # A game rewards while it is played, and the weights of former checkpoints are gone.
        open_run = replace(open_run, rescored=())
    open_run = tracked(open_run, config.track)
    quiet_libraries()
    if config.atropos is not None:
        from rookery.compose.grpo.atropos import gateway_key  # needs the extra `serve`

        gateway_key(config.atropos)
    if config.sweep is not None:
        _check_sweep(config, open_run)
    files = read_files(config)
    if config.engine.type == "service":
        check_service(config, files)
        opened = _open_on_service(config, files, open_run, display)
    else:
        opened = _open_loop(config, files, check_plan(config, files), open_run, display)
    planned = RunPlan(inputs=find_inputs(config, files), opened=opened)
    return run_async(carry_out(planned, open_run, display))


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


def _with_own_start(config: GrpoConfig, folder: Path | None) -> GrpoConfig:
    """A run that goes on has the adapter it began with in its own folder: what init_from names may
    be gone, or another one by now."""
    if folder is None or config.init_from is None or config.full is not None:
        return config
    starts = [folder / START, *sorted((folder / ADAPTERS).glob(f"*/{START}"))]
    kept_start = next((start for start in starts if start.is_dir()), config.init_from)
    return config.model_copy(update={"init_from": kept_start})


GRPO = RunKind(
    "grpo", config=GrpoConfig, finish=_finish, inputs=read_step_inputs, scored=("select",)
)


@asynccontextmanager
async def _open_loop(
    config: GrpoConfig,
    files: GrpoFiles,
    plan: MemoryPlan | None,
    open_run: RunOpener,
    display: Display,
) -> AsyncIterator[Callable[[Run], Awaitable[GrpoReport]]]:
    display.note(note for taskset in files.tasksets for note in taskset.notes)
    if config.full is not None and config.lora != LoraConfig():
        display.note(["lora has no effect: full trains all weights of the model."])
    display.say(f"loading {files.folder.name}")
    with display.launching() as show:
        async with _open(config, files, plan, show) as opened:
            display.say(f"bridge {opened.bridge.name}: {opened.bridge.why}")
            processes = await asyncio.to_thread(join_processes, opened.model.device.type)
            if config.sweep is not None:
                trainings = await _checked_sweep(config, files, opened, processes)
                if open_run.is_new:
                    await _try_drawing(config, files, opened.engine, is_merged=_is_merge(opened))
                yield partial(_train_all, config, files, opened, trainings, display)
                return
            make_policy = await _checked_policy(config, files, opened, processes)
            if open_run.is_new and config.atropos is None:
                await _try_drawing(config, files, opened.engine, is_merged=_is_merge(opened))
            outcomes: list[Outcome[GrpoReport]] = []

            async def train(run: Run) -> GrpoReport:
                weights = make_policy(run)
                opening: AbstractAsyncContextManager[BatchSource | None] = nullcontext()
                if config.atropos is not None:
                    from rookery.compose.grpo.atropos import open_source  # as above

                    opening = open_source(config, files, opened, run=run, say=display.say)
                async with opening as source:
                    report = await _train(
                        config, files, run, display, engine=opened.engine, weights=weights,
                        source=source,
                    )  # fmt: skip
                outcomes.append(Outcome(report, run.path))
                return report

            yield train
            await asyncio.to_thread(end_processes, processes, outcomes[0])


@asynccontextmanager
async def _open_on_service(
    config: GrpoConfig, files: GrpoFiles, open_run: RunOpener, display: Display
) -> AsyncIterator[Callable[[Run], Awaitable[GrpoReport]]]:
    """A service elsewhere has the model, draws the answers and trains the adapter."""
    assert config.engine.type == "service"
    display.note(note for taskset in files.tasksets for note in taskset.notes)
    async with open_client(config.engine, has_last_states=True) as client:
        engine = client.engine
        start = service_start(config, files, engine)
        _check(config, files, engine, start=start)
        await engine.unload(await engine.load(start))
        if open_run.is_new:
            await _try_drawing(config, files, engine, is_merged=False)

        async def train(run: Run) -> GrpoReport:
            known = await asyncio.to_thread(own_states, run)  # a kill leaves one that is made again
            weights = await service_policy(config, files, client, read_start(run) or start)
            report = await _train(config, files, run, display, engine=engine, weights=weights)
            await client.trainer.forget({*known, *await asyncio.to_thread(own_states, run)})
            return report

        yield train


async def _train(
    config: GrpoConfig,
    files: GrpoFiles,
    run: Run,
    display: Display,
    *,
    engine: Engine,
    weights: PolicyWeights,
    source: BatchSource | None = None,
) -> GrpoReport:
    """The loop, to its report. `source` is where the batches of other tasks come from."""
    inputs = GrpoInputs(
        config=config,
        weights=weights,
        tasksets=files.tasksets,
        drawer=source or _drawer(config, files, engine),
        evaluator=_evaluator(config, files, engine, RolloutLog(run)),
        decode=files.template.decode,
    )
    with display.bar("train", total=config.steps, noun="step", run=run) as bar:
        shown = TrainBar(bar, display, Measurements(config, files.tasksets))
        return await train_policy(inputs, engine=engine, run=run, observer=shown)


@asynccontextmanager
async def _open(
    config: GrpoConfig, files: GrpoFiles, plan: MemoryPlan | None, on_launch: OnLaunch
) -> AsyncIterator[Opened]:
    """The engine, and the model that the trainer computes with: the same one when shared."""
    engine = config.engine
    if engine.type == "fleet":
        place = engine.adapter_folder or memory_folder()
        with claim_folder(place) as owner:
            async with _open_bridged(config, files, plan, on_launch, owner.folder) as bridged:
                yield bridged
        return
    assert engine.type == "embedded", "a service is opened by _open_on_service"
    if config.share:
        model = await _load(files, is_exact=True)
        async with run_engine(
            model,
            config=engine,
            detokenize=lambda tokens: files.template.decode(tuple(tokens)),
            name=files.folder.name,
        ) as shared:
            yield InProcess(shared, model, is_shared=True)
    else:
        async with (
            _loading(files, is_full=config.full is not None) as load,
            open_embedded(engine) as embedded,
        ):
            yield InProcess(embedded, await load())


@asynccontextmanager
async def _open_bridged(
    config: GrpoConfig,
    files: GrpoFiles,
    plan: MemoryPlan | None,
    on_launch: OnLaunch,
    folder: Path,
) -> AsyncIterator[Bridged]:
    share = await asyncio.to_thread(server_share, config, files, plan)
    is_beside, model_folder = has_one_gpu(config.engine), files.folder
    merged = is_merged(config, files, is_beside=is_beside)
    used = bridged_engine(config, gpu_share=share, is_beside=is_beside, is_merged=merged)
    async with (
        _loading(files, is_full=config.full is not None) as load,
        open_servers(used, on_launch=on_launch) as fleet,
    ):
        bridge = await choose_bridge(config, fleet, folder=model_folder.path, is_merged=merged)
        try:
            if config.full is not None and bridge.shared is not None:
                model = await attach(model_folder, fleet, bridge.shared, start=files.start)
            else:
                model = await load()
            yield Bridged(engine=fleet, model=model, bridge=bridge, folder=folder)
        finally:
            bridge.release()


@asynccontextmanager
async def _loading(
    files: GrpoFiles, *, is_full: bool
) -> AsyncIterator[Callable[[], Awaitable[SlottedModel]]]:
    """Gives the trainer's own copy of the model. One to train an adapter on is read while the
    engine starts; for all weights servers may have one to share."""
    async with task_group() as tasks:
        loading = None if is_full else tasks.create_task(_load(files))

        async def load() -> SlottedModel:
            return await (loading or _load(files))

        yield load


async def _load(files: GrpoFiles, *, is_exact: bool = False) -> SlottedModel:
    device, dtype = files.place
    return await asyncio.to_thread(
        load_model,
        files.start,
        device=device,
        dtype=dtype,
        names=files.folder.names,
        is_exact=is_exact,
    )


async def _checked_policy(
    config: GrpoConfig, files: GrpoFiles, opened: Opened, processes: Processes
) -> MakePolicy:
    """What is to be trained; whatever would make the run fail is refused."""
    start = None if config.full is not None else _start(config, files, opened.model)
    _check(config, files, opened.engine, start=None if _is_merge(opened) else start)
    reference = await asyncio.to_thread(make_reference, files, opened.model, config.trainer)
    parts = PolicyParts(opened=opened, processes=processes, reference=reference)
    if start is None:
        return full_policy(config, files, parts)
    trainer = LoraTrainer(opened.model, config=config.trainer, processes=processes)
    opened.publish_adapters(trainer)
    only = trainer.publisher if opened.bridge.name == "merge" else None
    return adapter_policy(config, start, parts, trainer=trainer, publisher=only)


# Many adapters in one run: each has a run of its own in `adapters`.


@dataclass(frozen=True, slots=True)
class _Trainings:
    """What a sweep trains, when all that can be refused has been."""

    joint: JointTrainer
    adapters: list[tuple[Swept, MakePolicy]]


async def _checked_sweep(
    config: GrpoConfig, files: GrpoFiles, opened: Opened, processes: Processes
) -> _Trainings:
    adapters = swept(config)
    reference = await asyncio.to_thread(make_reference, files, opened.model, config.trainer)
    parts = PolicyParts(opened=opened, processes=processes, reference=reference)
    trainer = LoraTrainer(opened.model, config=config.trainer, processes=processes)
    opened.publish_adapters(trainer)
    joint = JointTrainer(trainer, num_adapters=len(adapters))
    makers: list[tuple[Swept, MakePolicy]] = []
    for number, adapter in enumerate(adapters):
        start = _start(adapter.config, files, opened.model)
        _check(adapter.config, files, opened.engine, start=None if _is_merge(opened) else start)
        policy = PolicyOfMany(joint, number)
        makers.append((adapter, adapter_policy(adapter.config, start, parts, trainer=policy)))
    return _Trainings(joint, makers)


async def _train_all(
    config: GrpoConfig,
    files: GrpoFiles,
    opened: Opened,
    trainings: _Trainings,
    display: Display,
    run: Run,
) -> GrpoReport:
    engine = opened.engine
    with ExitStack() as stack:
        adapters = []
        for adapter, make_policy in trainings.adapters:
            own_run = stack.enter_context(await asyncio.to_thread(_open_own_run, run, adapter))
            inputs = GrpoInputs(
                config=adapter.config,
                weights=make_policy(own_run),
                tasksets=files.tasksets,
                drawer=_drawer(adapter.config, files, engine),
                evaluator=_evaluator(adapter.config, files, engine, RolloutLog(own_run)),
                decode=files.template.decode,
            )
            adapters.append(AdapterInputs(swept=adapter, inputs=inputs, run=own_run))
        evaluator = _evaluator(config, files, engine, RolloutLog(run))
        sweep = SweepInputs(adapters=adapters, joint=trainings.joint, evaluator=evaluator)
        num_steps = max(adapter.swept.config.steps for adapter in adapters)
        with display.bar("train", total=num_steps, noun="step", run=run) as bar:
            longest = config.model_copy(update={"steps": num_steps})
            measured = Measurements(longest, files.tasksets, num_adapters=len(adapters))
            shown = SweepBar(bar, display, measured)
            report = await train_sweep(sweep, engine=engine, run=run, observer=shown)
        for each in adapters:
            if not (each.run.path / "report.json").is_file():
                continue  # it failed
            await write_page(each.run)
    return report


def _open_own_run(run: Run, adapter: Swept) -> Run:
    """The run of one adapter, made or gone on with."""
    root = run.path / ADAPTERS
    if is_run(root / adapter.name):
        return Run.open(root / adapter.name)
    document = adapter.config.model_dump(mode="json")
    return Run.create(root, kind="grpo", config=document, name=adapter.name)


def _start(config: GrpoConfig, files: GrpoFiles, model: SlottedModel) -> Adapter:
    """The policy to begin with, refused when it does not fit the model."""
    base = base_name(files.folder.name)
    start = files.init or initial_adapter(
        model, config.lora, name=POLICY, base=base, seed=config.seed
    )
    start = replace(start, name=POLICY, base=start.base or base)
    model.bank.check(start, max_rank=max(start.rank, 1))
    return start


def _is_merge(opened: Opened) -> bool:
    """Whether adapters are added to the weights of a server, which then takes any rank."""
    return opened.bridge.name == "merge"


def _check(config: GrpoConfig, files: GrpoFiles, engine: Engine, *, start: Adapter | None) -> None:
    tasksets, template = files.tasksets, files.template
    evaluator = (
        None
        if config.game is not None
        else TasksetEvaluator(engine, template=template, tasksets=tasksets)
    )
    if config.atropos is None:
        _drawer(config, files, engine)  # refuses choices, and games that cannot be played
    check_inputs(config, start=start, tasksets=tasksets, engine=engine, evaluator=evaluator)


async def _try_drawing(
    config: GrpoConfig, files: GrpoFiles, engine: Engine, *, is_merged: bool
) -> None:
    """Draw some of the first groups with the policy that training begins with: rewards may be no
    numbers, or never differ."""
    params = replace(config.drawing.params(group_size=1), max_tokens=1)
    if params.is_cut:  # servers may not tell what they draw from with top_p, top_k and min_p
        prompt = files.template.encode(files.tasksets[0].tasks[0])
        await engine.sample([SampleRequest(model=engine.base, prompt=prompt, params=params)])
    tasks = [task for taskset in files.tasksets for task in taskset.split("search")]
    drawer = BatchDrawer(_drawer(config, files, engine), tasks=tasks, config=config)
    if files.init is not None and not is_merged:
        start = await engine.load(replace(files.init, name=POLICY))
        try:
            await drawer.check(start)
        finally:
            await engine.unload(start)
    elif config.share or files.start == files.folder.path:
        await drawer.check(engine.base)


def _drawer(config: GrpoConfig, files: GrpoFiles, engine: Engine) -> GroupDrawer:
    params = config.drawing.params(group_size=config.group_size)
    if config.game is not None:
        game = Game(config.game, template=files.template)
        return GameSampler(game, engine=engine, params=params)
    return GroupSampler(engine, template=files.template, tasksets=files.tasksets, params=params)


def _evaluator(config: GrpoConfig, files: GrpoFiles, engine: Engine, log: RolloutLog) -> Evaluator:
    if config.game is not None:
        game = Game(config.game, template=files.template)
        return GameEvaluator(game, sampler=engine, tasksets=files.tasksets, log=log)
    return TasksetEvaluator(engine, template=files.template, tasksets=files.tasksets, log=log)
