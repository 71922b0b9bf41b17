"""Run by a Python that has an SDK of the JSON time: trains, samples, saves; prints what it saw.

python tinker_old_client.py MODEL     # with TINKER_BASE_URL and TINKER_API_KEY
"""

import json
import sys
from typing import Any

import tinker
from tinker import types

TOKENS = [5, 9, 14, 20, 33, 41, 5, 9, 60, 61, 5, 9, 14]


def datum() -> Any:
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def main(model: str) -> dict[str, Any]:
    service = tinker.ServiceClient()
    names = [m.model_name for m in service.get_server_capabilities().supported_models]
    trainer = service.create_lora_training_client(base_model=model, rank=8, seed=7)
    losses = []
    for _ in range(6):
        gradients = trainer.forward_backward([datum(), datum()], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(gradients.result().metrics["loss:sum"])
    forward = trainer.forward([datum()], "cross_entropy").result()
    path = trainer.save_state(name="end").result().path
    sampler = trainer.save_weights_and_get_sampling_client(name="end")
    prompt = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=6, seed=1)
    drawn = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    scores = sampler.compute_logprobs(prompt).result()
    resumed = service.create_training_client_from_state(path)
    again = resumed.forward([datum()], "cross_entropy").result()
    return {
        "names": names,
        "losses": losses,
        "forward": list(forward.loss_fn_outputs[0]["logprobs"].data),
        "again": list(again.loss_fn_outputs[0]["logprobs"].data),
        "scores": scores[1:],
        "num_drawn": [len(sequence.tokens) for sequence in drawn.sequences],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)  # noqa: T201
