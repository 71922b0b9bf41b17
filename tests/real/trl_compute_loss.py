"""Runs TRL's own `_compute_loss` on recorded batches: a JSON list in, one of results out.

Started by `test_trl.py` in an environment that has TRL. Log-probabilities are given, not
computed by a model: what is compared is the loss.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

NO_ACCELERATOR = SimpleNamespace(
    num_processes=1,
    gather=lambda x: x,
    reduce=lambda x, reduction: x,
    gather_for_metrics=lambda x: x,
)


def compute(case: dict[str, Any]) -> dict[str, Any]:
    table = {name: torch.tensor(x, dtype=torch.float64) for name, x in case["tables"].items()}
    options = case["options"]
    current = table["current"].requires_grad_()
    given = SimpleNamespace(
        accelerator=NO_ACCELERATOR,
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=options["delta"], steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options["level"],
        beta=options["beta"],
        loss_type=options["loss_type"],
        epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon_high"],
        use_vllm="importance_sampling_ratio" in table,
        vllm_importance_sampling_correction=True,
        max_completion_length=options["max_completion_length"],
        current_gradient_accumulation_steps=options["num_calls"],
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            current,
            torch.zeros_like(current),
            None,
        ),
    )
    # The whole generation batch is one step of `num_calls` calls, so that TRL's rescaling by
    # accumulation / steps_per_generation is 1.
    given.args.steps_per_generation = options["num_calls"]
    mask = table["mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": table["advantages"],
        "ref_per_token_logps": table["reference"],
        "num_items_in_batch": torch.tensor(options["num_tokens"]),
    }
    for name, key in (("old", "old_per_token_logps"), ("importance_sampling_ratio",) * 2):
        if name in table:
            inputs[key] = table[name]
    loss = GRPOTrainer._compute_loss(given, None, inputs)
    [gradient] = torch.autograd.grad(loss, [current])
    metrics = {key: values[-1] for key, values in given._metrics["train"].items()}
    return {"loss": loss.item(), "gradient": gradient.tolist(), "metrics": metrics}


if __name__ == "__main__":
    json.dump([compute(case) for case in json.load(sys.stdin)], sys.stdout)
