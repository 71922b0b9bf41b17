"""`run_sft`: an adapter from a taskset with known answers."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

from rookery.compose.evaluation import Split
from rookery.compose.inputs import digest_models
from rookery.compose.running import merge, quiet_libraries, run_async
from rookery.config import parse_config
from rookery.embedded import resolve_model
from rookery.errors import AdapterError, ConfigError, boundary
from rookery.model_names import loadable_model
from rookery.slots import find_device, load_model
from rookery.tasks.taskset import load_taskset_file
from rookery.tasks.template import load_template
from rookery.train.sft import SftConfig, SftStep, sft, sft_data
from rookery.types import Adapter
from rookery.ui.display import Display
from rookery.weights import read_adapter, write_adapter

__all__ = ["base_name", "run_sft"]


def run_sft(
    model: str | Path,
    taskset: str | Path,
    out: str | Path,
    *,
    config: SftConfig | None = None,
    split: Split = "search",
    device: str = "auto",
    progress: bool = True,
    **values: Any,
) -> Adapter:
    """Train a LoRA adapter on the answers of a taskset and write it to `out`, a PEFT folder.

    `run_sft("smollm2", "generated:label-kind", "out/kind", steps=40)`; `values` are keys of the
    training config, laid over `config` where both are given. A training that was interrupted goes
    on when it is called again.
    """
    if split not in get_args(Split):
        raise ConfigError(f"split is {split!r}; it should be one of {', '.join(get_args(Split))}.")
    document = merge({} if config is None else config.model_dump(mode="json"), values)
    settings = parse_config(SftConfig, document, origin="the training config")
    place = Path(out)
    _require_place(place)
    device = find_device(device)
    quiet_libraries()
    display = Display(is_quiet=not progress)
    return run_async(_train(str(model), str(taskset), place, settings, split, device, display))


def _require_place(out: Path) -> None:
    """Refuse a path that `write_adapter` would refuse after the training."""
    if out.name in ("", ".."):
        raise AdapterError(f"{out} has no name for an adapter; give a path such as out/poet.")
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


async def _train(
    name: str,
    taskset_name: str,
    out: Path,
    config: SftConfig,
    split: Split,
    device: str,
    display: Display,
) -> Adapter:
    taskset = load_taskset_file(taskset_name)
    display.note(taskset.notes)
    display.say(f"loading {name}")
    folder = resolve_model(name)
    init = read_adapter(config.init_from) if config.init_from is not None else None
    model = load_model(folder.path, device=device, names=folder.names)
    eos = model.shape.eos_tokens
    data = sft_data(
        taskset.split(split), load_template(folder.path), end_token=eos[0] if eos else None
    )
    checkpoints = out.with_name(f".{out.name}.checkpoints")
    with display.bar(taskset.name, total=None) as bar:

        def stepped(step: SftStep) -> None:
            bar.advance(0, tokens=step.num_tokens)
            text = f"{taskset.name}  loss {step.loss:.3f}"
            bar.update(total=step.num_steps, done=step.step, name=text)

        adapter = await sft(
            model, data, config, name=out.name, base=base_name(name), init=init,
            checkpoints=checkpoints / digest_models({name: folder.path})[name], on_step=stepped,
        )  # fmt: skip
    write_adapter(adapter, out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return adapter


def base_name(model: str) -> str:
    """The base model as an adapter names it: a folder as an absolute path, by which other programs
    find it from anywhere."""
    path = Path(model).expanduser()
    is_folder = loadable_model(model) == model and path.is_dir()
    return str(path.absolute()) if is_folder else model
