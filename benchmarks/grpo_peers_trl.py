"""TRL's GRPOTrainer with vLLM in its process, for `grpo_peers.py`: a setup in, steps.jsonl out."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from grpo_peers import right_number
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Writes the end of each step and its drawn tokens as lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        row = {"begin": self._begin, "end": time.time(), "tokens": self.num_tokens}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.num_tokens = 0


def main() -> None:
    setup = json.loads(sys.argv[1])
    out = Path(setup["out"])
    out.mkdir(parents=True, exist_ok=True)
    times = StepTimes(out / "steps.jsonl")
    lines = Path(setup["train"]).read_text().splitlines()[: setup["limit"]]
    rows = [json.loads(line) for line in lines]
    chats = [
        [{"role": "user", "content": setup["prompt"].replace("{{ question }}", row["question"])}]
        for row in rows
    ]
    size = setup["groups"] * setup["group_size"]

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        times.num_tokens += sum(map(len, completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        return [right_number(text, wanted) for text, wanted in zip(texts, answer, strict=True)]

    trainer = GRPOTrainer(
        model=setup["model"],
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": chats, "answer": [r["answer"] for r in rows]}),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules=list(setup["targets"])
        ),
        callbacks=[times],
        args=GRPOConfig(
            output_dir=str(out),
            bf16=True,
            model_init_kwargs={"dtype": "bfloat16"},
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="grpo",
            learning_rate=setup["learning_rate"],
            lr_scheduler_type="constant",
            num_generations=setup["group_size"],
            per_device_train_batch_size=setup["micro_batch"],
            gradient_accumulation_steps=size // setup["micro_batch"],
            max_completion_length=setup["max_tokens"],
            max_steps=setup["steps"],
            temperature=1.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            vllm_max_model_length=setup["max_tokens"] + 1024,
            save_strategy="steps",
            save_steps=setup["save_every"],
            save_only_model=True,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=setup["seed"],
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
