"""vLLM in one process, for `grpo_peers.py`: tokens per second of the groups of one step."""

import json
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    setup = json.loads(sys.argv[1])
    template = AutoTokenizer.from_pretrained(setup["model"])
    rows = [json.loads(line) for line in Path(setup["train"]).read_text().splitlines()]
    prompts = [
        template.apply_chat_template(
            [{"role": "user", "content": setup["prompt"].replace("{{ question }}", r["question"])}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for r in rows[: 3 * setup["groups"]]
    ]
    engine = LLM(
        setup["model"],
        max_model_len=setup["max_tokens"] + 1024,
        gpu_memory_utilization=0.5,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    params = SamplingParams(
        n=setup["group_size"], temperature=1.0, max_tokens=setup["max_tokens"], logprobs=0, seed=1
    )
    for first in range(0, len(prompts), setup["groups"]):
        asked = [TokensPrompt(prompt_token_ids=p) for p in prompts[first : first + setup["groups"]]]
        began = time.perf_counter()
        outputs = engine.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    Path(setup["out"]).write_text(json.dumps({"tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
