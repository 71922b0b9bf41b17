"""Run by a Python that has the tinker SDK: trains, samples, saves, resumes; prints what it saw.

python tinker_client.py MODEL STEPS     # with TINKER_BASE_URL and TINKER_API_KEY
"""

import hashlib
import json
import sys
from typing import Any

import tinker
from tinker import types

TOKENS = [5, 9, 14, 20, 33, 41, 5, 9, 60, 61, 5, 9, 14]


def datum(tokens: list[int]) -> Any:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def policy_datum(tokens: list[int], logprobs: list[float]) -> Any:
    advantages = [0.0] * 3 + [1.0] * (len(tokens) - 4)
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def neg_ll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def custom_losses(service: Any, trainer: Any) -> dict[str, float]:
    """A loss of its own on the server, beside the same as cross_entropy; gradients are dropped."""
    ranks = {"logprobs": 1, "weights": 1}
    handle = service.create_custom_loss(neg_ll, input_ranks=ranks).result()
    assert handle.loss_id, "it was not sent to the server"
    own = trainer.forward_backward_custom([datum(TOKENS)], handle).result().metrics
    plain = trainer.forward_backward([datum(TOKENS)], "cross_entropy").result().metrics
    return {
        "own": own["loss:sum"],
        "reported": own["custom/neg_ll:sum"],
        "plain": plain["loss:sum"],
    }


def main(model: str, steps: int) -> dict[str, Any]:
    service = tinker.ServiceClient()
    names = [m.model_name for m in service.get_server_capabilities().supported_models]
    trainer = service.create_lora_training_client(base_model=model, rank=8, seed=7)
    seen = hashlib.sha256()
    losses = []
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    for step in range(steps):
        if step % 4 == 0:
            sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, seed=step)
        drawn = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
        tokens = [list(sequence.tokens) for sequence in drawn.sequences]
        # Without a last token, the answer may be the end of text alone.
        data = [datum(TOKENS), datum(TOKENS[:4] + tokens[0])]
        gradients = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        output = gradients.result()
        stepped.result()
        losses.append(output.metrics["loss:sum"])
        arrays = [list(row["logprobs"].data) for row in output.loss_fn_outputs]
        seen.update(repr((tokens, arrays)).encode())
        print(json.dumps({"step": step}), flush=True)  # noqa: T201
    sampler = trainer.save_weights_and_get_sampling_client()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    row = policy_datum(TOKENS, [float(value) for value in scores[1:]])
    policy = {
        loss: trainer.forward_backward([row], loss).result().metrics["loss:sum"]
        for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    }
    custom = custom_losses(service, trainer)
    trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    path = trainer.save_state(name="end").result().path
    before = trainer.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    after = resumed.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]
    try:
        trainer.forward_backward([datum(TOKENS)], "stable_reinforce").result()
        refusal = ""
    except tinker.BadRequestError as error:
        refusal = str(error)
    return {
        "names": names,
        "losses": losses,
        "hash": seen.hexdigest(),
        "policy": policy,
        "custom": custom,
        "saved": before,
        "resumed": after,
        "refusal": refusal,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))), flush=True)  # noqa: T201
