"""Two processes train what one does, also when they are killed and go on."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import forked
from marks import long
from parallel_training import make, train, work
from safetensors.torch import load_file
from tiny import write_tiny_model
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rookery.errors import TrainError
from rookery.slots import load_model
from rookery.train import FullConfig
from rookery.train.full import ShardedTrainer
from rookery.train.processes import ALONE, Processes
from rookery.types import Datum


def run(folder: Path, kind: str, steps: range, *, kill: int = -1) -> list[int]:
    """The exit codes of two processes, which find each other as those of torchrun do."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                forked(work, kind, folder, steps, kill, variables={**variables, "RANK": rank})
            )
            for rank in "01"
        ]
        return [process.wait() for process in processes]


def largest_gap(left: Path, right: Path) -> float:
    ours, theirs = load_file(left), load_file(right)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


KILLED = (("lora", True), ("full", True), ("checkpointed", False))


@pytest.mark.parametrize(
    ("kind", "are_killed"), [("lora", False), *(pytest.param(*case, marks=long) for case in KILLED)]
)
async def test_two_processes_train_what_one_does(
    tmp_path: Path, kind: str, are_killed: bool
) -> None:
    """Also when both end with one that is killed, and go on from what was saved."""
    write_tiny_model(tmp_path / "model", tie_word_embeddings=kind != "checkpointed")
    await train(kind, tmp_path, range(4), make(kind, tmp_path, ALONE), kill=-1)
    assert run(tmp_path, kind, range(4)) == [0, 0]
    alone, both = (tmp_path / f"{kind}_{size}_4.safetensors" for size in (1, 2))
    assert largest_gap(alone, tmp_path / f"{kind}_1_2.safetensors") > 1e-3
    assert largest_gap(alone, both) < 1e-5
    folders = [tmp_path / f"{kind}_{size}_exported_0" for size in (1, 2)]
    [ours, theirs] = [next(folder.glob("*.safetensors")) for folder in folders]
    assert largest_gap(ours, theirs) < 1e-5
    if kind != "lora":
        published = [tmp_path / f"{kind}_{size}_published.safetensors" for size in (1, 2)]
        assert largest_gap(*published) < 1e-5, "servers get whole weights"
        assert largest_gap(published[1], theirs) == 0
    if not are_killed:
        return
    whole = both.read_bytes()
    both.unlink()
    assert run(tmp_path, kind, range(2, 4), kill=3) == [-signal.SIGKILL, 1]
    assert not both.exists()
    assert run(tmp_path, kind, range(2, 4)) == [0, 0]
    assert both.read_bytes() == whole


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
