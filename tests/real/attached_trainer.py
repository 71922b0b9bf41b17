"""A trainer that attaches to the weights of a running server. It says what that took, and which
steps it made, in lines of JSON.

    python attached_trainer.py URL MODEL FOLDER NUM_STEPS [killed]

With the last word it kills itself in the middle of its last step, while the server is paused.
"""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from bridge_training import TASKSETS, Training, training
from tiny import write_tiny_model

from rookery.fleet.bridges.alias import AliasBridge
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY
from rookery.slots import FixedText
from rookery.slots.loading import attach_model, read_weights
from rookery.types import ModelRef

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
changing_base = AliasBridge.changing_base


@asynccontextmanager
async def killed_while_paused(bridge: AliasBridge) -> AsyncIterator[Callable[[ModelRef], None]]:
    async with changing_base(bridge):
        os.kill(os.getpid(), signal.SIGKILL)
        yield lambda _: None


def private_bytes() -> int:
    """The memory that this process uses, of no file and not shared."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def use_libraries(model: Path, folder: Path) -> None:
    """What they take once, however many layers of one width there are, counts for no model."""
    sizes = json.loads((model / "config.json").read_text())
    same = {name: sizes[name] for name in SIZES}
    one = write_tiny_model(folder / f"one-{os.getpid()}", **same, num_hidden_layers=1)
    weights = read_weights(one, dtype=torch.float32)
    attached = attach_model(one, lambda shapes: {name: weights[name] for name in shapes})
    FixedText(attached, tokens=tuple(range(1, 40)), ids=(1,)).logprobs()


def say(**values: float) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def main(url: str, model: str, folder: str, num_steps: int, *, is_killed: bool) -> None:
    engine = {"type": "fleet", "urls": [url]}
    config = GrpoConfig.model_validate(
        {"engine": engine, "tokenizer": model, "bridge": "alias", "full": True,
         "tasksets": TASKSETS}
    )  # fmt: skip
    use_libraries(Path(model), Path(folder))
    before, began_s = private_bytes(), time.monotonic()
    async with training(config, Path(folder)) as trained:
        took_s = time.monotonic() - began_s
        await trained.trainer.publish(POLICY)
        proved_s, held = time.monotonic() - began_s, private_bytes() - before
        gap = await trained.gap()
        say(attached_s=took_s, proved_s=proved_s, private_bytes=held, gap=gap)
        for step in range(num_steps):
            if is_killed and step == num_steps - 1:
                setattr(AliasBridge, "changing_base", killed_while_paused)  # noqa: B010
            await make_step(trained, step)


async def make_step(trained: Training, step: int) -> None:
    await trained.step(learning_rate=1e-4)
    say(step=step, gap=await trained.gap())


if __name__ == "__main__":
    own_url, own_model, own_folder, steps, *words = sys.argv[1:]
    asyncio.run(main(own_url, own_model, own_folder, int(steps), is_killed="killed" in words))
