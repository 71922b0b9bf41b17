"""Recipes of the tinker cookbook and the `tinker` command, as they are, offline, over SmolLM2."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest
from marks import long
from service.server_process import ServerProcess
from tests.real.peers import TINKER, printed_by

from rookery.embedded import resolve_model

NAME = "Qwen/Qwen3-8B-Base"
"""The cookbook looks its renderer up by this name; it needs no special tokens."""
RECIPE_S = 3000.0


ARITHMETIC = Path(__file__).with_name("arithmetic_recipe.py")
ARITHMETIC_OPTIONS = (
    "env=arithmetic", "renderer_name=role_colon", "groups_per_batch=16", "group_size=8",
    "max_tokens=8", "learning_rate=1e-3", "max_steps=8", "lora_rank=8", "eval_every=0",
    "save_every=0", "behavior_if_log_dir_exists=delete",
)  # fmt: skip
"""Eight tokens: three digits and the end of an answer must fit. Of the first answers one in sixty
has that end: fewer than 128 of them often hold nothing to prefer."""
NUM_LAST = 4
"""Steps at the end whose rewards are compared with that of the first, which is untrained."""


def _has_cookbook() -> bool:
    code = "import tinker_cookbook, math_verify"
    return (
        bool(TINKER)
        and not subprocess.run([TINKER, "-c", code], capture_output=True, check=False).returncode
    )


pytestmark = [
    long,
    pytest.mark.skipif(not _has_cookbook(), reason="ROOKERY_TINKER_PYTHON has no tinker-cookbook"),
    pytest.mark.timeout(3600),
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    process = ServerProcess(tmp_path, {NAME: "smollm2"})
    async with process.running():
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where recipes run: names of models and datasets are folders in it."""
    folder = tmp_path / "work"
    (folder / "Qwen").mkdir(parents=True)
    (folder / NAME).symlink_to(resolve_model("smollm2").path)
    turns = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi!"}]
    rows = [{"prompt": "Say hi.", "prompt_id": str(i), "messages": turns, "category": "x"}
            for i in range(12)]  # fmt: skip
    write_dataset(folder / "HuggingFaceH4" / "no_robots", rows)
    start = "\n\nHuman: Say hi.\n\nAssistant:"
    pairs = [{"chosen": f"{start} Hi!", "rejected": f"{start} No, {i}."} for i in range(8)]
    write_dataset(folder / "Anthropic" / "hh-rlhf", pairs)
    return folder


def write_dataset(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    files = "".join(f"  - {{split: {s}, path: {s}.jsonl}}\n" for s in ("train", "test"))
    header = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(header)


async def run(server: ServerProcess, folder: Path, *command: str) -> str:
    """Its output; it must end well."""
    env = {
        "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": "",
    }  # fmt: skip
    said = ("sh", "-c", 'exec "$@" 2>&1', "sh", *command)
    return await printed_by(*said, env=env, limit_s=RECIPE_S, folder=folder)


def recipe(name: str, log: Path, *options: str) -> list[str]:
    return [
        TINKER, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"log_path={log}",
        *options,
    ]  # fmt: skip


def metrics(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


RECIPES = {
    "chat_sl.train": [
        "dataset=conversations.jsonl", "renderer_name=role_colon", "batch_size=8", "max_steps=2",
        "lora_rank=8", "eval_every=0",
    ],
    "math_rl.train": [
        "env=arithmetic", "renderer_name=role_colon", "groups_per_batch=4", "max_steps=2",
        "lora_rank=8", "eval_every=0",
    ],
    "multiplayer_rl.guess_number.train": [
        "renderer_name=role_colon", "batch_size=2", "group_size=2", "max_tokens=6", "max_steps=1",
        "eval_every=0",
    ],
    "preference.shorter.train": [
        "renderer_name=role_colon", "batch_size=2", "group_size=2", "max_tokens=6", "max_steps=1",
        "eval_every=0",
    ],
    "preference.dpo.train": [
        "dataset=hhh", "renderer_name=role_colon", "batch_size=4", "max_steps=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
async def test_a_recipe_runs_as_it_is(name: str, server: ServerProcess, folder: Path) -> None:
    shipped = await run(
        server, folder, TINKER, "-c",
        "import tinker_cookbook as c; print(list(c.__path__)[0])",
    )  # fmt: skip
    source = Path(shipped.strip().splitlines()[-1]) / "example_data" / "conversations.jsonl"
    (folder / "conversations.jsonl").symlink_to(source)
    log = folder / "log"
    options = [*RECIPES[name], "behavior_if_log_dir_exists=delete"]
    await run(server, folder, *recipe(name, log, *options))
    assert metrics(log)


@pytest.mark.parametrize("seed", range(3))
async def test_arithmetic_is_learned_and_not_from_shuffled_advantages(
    seed: int, server: ServerProcess, folder: Path
) -> None:
    """Both train beside each other, as two models of one service."""

    async def rewards(arm: str) -> list[float]:
        log = folder / f"log-{arm}"
        command = [TINKER, str(ARITHMETIC), arm, *ARITHMETIC_OPTIONS]
        options = [f"log_path={log}", f"seed={seed}", f"model_name={NAME}"]
        await run(server, folder, *command, *options)
        return [row["env/all/reward/total"] for row in metrics(log)]

    plain, shuffled = await asyncio.gather(rewards("plain"), rewards("shuffled"))
    assert mean(plain[-NUM_LAST:]) - plain[0] >= 0.10, (plain, shuffled)
    assert mean(shuffled[-NUM_LAST:]) - shuffled[0] < 0.10, (plain, shuffled)


async def test_a_loop_goes_on_in_a_second_process(server: ServerProcess, folder: Path) -> None:
    log = folder / "log"
    options = ["batch_size=4", "lora_rank=8", "save_every=1"]
    await run(server, folder, *recipe("sl_loop", log, *options, "max_steps=2"))
    saved = log / "checkpoints.jsonl"
    lines = [line for line in saved.read_text().splitlines() if '"final"' not in line]
    saved.write_text("".join(f"{line}\n" for line in lines))  # as if it had been killed
    text = await run(server, folder, *recipe("sl_loop", log, *options))
    assert "Resuming from batch 1" in text
    first, again = [row for row in metrics(log) if row["step"] == 1]
    [loss] = [name for name in first if name.endswith("nll")]
    assert again[loss] == first[loss], "the same step from the same weights"


async def test_the_command_line_lists_and_downloads(server: ServerProcess, folder: Path) -> None:
    log = folder / "log"
    await run(server, folder, *recipe("sl_loop", log, "batch_size=4", "max_steps=1"))
    tinker = str(Path(TINKER).with_name("tinker"))
    assert NAME in await run(server, folder, tinker, "-f", "json", "model", "list")
    runs = json.loads(await run(server, folder, tinker, "-f", "json", "run", "list"))
    listed = await run(server, folder, tinker, "-f", "json", "checkpoint", "list")
    path = next(part for part in listed.split('"') if "/weights/" in part)
    assert runs
    await run(
        server, folder, tinker, "checkpoint", "download", path, "--output", str(folder / "out")
    )
    found = [file.name for file in (folder / "out").rglob("*") if file.is_file()]
    assert "adapter_config.json" in found
