"""TRL's GRPOTrainer as a process that measures on request: a JSON line in, a JSON line out.

    {"model": FOLDER, "prompts": [...], ...}         once, at the start
    {"do": "pass", "tokens": [[...], ...], "num_prompt": 5}      {"seconds": 1.9}
    {"do": "steps", "num": 3}                                    {"steps": [[seconds, tokens], ...]}

Started by `grpo_speed.py` in an environment that has TRL 1.16. A pass is TRL's own loss with
gradients and one step of its optimizer. Steps are those of `trainer.train()`: drawing with
transformers, rewards, loss, optimizer.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Records the end of each step and its drawn tokens."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.num_tokens: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Give different answers different rewards."""
        self.num_tokens.append(sum(map(len, completion_ids)))
        return [float(sum(tokens) % 97) for tokens in completion_ids]


def make_trainer(setup: dict[str, Any], times: StepTimes, folder: str) -> Any:
    chats = [[{"role": "user", "content": prompt}] for prompt in setup["prompts"]]
    size = setup["group_size"]

    def reward(completion_ids: list[list[int]], **other: Any) -> list[float]:
        return times.reward(completion_ids, **other)

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(setup["model"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": chats}),
        peft_config=LoraConfig(
            r=setup["rank"], lora_alpha=2 * setup["rank"], target_modules=setup["targets"]
        ),
        callbacks=[times],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="grpo",
            learning_rate=setup["learning_rate"],
            lr_scheduler_type="constant",
            num_generations=size,
            per_device_train_batch_size=setup["groups"] * size,
            max_completion_length=setup["max_tokens"],
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        ),
    )


def time_pass(trainer: Any, *, tokens: list[list[int]], num_prompt: int) -> float:
    """Seconds of loss, gradients and optimizer step on sequences of equal length."""
    table = torch.tensor(tokens)
    prompt, completion = table[:, :num_prompt], table[:, num_prompt:]
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.linspace(-1.0, 1.0, len(table)),
        "num_items_in_batch": torch.tensor(float(completion.numel())),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    began = time.perf_counter()
    trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return time.perf_counter() - began


def time_steps(trainer: Any, times: StepTimes, *, num: int) -> list[tuple[float, int]]:
    """Seconds and drawn tokens of each step but the first, which warms up."""
    times.ends, times.num_tokens = [], []
    trainer.args.max_steps = num + 1
    trainer.train()
    spans = [later - earlier for earlier, later in zip(times.ends, times.ends[1:], strict=False)]
    return list(zip(spans, times.num_tokens[1:], strict=True))


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # keep prints of libraries out of stdout
    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setup, times, folder)
        trainer.create_optimizer()
        for asked in map(json.loads, sys.stdin):
            if asked.pop("do") == "pass":
                answer: dict[str, Any] = {"seconds": time_pass(trainer, **asked)}
            else:
                answer = {"steps": time_steps(trainer, times, **asked)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
