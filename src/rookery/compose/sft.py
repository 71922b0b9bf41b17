"""`run_sft`: trains an adapter on a taskset with known answers."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rookery.compose.elsewhere import Forget, end_token, open_training
from rookery.compose.evaluation import EvaluationConfig, Split
from rookery.compose.inputs import IsMade, RunInputs, digest_tasks
from rookery.compose.kinds import resume
from rookery.compose.running import Outcome, RunKind, RunOpener, RunPlan, finisher, merge, new_run
from rookery.config import parse_config
from rookery.embedded import resolve_model
from rookery.engines import base_name
from rookery.errors import AdapterError, RunError, boundary
from rookery.paths import expanded
from rookery.remote import ServiceClientConfig
from rookery.reports import SftReport, SpentRecord
from rookery.runs import Run, find_runs
from rookery.runs.budget import Budget
from rookery.runs.run_folder import in_folder, resolve_references
from rookery.runtime.concurrency import run_in_thread
from rookery.slots import find_device, load_model
from rookery.tasks.taskset import Taskset, load_taskset_file
from rookery.tasks.template import load_template
from rookery.train.sft import (
    SftConfig,
    SftStep,
    SftTraining,
    count_steps,
    find_cut,
    prepare_sft,
    sft_data,
)
from rookery.types import Adapter, Datum
from rookery.ui.display import Display
from rookery.weights import read_adapter, write_adapter

__all__ = ["SFT", "SftRunConfig", "run_sft", "start_sft"]

TRAINED, CHECKPOINTS = "trained", "training"


class SftRunConfig(SftConfig):
    """Config of a supervised fine-tuning run."""

    model: str
    """A Hugging Face id, a local folder, or `smollm2`."""
    taskset: str
    """A file of rows, a taskset's file, hf://datasets/ID, or generated:NAME."""
    split: Split = "search"
    """The part of the taskset to train on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to compute on; `auto` takes a GPU if there is one."""
    engine: ServiceClientConfig | None = None
    """A service to train on (`{type: service, url: ...}`); `model` is read for its tokenizer."""
    out: Path | None = None
    """A second PEFT folder to write beside RUN/trained. The adapter takes its name."""

    def from_folder(self, folder: Path) -> "SftRunConfig":
        """Make paths absolute; `model` and `taskset` only if they exist as paths."""
        place = folder.absolute()
        named = EvaluationConfig(model=self.model, taskset=self.taskset).from_folder(place)
        paths = {
            key: None if path is None else expanded(path, place)
            for key, path in (("init_from", self.init_from), ("out", self.out))
        }
        return self.model_copy(update={**paths, "model": named.model, "taskset": named.taskset})


def run_sft(
    model: str | Path,
    taskset: str | Path,
    out: str | Path | None = None,
    *,
    config: SftConfig | None = None,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Adapter:
    """Train a LoRA adapter on the answers of a taskset, and write it to RUN/trained and `out`.

    `run_sft("smollm2", "generated:label-kind", "out/kind", steps=40)`; `values` are `split`,
    `device` and keys of the training config, which override `config`. If `name` is empty and a
    training with the same config was interrupted, it is resumed.
    """
    outcome = start_sft(
        model, taskset, out, config=config, name=name, runs_dir=runs_dir, progress=progress,
        **values,
    )  # fmt: skip
    name = TRAINED if out is None else Path(out).name
    return replace(read_adapter(outcome.path / TRAINED), name=name)


def start_sft(
    model: str | Path,
    taskset: str | Path,
    out: str | Path | None,
    *,
    config: SftConfig | None,
    name: str,
    runs_dir: str | Path,
    progress: bool = True,
    **values: Any,
) -> Outcome[SftReport]:
    """Do the work of `run_sft`, and return the outcome of its run."""
    if out is not None and Path(out).name in ("", ".."):
        raise AdapterError(f"{out} has no name for an adapter; give a path such as out/poet.")
    document = merge({} if config is None else config.model_dump(mode="json"), values)
    document |= {"model": str(model), "taskset": str(taskset), "out": out and str(out)}
    document = resolve_references(document, find=in_folder(runs_dir))
    settings = parse_config(SftRunConfig, document, origin="the training config")
    settings = settings.from_folder(Path.cwd())
    if begun := not name and _find_interrupted(settings, Path(runs_dir)):
        return resume(begun, progress=progress)
    open_run = new_run(settings, kind=SFT.name, name=name, runs_dir=runs_dir)
    return SFT.finish(settings, open_run, Display(is_quiet=not progress))


def _find_interrupted(config: SftRunConfig, runs_dir: Path) -> Path | None:
    """Return the newest run of this config that is neither finished nor running."""
    for path in reversed(find_runs(runs_dir)):
        with suppress(RunError), Run.view(path) as run:  # skip unreadable runs
            is_open = run.kind == SFT.name and run.status not in ("finished", "running")
            if is_open and run.config == config.model_dump(mode="json"):
                return path
    return None


def _require_place(out: Path) -> None:
    """Refuse a path that `write_adapter` would refuse after the training."""
    nearest = next(folder for folder in out.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise AdapterError(f"{out} cannot be made: {nearest} is a file. Give another path.")
    with boundary(AdapterError, f"{out} cannot be made in {nearest}", foreign=(OSError,)):
        tempfile.TemporaryFile(dir=nearest).close()
    if out.is_dir() and ((out / "adapter_config.json").is_file() or not any(out.iterdir())):
        return
    if out.exists():
        raise AdapterError(
            f"{out} exists and is not an adapter folder; give a new path, or remove it first."
        )


def _plan(config: SftRunConfig, open_run: RunOpener, display: Display) -> RunPlan[SftReport]:
    del open_run
    if config.out is not None:
        _require_place(config.out)
    taskset = load_taskset_file(config.taskset)
    display.note(taskset.notes)
    model = resolve_model(config.model)
    init = None if config.init_from is None else read_adapter(config.init_from)
    start = {} if init is None else {"init_from": init.version}
    digests = {taskset.name: digest_tasks(taskset.split(config.split))} | start
    inputs = RunInputs(digests=digests, models={"the model": model.path})
    return RunPlan(inputs=inputs, opened=_open(config, taskset, init, display))


def _read_inputs(config: SftRunConfig, is_made: IsMade) -> RunInputs:
    digests: dict[str, str] = {}
    if not is_made("taskset"):
        taskset = load_taskset_file(config.taskset)
        digests[taskset.name] = digest_tasks(taskset.split(config.split))
    if config.init_from is not None and not is_made("init_from"):
        digests["init_from"] = read_adapter(config.init_from).version
    models = {} if is_made("model") else {"the model": resolve_model(config.model).path}
    return RunInputs(digests=digests, models=models)


SFT = RunKind("sft", config=SftRunConfig, finish=finisher(_plan), inputs=_read_inputs)


@asynccontextmanager
async def _open(
    config: SftRunConfig, taskset: Taskset, init: Adapter | None, display: Display
) -> AsyncIterator[Callable[[Run], Awaitable[SftReport]]]:
    async with _prepared(config, taskset, init, display) as (training, forget):
        yield _loop(config, taskset, training, forget, display)


@asynccontextmanager
async def _prepared(
    config: SftRunConfig, taskset: Taskset, init: Adapter | None, display: Display
) -> AsyncIterator[tuple[SftTraining, Forget]]:
    """Open the training, here or on a service. Also yields what deletes its states there."""
    folder = resolve_model(config.model)
    template, tasks = load_template(folder.path), taskset.split(config.split)
    name, base = _adapter_name(config), base_name(config.model)
    if config.engine is None:
        display.say(f"loading {config.model}")
        device = find_device(config.device)
        model = await run_in_thread(load_model, folder.path, device=device, names=folder.names)
        eos = model.shape.eos_tokens
        data = sft_data(tasks, template, end_token=eos[0] if eos else None)
        yield (
            await run_in_thread(prepare_sft, model, data, config, name=name, base=base, init=init),
            _keep,
        )
        return
    data = sft_data(tasks, template, end_token=end_token(folder.path))
    async with open_training(
        config.engine, data, config, name=name, base=base, init=init
    ) as opened:
        yield opened


async def _keep(checkpoints: Path) -> None:
    del checkpoints


def _loop(
    config: SftRunConfig,
    taskset: Taskset,
    training: SftTraining,
    forget: Forget,
    display: Display,
) -> Callable[[Run], Awaitable[SftReport]]:
    data = training.data

    async def finish(run: Run, adapter: Adapter) -> SftReport:
        report = await run_in_thread(_write, run, config, taskset, adapter, data=data)
        await forget(run.path / CHECKPOINTS)
        await run_in_thread(shutil.rmtree, run.path / CHECKPOINTS, ignore_errors=True)
        return report

    async def train(run: Run) -> SftReport:
        known = await run_in_thread(_find_trained, run, config)
        if known is not None:
            return await finish(run, known)
        with display.bar(
            taskset.name, total=count_steps(data, config), noun="step", run=run
        ) as bar:

            def stepped(step: SftStep) -> None:
                bar.advance(0, tokens=step.num_tokens)
                bar.update(done=step.step, name=f"{taskset.name}  loss {step.loss:.3f}")
                run.log_metrics(step.step, _metrics(step))

            budget, num_done = Budget(config.budget, run), len(run.metrics())

            async def has_room(step: int) -> bool:
                if step % config.save_every == 0:  # records the time worked if it is killed
                    await run.append("training", {"step": step}, key=str(step))
                return await budget.has_room(step, num_done=num_done)

            adapter = await training.run(
                checkpoints=run.path / CHECKPOINTS, on_step=stepped, has_room=has_room
            )
        return await finish(run, adapter)

    return train


def _adapter_name(config: SftRunConfig) -> str:
    return TRAINED if config.out is None else config.out.name


def _metrics(step: SftStep) -> dict[str, float]:
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/num_tokens": float(step.num_tokens),
        "time/train_s": step.seconds,
    }


def _find_trained(run: Run, config: SftRunConfig) -> Adapter | None:
    """Return the adapter if the run had written it: the trainer's state may be deleted."""
    versions = [event.payload["version"] for event in run.events("trained")]
    if not versions or not (run.path / TRAINED).is_dir():
        return None
    adapter = replace(read_adapter(run.path / TRAINED), name=_adapter_name(config))
    return adapter if adapter.version == versions[-1] else None


def _write(
    run: Run, config: SftRunConfig, taskset: Taskset, adapter: Adapter, *, data: Sequence[Datum]
) -> SftReport:
    """Write the adapter and the report."""
    run.write_folder(TRAINED, lambda folder: write_adapter(adapter, folder))
    if config.out is not None:
        write_adapter(adapter, config.out)
    run.append_blocking("trained", {"version": adapter.version}, key="trained")
    rows = run.metrics()
    num_tokens = round(sum(row.values["train/num_tokens"] for row in rows))
    report = SftReport(
        run=run.name,
        model=config.model,
        taskset=taskset.name,
        split=config.split,
        seed=config.seed,
        num_rows=len(data),
        num_steps=len(rows),
        num_tokens=num_tokens,
        spent=SpentRecord(trained_tokens=num_tokens),
        stop_reason=Budget(config.budget, run).stop_reason or find_cut(data, config),
        first_loss=rows[0].values["train/loss"] if rows else None,
        last_loss=rows[-1].values["train/loss"] if rows else None,
        rank=adapter.rank,
        version=adapter.version,
        warnings=taskset.notes,
        seconds=run.worked_s,
    )
    run.write_json("report.json", report.model_dump(mode="json", exclude_none=True))
    return report
