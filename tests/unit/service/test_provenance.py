"""How far sampler and trainer are apart, where data say which samples their targets are of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service.tenants import Client, Served, serve, train_body

from rookery.service.wire.schema import ForwardBackwardRequest

PROMPT = (5, 6, 7)


async def drawn_sequence(client: Client) -> tuple[str, Any]:
    sampler = await client.sampler()
    sample = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(PROMPT)}]},
        "num_samples": 2,
        "sampling_session_id": sampler,
        "seq_id": 4,
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []},
    }
    reply = await client.post("asample", sample)
    return reply["sample_sequence_ids"][1], (await client.samples(reply)).sequences[1]


def spanned_body(model: str, seq: int, tokens: list[int], spans: list[tuple[str, int]]) -> bytes:
    """Targets that are the next tokens, tiled by spans; an empty name is of the prompt."""
    body = train_body(model, seq, tokens=tokens[:-1])
    message = ForwardBackwardRequest.FromString(body)
    [datum] = message.data
    targets = np.asarray(tokens[1:], dtype="<i8")
    datum.loss_fn_inputs["target_tokens"].dense = targets.tobytes()
    for name, length in spans:
        span = datum.loss_fn_input_spans.add()
        own = span.sampled_tokens if name else span.prompt_tokens
        own.sequence_id, own.length = name or "any", length
    data: bytes = message.SerializeToString(deterministic=True)
    return data


async def drift(served: Served, client: Client, body: bytes) -> dict[str, float]:
    output = await client.outputs(await client.train(body))
    return {key: value for key, value in output.metrics.items() if key.startswith("kl_")}


async def test_cross_entropy_on_drawn_tokens_tells_the_drift(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        name, sequence = await drawn_sequence(ada)
        drawn = np.frombuffer(sequence.tokens, dtype="<i4").tolist()
        sampled = np.frombuffer(sequence.logprobs, dtype="<f4")
        tokens, spans = [*PROMPT, *drawn], [("", 2), (name, 3)]
        model = await ada.model(await ada.session())
        output = await ada.outputs(await ada.train(spanned_body(model, 1, tokens, spans)))
        trained = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, dtype="<f4")
        gaps = sampled - trained[2:]
        assert output.metrics["kl_sample_train_v1:mean"] == pytest.approx(gaps.mean())
        assert output.metrics["kl_sample_train_v2:mean"] == pytest.approx((gaps**2).mean() / 2)
        other = await bob.model(await bob.session())
        stolen = spanned_body(other, 1, tokens, spans)
        assert not await drift(served, bob, stolen), "a sample of another tenant is not known"
        unknown = [("", 2), (f"{name}9", 3)]
        assert not await drift(served, ada, spanned_body(model, 2, tokens, unknown))
        refused = await ada.train(spanned_body(model, 3, tokens, [(name, 3)]), status=400)
        assert "do not cover" in refused["error"]
