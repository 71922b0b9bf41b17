"""Compares the memory that `rookery grpo plan` predicts with the peak of the training, on the CPU.

    python benchmarks/grpo_memory.py                        # six cases
    python benchmarks/grpo_memory.py --cases "full" --rows  # one case, with all parts of the plan

A Llama of random weights answers with `--max-tokens` tokens, as long as planned: its end token is
never drawn. Plan and training each run in their own process; the peak is the VmHWM of the training
process, interpreter and libraries included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rookery
from rookery.types import Completion, Task

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, share": {"share": True},
    "full": {"full": True, "learning_rate": 1e-5},
    "full, share": {"full": True, "learning_rate": 1e-5, "share": True},
    "lora, kl": {"loss": {"type": "grpo", "kl": {"weight": 0.1}}},
    "full, kl": {
        "full": True,
        "learning_rate": 1e-5,
        "loss": {"type": "grpo", "kl": {"weight": 0.1}},
    },
}
VOCABULARY = 8192
NUM_TASKS = 40
PROMPT_TOKENS = 16
MIB = 2**20
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one case, in bytes."""

    rows: list[tuple[str, int]]
    peak: int
    mean_tokens: float
    """Mean tokens of the trained answers."""

    @property
    def planned(self) -> int:
        return sum(num_bytes for _, num_bytes in self.rows)


def reward(task: Task, completion: Completion) -> float:
    """Give different answers different rewards."""
    del task
    return float(sum(completion.tokens) % 97)


def make_model(folder: Path, *, hidden: int, layers: int) -> None:
    """Make a model with random weights, a word tokenizer and an end token that is never drawn."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def make_config(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    rows = [
        {
            "id": str(place),
            "prompt": " ".join(f"w{3 + place * PROMPT_TOKENS + k}" for k in range(PROMPT_TOKENS)),
            "reference": "w3",
        }
        for place in range(NUM_TASKS)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "engine": {"type": "embedded", "model": str(folder / "model"), "device": "cpu"},
        "tasksets": [
            {
                "type": "jsonl",
                "path": str(folder / "tasks.jsonl"),
                "scorer": {"type": "python", "function": f"{__file__}:reward"},
                "sampling": {"max_tokens": 8},  # held-out answers need less memory than training
                "splits": {"search": 0.8, "select": 0.1, "report": 0.1},
            }
        ],
        "drawing": {"max_tokens": args.max_tokens},
        "trainer": {"pass_tokens": args.pass_tokens},
        "steps": args.steps,
        "groups_per_step": 4,
        "group_size": 8,
    }


def measure(config: dict[str, Any], folder: Path, case: str) -> Measured:
    """Plan and train, each in a process of its own."""
    values = config | CASES[case]
    rows = _child("plan", values, folder)
    trained = _child("train", values, folder / case.replace(", ", "-"))
    return Measured([(name, size) for name, size in rows], *trained)


def _child(kind: str, config: dict[str, Any], folder: Path) -> Any:
    words = [sys.executable, __file__, "--child", kind, json.dumps(config), str(folder)]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    return json.loads(ended.stdout.splitlines()[-1])


def run_child(kind: str, config: dict[str, Any], folder: Path) -> None:
    if kind == "plan":
        print(json.dumps([(row.name, row.num_bytes) for row in rookery.plan_grpo(config).rows]))
        return
    report = rookery.run_grpo(config, runs_dir=folder, name="run", progress=False).report
    drawn = sum(step.metrics["grpo/num_drawn_tokens"] or 0 for step in report.steps)
    answers = len(report.steps) * config["groups_per_step"] * config["group_size"]
    print(json.dumps([peak_bytes(), drawn / answers]))


def peak_bytes() -> int:
    """Read VmHWM. ru_maxrss would start at the memory of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--pass-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", action="store_true", help="print all parts of each plan")
    args = parser.parse_args()
    print(f"{'':<14}{'plan MiB':>10}{'peak MiB':>10}{'plan/peak':>11}{'tokens':>9}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model", hidden=args.hidden, layers=args.layers)
        config = make_config(folder, args)
        for case in args.cases:
            found = measure(config, folder, case)
            print(
                f"{case:<14}{found.planned / MIB:>10.0f}{found.peak / MIB:>10.0f}"
                f"{found.planned / found.peak:>11.2f}{found.mean_tokens:>9.1f}",
                flush=True,
            )
            for name, size in found.rows if args.rows else []:
                print(f"    {name:<20}{size / MIB:>10.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
