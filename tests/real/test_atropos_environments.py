"""Unmodified environments of the Atropos repository train through the gateway.

    ROOKERY_ATROPOS_PYTHON=/path/to/python-with-atroposlib \\
    ROOKERY_ATROPOS_ENVIRONMENTS=/path/to/atropos/environments \\
    pytest tests/real/test_atropos_environments.py

They drop groups whose answers are all worth the same, as those of a small model are: it writes none
of the tags that they look for. The model here says one of a few sentences, whatever it is asked, of
which some are worth something.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.real.peers import ATROPOS, needs_atropos, toy_training
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rookery
from rookery.embedded import EngineConfig
from rookery.engines import find_model
from rookery.runs import Run

ENVIRONMENTS = os.environ.get("ROOKERY_ATROPOS_ENVIRONMENTS", "")
pytestmark = [
    needs_atropos,
    pytest.mark.skipif(not ENVIRONMENTS, reason="ROOKERY_ATROPOS_ENVIRONMENTS names no folder"),
    pytest.mark.timeout(1800),
]
BEGIN = "<|im_start|>assistant\n"
SENTENCE = "After thinking about all of this for a long while my result is"
NUM_STEPS = 300


def write_model(folder: Path, endings: list[str]) -> Path:
    """A model that says the sentence with one of the endings. It looks at the last token alone:
    nothing comes out of its attention."""
    source = find_model(EngineConfig(model="smollm2"), tokenizer="").path
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json" and file.is_file():
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    model.model.layers[0].self_attn.requires_grad_(requires_grad=False)
    texts = [f"{BEGIN}{SENTENCE} {ending}<|im_end|>" for ending in endings]
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(NUM_STEPS):
        tokens = rows[step % len(rows)]
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def train(tmp_path: Path, folder: Path, command: dict[str, Any], **changes: Any) -> None:
    """Two steps; every batch is of groups that the environment sent."""
    started = {**command, "env": {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}}
    config = toy_training(
        folder,
        {"port": 0, "max_token_len": 2048, "batch_s": 900, "environments": [started], **changes},
        engine={"type": "embedded", "model": str(folder), "cache_gib": 0.1},
        steps=2, drawing={"max_tokens": 64}, learning_rate=1e-3, save_every=2,
    )  # fmt: skip
    outcome = rookery.run_grpo(config, runs_dir=tmp_path / "runs", name="run", progress=False)
    steps = outcome.report.steps
    assert [step.metrics["grpo/num_rollouts"] for step in steps] == [8, 8]
    assert all(step.metrics["grpo/num_groups"] for step in steps), "rewards differ"
    gaps = [step.metrics.get("grpo/logprob_gap") for step in steps]
    assert all(gap is not None and gap < 1e-3 for gap in gaps), "tokens are those that were drawn"
    with Run.view(outcome.path) as run:
        groups = [seq for event in run.events("batch") for seq in event.payload["groups"]]
    assert len(groups) == len(set(groups))


def command_of(script: str, folder: Path, *words: str) -> list[str]:
    return [
        ATROPOS, str(Path(ENVIRONMENTS, script)), "serve", "--slurm", "false",
        "--env.tokenizer_name", str(folder), "--env.rollout_server_url", "{gateway}",
        "--env.use_wandb", "false", "--env.group_size", "4", "--env.max_token_length", "1024",
        "--env.steps_per_eval", "100000", *words,
    ]  # fmt: skip


ENGINE = (
    "--openai.base_url", "{engine}", "--openai.model_name", "{model}", "--openai.server_type",
    "vllm", "--openai.api_key", "x",
)  # fmt: skip


def test_regex_generation(tmp_path: Path) -> None:
    endings = ["<answer>.*</answer>", "<answer>[a-z]+</answer>", "unknown to me"]
    folder = write_model(tmp_path / "model", endings)
    script = "community/regex_generation/regex_env.py"
    command = command_of(script, folder, *ENGINE)
    train(tmp_path, folder, {"command": command, "folder": str(tmp_path)})


def test_reasoning_gym(tmp_path: Path) -> None:
    endings = ["<answer>7</answer>", "<answer>True</answer>", "unknown to me"]
    folder = write_model(tmp_path / "model", endings)
    script = "reasoning_gym_environment/reasoning_gym_environment.py"
    command = command_of(script, folder, *ENGINE)
    train(tmp_path, folder, {"command": command, "folder": str(tmp_path)})


def test_gsm8k_on_local_rows(tmp_path: Path) -> None:
    """It ignores where the engine is told to be, and asks the ports 9004 to 9007."""
    folder = write_model(tmp_path / "model", [r"\boxed{7}", r"\boxed{3}"])
    data = tmp_path / "gsm8k"
    data.mkdir()
    rows = [{"question": f"What is {n} + {7 - n}?", "answer": "so #### 7"} for n in range(7)]
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{split}.jsonl").write_text(text)
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )
    command = command_of("gsm8k_server.py", folder, *ENGINE)
    ports = [9004, 9005, 9006, 9007]
    train(tmp_path, folder, {"command": command, "folder": str(tmp_path)}, engine_ports=ports)
