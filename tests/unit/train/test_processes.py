"""Two processes of torchrun train what one does, also when they are killed and go on."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from rookery.errors import TrainError
from rookery.slots import load_model
from rookery.train import FullConfig
from rookery.train.processes import ALONE, Processes
from rookery.train.sharded import ShardedTrainer
from rookery.types import Datum

SCRIPT = Path(__file__).with_name("parallel_training.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, kind: str, *numbers: int, processes: int = 1) -> int:
    command = [sys.executable, *(TORCHRUN if processes > 1 else ())]
    words = [str(SCRIPT), kind, str(folder), *map(str, numbers)]
    return subprocess.run([*command, *words], timeout=240, check=False).returncode


def largest_gap(left: Path, right: Path) -> float:
    ours, theirs = load_file(left), load_file(right)
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("kind", ["lora", "full", "checkpointed"])
def test_two_processes_train_what_one_does(tmp_path: Path, kind: str) -> None:
    write_tiny_model(tmp_path / "model", tie_word_embeddings=kind != "checkpointed")
    assert run(tmp_path, kind, 0, 20) == 0
    assert run(tmp_path, kind, 0, 20, processes=2) == 0
    alone, both = (tmp_path / f"{kind}_{size}_20.safetensors" for size in (1, 2))
    assert largest_gap(alone, tmp_path / f"{kind}_1_5.safetensors") > 0
    assert largest_gap(alone, both) < 1e-5
    if kind == "lora":
        return
    folders = [tmp_path / f"{kind}_{size}_exported_0" for size in (1, 2)]
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    assert max((models[0][n] - models[1][n]).abs().max().item() for n in models[0]) < 1e-5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_killed_processes_go_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    write_tiny_model(tmp_path / "model")
    assert run(tmp_path, kind, 0, 10, processes=2) == 0
    whole = (tmp_path / f"{kind}_2_10.safetensors").read_bytes()
    (tmp_path / f"{kind}_2_10.safetensors").unlink()
    assert run(tmp_path, kind, 0, 10, 7, processes=2) != 0
    assert not (tmp_path / f"{kind}_2_10.safetensors").exists()
    assert run(tmp_path, kind, 5, 10, processes=2) == 0
    assert (tmp_path / f"{kind}_2_10.safetensors").read_bytes() == whole


def test_data_are_dealt_out_by_length() -> None:
    data = [
        Datum(tokens=(1,) * length, positions=(), targets=(), weights=())
        for length in (5, 1, 4, 2, 3)
    ]
    assert ALONE.share(data) == [0, 1, 2, 3, 4]
    shares = [Processes(rank, 2).share(data) for rank in range(2)]
    assert shares == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"layers": 2}, "write layers: all"), ({"optimizer": "adamw_8bit"}, "write adamw")],
)
def test_what_cannot_be_spread_is_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(TrainError, match=words):
        ShardedTrainer(
            load_model(folder),
            name="policy",
            config=FullConfig.model_validate(options),
            like=folder,
            processes=Processes(0, 2),
        )
