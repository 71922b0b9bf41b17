"""Bodies as the SDK sends and reads them: golden vectors, tensors of all kinds, bombs."""

from dataclasses import replace

import numpy as np
import pytest

from rookery.compat.tinker.schema import encode_samples, json_tensor, proto_tensor, samples_as_json
from rookery.compat.tinker.training import (
    DatumArrays,
    TrainCall,
    encode_outputs,
    output_arrays,
    output_metrics,
    outputs_as_json,
    read_train_proto,
    train_request,
)
from rookery.remote.messages import ForwardBackwardRequest
from rookery.service.records import CustomLoss
from rookery.service.work import PromptScores, Refusal
from rookery.testing import BASE
from rookery.types import Completion, TrainOutput

REQUEST = bytes.fromhex(
    "0a09533a747261696e3a3010011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f6b"
    "656e73121f0a180200000000000000030000000000000004000000000000001802220103121e0a0777656967687473"
    "12130a0c000000000000803f0000803f1801220103220d63726f73735f656e74726f7079"
)
OUTPUT = (
    "0a0b41727261795265636f72641232122e0a086c6f6770726f627312220a0c000000bf000080bf0000c0bf12100000"
    "0000000000000c00000000000000180118011a130a086c6f73733a73756d110000000000000440"
)
SAMPLES = "0a16080112080a0000000b0000001a08000080be000000bf12080000c07f0000c0bf"


def call_of(loss: str, **inputs: object) -> TrainCall:
    arrays = {name: np.asarray(values) for name, values in inputs.items()}
    datum = DatumArrays(np.asarray([1, 2, 3]), arrays)
    return TrainCall(
        model_id="m", seq_id=1, loss=loss, options={}, forward_only=False, data=(datum,)
    )


def no_loss(loss_id: str) -> CustomLoss:
    raise AssertionError(f"no custom loss is asked for, and {loss_id} was")


def test_the_request_of_the_sdk_is_read() -> None:
    call, canonical = read_train_proto(REQUEST)
    assert (call.model_id, call.seq_id, call.loss) == ("S:train:0", 1, "cross_entropy")
    assert canonical == REQUEST
    request = train_request(call, context_tokens=None, custom=no_loss)
    [datum] = request.data
    assert datum.tokens == (1, 2, 3)
    assert datum.targets == (2, 3, 4)
    assert datum.positions == (0, 1, 2)
    assert datum.weights == (0.0, 1.0, 1.0)


def test_outputs_are_written_as_the_sdk_reads_them() -> None:
    logprobs = np.asarray([-0.5, -1.0, -1.5])
    assert encode_outputs([logprobs], {"loss:sum": 2.5}).hex() == OUTPUT
    document = outputs_as_json(bytes.fromhex(OUTPUT))
    [row] = document["loss_fn_outputs"]
    assert row["logprobs"] == {"data": [-0.5, -1.0, -1.5], "dtype": "float32", "shape": [3]}


def test_samples_are_written_as_the_sdk_reads_them() -> None:
    one = Completion(
        model=BASE, tokens=(10, 11), logprobs=(-0.25, -0.5), text="", finish_reason="length"
    )
    payload = encode_samples([one], PromptScores(logprobs=[None, -1.5]))
    assert payload.hex() == SAMPLES
    document = samples_as_json(payload)
    assert document["prompt_logprobs"] == [None, -1.5]
    assert document["sequences"][0]["stop_reason"] == "length"


def test_soft_targets_dense_and_sparse_are_one() -> None:
    message = ForwardBackwardRequest()
    tensor = message.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype = 2
    tensor.shape.extend([3, 2])
    tensor.sparse_csr.values = np.asarray([2, 9, 3], dtype="<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray([0, 2, 2, 3], dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray([0, 1, 0], dtype="<i8").tobytes()
    targets = proto_tensor(tensor, name="t")
    assert targets.tolist() == [[2, 9], [0, 0], [3, 0]]
    weights = np.asarray([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]])
    request = train_request(
        call_of("cross_entropy", target_tokens=targets, weights=weights),
        context_tokens=None,
        custom=no_loss,
    )
    [datum] = request.data
    assert datum.positions == (0, 0, 1, 1, 2, 2)
    assert datum.targets == (2, 9, 0, 0, 3, 0)
    [array] = output_arrays(request, TrainOutput(logprobs=((-1.0,) * 6,)))
    assert array.shape == (3, 2)


@pytest.mark.parametrize(
    ("crow", "col"), [([0, 1], [0]), ([0, 2, 1, 3], [0, 1, 0]), ([0, 2, 2, 3], [0, 7, 0])]
)
def test_sparse_indices_that_do_not_fit_are_refused(crow: list[int], col: list[int]) -> None:
    document = {
        "data": [1] * len(col),
        "dtype": "int64",
        "shape": [3, 2],
        "sparse_crow_indices": crow,
        "sparse_col_indices": col,
    }
    with pytest.raises(Refusal, match="CSR indices"):
        json_tensor(document, name="targets")


def test_a_small_body_that_claims_a_huge_tensor_is_refused() -> None:
    document = {"data": [], "dtype": "int64", "shape": [1 << 40, 1 << 40]}
    with pytest.raises(Refusal, match="at most"):
        json_tensor({**document, "sparse_crow_indices": [0], "sparse_col_indices": []}, name="t")


@pytest.mark.parametrize(
    ("loss", "inputs", "sentence"),
    [
        ("cross_entropy", {"target_tokens": [1, 2, 3]}, "needs 'weights'"),
        ("cross_entropy", {"target_tokens": [1, 2], "weights": [1, 1]}, "one row per token"),
        ("cross_entropy", {"target_tokens": [1, 2, 3], "weights": [1, 1]}, "they are alike"),
        (
            "cross_entropy",
            {"target_tokens": [1, 2, 3], "weights": [1, 1, float("nan")]},
            "NaN or infinite",
        ),
        ("stable_reinforce", {}, "There are: cross_entropy"),
        (
            "importance_sampling",
            {
                "target_tokens": [1, 2, 3],
                "logprobs": [0.0] * 3,
                "advantages": [0.0] * 3,
                "mask": [1.0] * 3,
            },
            "takes no 'mask'",
        ),
    ],
)
def test_wrong_data_get_a_sentence(loss: str, inputs: dict[str, object], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence) as refused:
        train_request(call_of(loss, **inputs), context_tokens=None, custom=no_loss)
    assert refused.value.status == 400


def test_thresholds_become_clips() -> None:
    inputs = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [0.0, 1.0, 1.0]}
    call = call_of("ppo", **inputs)
    options = {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}
    call = TrainCall(
        model_id="m", seq_id=1, loss="ppo", options=options, forward_only=False, data=call.data
    )
    request = train_request(call, context_tokens=None, custom=no_loss)
    assert request.loss_options == {"clip_low": 0.25, "clip_high": 0.5}
    output = TrainOutput(metrics={"train/loss_sum": 1.0}, logprobs=((-9.0, -1.5, -1.5),))
    metrics = output_metrics(request, output)
    assert metrics["kl_sample_train_v1:mean"] == 0.5, "the prompt, of advantage 0, is left out"
    assert all(key.count(":") == 1 for key in metrics)


@pytest.mark.parametrize(
    ("loss", "options", "sentence"),
    [
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold is 1.5"),
        ("ppo", {"clip_low_threshold": -0.1}, "from 0 to 1"),
        ("gspo", {"clip_high_threshold": 0.5}, "clip_high_threshold 0.5"),
        ("gspo", {"clip_high_threshold": float("inf")}, "at least 1"),
        ("ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold is nan"),
        ("cispo", {"clip_low_threshold": 5.0}, "not above the second"),
        ("cispo", {"clip_high_threshold": 0.0}, "not above the second"),
        ("dro", {"beta": -1.0}, "beta is -1"),
        ("importance_sampling", {"beta": 1.0}, "has no option 'beta'"),
    ],
)
def test_options_that_no_loss_takes_are_refused_at_once(
    loss: str, options: dict[str, float], sentence: str
) -> None:
    inputs = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [0.0, 1.0, 1.0]}
    call = replace(call_of(loss, **inputs), options=options)
    with pytest.raises(Refusal, match=sentence) as refused:
        train_request(call, context_tokens=None, custom=no_loss)
    assert refused.value.status == 400
