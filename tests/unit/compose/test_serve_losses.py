"""All losses of the protocol over HTTP, against transformers and the formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compose.served_model import served_model
from service.tenants import Client, as_sparse, crashed_copy, loss_body
from transformers import AutoModelForCausalLM

TOKENS = [5, 9, 14, 20, 33, 41]
TARGETS = [9, 14, 20, 33, 41, 60]
SAMPLED = [-4.0, -5.5, -3.0, -4.4, -4.9, -5.0]
ADVANTAGES = [0.0, 0.0, 1.0, -0.5, 2.0, 0.25]
SOFT = [[9, 3], [14, 4], [20, 0], [33, 7], [41, 0], [60, 2]]
SOFT_WEIGHTS = [[0.5, 0.5], [1.0, 0.0], [0.25, 0.0], [0.0, 2.0], [1.0, 0.0], [0.75, 0.25]]
POLICY = {
    "tokens": TOKENS,
    "target_tokens": TARGETS,
    "logprobs": SAMPLED,
    "advantages": ADVANTAGES,
}


def model_logprobs(folder: Path) -> torch.Tensor:
    """[T, vocabulary] by transformers: a new adapter changes nothing yet."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def expected(loss: str, options: dict[str, float], logprobs: torch.Tensor) -> float:
    ratio = torch.exp(logprobs - torch.tensor(SAMPLED))
    advantages = torch.tensor(ADVANTAGES)
    low = options.get("clip_low_threshold", 0.8)
    high = options.get("clip_high_threshold", 1.2)
    if loss == "importance_sampling":
        losses = -ratio * advantages
    elif loss == "cispo":
        low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 4.0)
        losses = -ratio.clamp(low, high) * advantages * logprobs
    elif loss == "dro":
        beta = options.get("beta", 0.05)
        gaps = logprobs - torch.tensor(SAMPLED)
        losses = -(logprobs * advantages - beta / 2 * gaps**2)
    else:
        if loss == "gspo":
            drawn = advantages != 0
            gaps = (logprobs - torch.tensor(SAMPLED))[drawn]
            ratio = torch.full_like(logprobs, gaps.mean().exp().item())
        clipped = ratio.clamp(low, high) * advantages
        losses = -torch.minimum(ratio * advantages, clipped)
    return float(losses.sum())


async def outputs(client: Client, body: bytes) -> tuple[np.ndarray[Any, Any], dict[str, float]]:
    message = await client.outputs(await client.train(body))
    field = message.loss_fn_outputs[0].fields["logprobs"]
    values = np.frombuffer(field.data, dtype="<f4").reshape(-1, *field.trailing_shape)
    return values, dict(message.metrics)


CASES: list[tuple[str, dict[str, float]]] = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.5}),
    ("gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}),
]


async def test_policy_losses_are_sums_of_their_formulas(tmp_path: Path, tiny_folder: Path) -> None:
    logprobs = model_logprobs(tiny_folder)[range(6), TARGETS]
    async with served_model(tmp_path / "run", tiny_folder) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        for seq, (loss, options) in enumerate(CASES, start=1):
            body = loss_body(model, seq, loss, POLICY, **options)
            values, metrics = await outputs(ada, body)
            assert values.tolist() == pytest.approx(logprobs.tolist(), abs=1e-4)
            wanted = expected(loss, options, logprobs)
            assert metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4), loss


async def test_soft_targets_dense_and_sparse(tmp_path: Path, tiny_folder: Path) -> None:
    """Zeros that are not stored are token 0 with weight 0; log-probabilities have its shape."""
    table = model_logprobs(tiny_folder)
    wanted = torch.stack([table[place, row] for place, row in enumerate(SOFT)])
    loss = -float((wanted * torch.tensor(SOFT_WEIGHTS)).sum())
    arrays = {"tokens": TOKENS, "target_tokens": SOFT, "weights": SOFT_WEIGHTS}
    async with served_model(tmp_path / "run", tiny_folder) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        dense = loss_body(model, 1, "cross_entropy", arrays)
        sparse = as_sparse(loss_body(model, 2, "cross_entropy", arrays))
        found = [await outputs(ada, body) for body in (dense, sparse)]
    for values, metrics in found:
        assert values.shape == (6, 2)
        np.testing.assert_allclose(values, wanted.numpy(), atol=1e-4)
        assert metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert np.array_equal(found[0][0], found[1][0])


def custom_loss(session: str) -> dict[str, Any]:
    """-(logprobs * weights).sum(), as the SDK writes it."""
    steps = [
        ("placeholder", "logprobs", "logprobs", []),
        ("placeholder", "weights", "weights", []),
        ("call_function", "mul", "operator.mul", [{"ref": "logprobs"}, {"ref": "weights"}]),
        ("call_method", "sum_1", "sum", [{"ref": "mul"}]),
        ("call_function", "neg", "operator.neg", [{"ref": "sum_1"}]),
        (
            "output",
            "output",
            "output",
            [{"tuple": [{"ref": "neg"}, {"dict": {"custom/neg_ll:sum": {"ref": "neg"}}}]}],
        ),
    ]
    return {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "neg_ll",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": op, "name": name, "target": target, "args": args, "kwargs": {}}
                for op, name, target, args in steps
            ],
        },
    }


async def test_a_custom_loss_outlives_a_kill(tmp_path: Path, tiny_folder: Path) -> None:
    weights = [0.0, 1.0, 2.0, 0.5, -1.0, 1.0]
    arrays = {"tokens": TOKENS, "target_tokens": TARGETS, "weights": weights}
    wanted = -float((model_logprobs(tiny_folder)[range(6), TARGETS] * torch.tensor(weights)).sum())
    async with served_model(tmp_path / "run", tiny_folder) as served:
        ada = served.client()
        session = await ada.session()
        model = await ada.model(session)
        reply = await ada.post("create_custom_loss", custom_loss(session))
        made = await ada.result(reply)
        assert made == {"type": "create_custom_loss", "loss_id": f"{session}:loss:0"}
        again = await ada.result(await ada.post("create_custom_loss", custom_loss(session)))
        assert again == made
        other = {**custom_loss(session), "name": "another"}
        refused = await ada.post("create_custom_loss", other, status=400)
        assert "with another graph" in refused["error"]
        forbidden = custom_loss(session)
        forbidden["graph"]["nodes"][3]["target"] = "backward"
        refused = await ada.post("create_custom_loss", forbidden, status=400)
        assert "'backward'" in refused["error"]
        body = loss_body(model, 1, "custom", arrays, loss_id=made["loss_id"])
        _, metrics = await outputs(ada, body)
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with served_model(killed, tiny_folder) as served:
        ada = served.client()
        assert await ada.result(reply) == made
        _, repeated = await outputs(ada, body)
        await ada.train(loss_body(model, 2, "custom", arrays, loss_id="loss-0"), status=404)
        table = {**arrays, "weights": [[weight] for weight in weights]}
        refused = await ada.train(
            loss_body(model, 2, "custom", table, loss_id=made["loss_id"]), status=400
        )
        assert "rank 1" in refused["error"]
    assert metrics["custom/neg_ll:sum"] == pytest.approx(wanted, rel=1e-4)
    assert metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)
    assert repeated == metrics
