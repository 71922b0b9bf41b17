"""Losses of the caller's own against the functions they were traced from, and what they may not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from tiny_training import gradients_of, make_batch, make_trainer, train
from torch.fx.node import Node, _get_qualified_name
from torch.nn import functional

from rookery.errors import RookeryError, TrainError
from rookery.slots import SlottedModel, load_model
from rookery.train import TrainerConfig
from rookery.train.losses import make_loss
from rookery.train.losses.custom import LossGraph
from rookery.types import Datum, TrainRequest

Function = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> SlottedModel:
    return load_model(tiny_folder)


def encode(value: Any) -> Any:
    """As the SDK writes arguments."""
    if isinstance(value, Node):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encode(x) for x in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return value


def graph_of(function: Function) -> dict[str, Any]:
    """Traced and written down as the SDK does it."""
    nodes = []
    for node in torch.fx.symbolic_trace(function).graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = _get_qualified_name(node.target).replace("_operator.", "operator.")
        kwargs = {key: encode(value) for key, value in node.kwargs.items()}
        args = [encode(arg) for arg in node.args]
        nodes.append(
            {"op": node.op, "name": node.name, "target": target, "args": args, "kwargs": kwargs}
        )
    return {"format": 1, "nodes": nodes}


def neg_ll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/length:mean": torch.ones_like(loss)}


def clipped(logprobs: Any, weights: Any) -> Any:
    ratio = torch.exp(logprobs - logprobs.detach() + 0.3)
    bound = torch.clamp(ratio, 0.8, 1.2)
    kept = torch.where(weights > 0.25, torch.minimum(ratio, bound), ratio * 2)
    loss = -(kept * weights).mean() + functional.softplus(logprobs[1:] / 3).sum() ** 2
    return loss, {"custom/ratio:mean": ratio.max()}


def by_shape(logprobs: Any, weights: Any) -> Any:
    total = torch.logsumexp(logprobs, dim=0) / logprobs.shape[0] - weights.float().std(
        unbiased=False
    )
    scaled = functional.log_softmax(logprobs, dim=-1)[..., None].squeeze(-1).cumsum(0)
    return total + (scaled * weights).pow(2).sum() * (logprobs.size(0) - 1), {}


def pairs(logprobs: Any, weights: Any) -> Any:
    gaps = logprobs.unsqueeze(0) - logprobs.unsqueeze(1)
    return (functional.logsigmoid(gaps) * weights).sum(), {}


@pytest.mark.parametrize("function", [neg_ll, clipped, by_shape, pairs])
def test_a_graph_computes_what_its_function_does(function: Function) -> None:
    graph = LossGraph(graph_of(function), names=("logprobs", "weights"))
    for length in (1, 2, 9):
        logprobs = -torch.rand(length, requires_grad=True)
        weights = torch.rand(length)
        got, got_metrics = graph(logprobs, weights)
        wanted, metrics = function(logprobs, weights)
        assert torch.equal(got, wanted) and got_metrics.keys() == metrics.keys()
        assert all(torch.equal(got_metrics[key], metrics[key]) for key in metrics)
        [one], [other] = (
            torch.autograd.grad(x, [logprobs], retain_graph=True) for x in (got, wanted)
        )
        assert torch.equal(one, other)


def custom(function: Function, *, rank: int = 1) -> dict[str, Any]:
    inputs = [{"name": "logprobs", "rank": rank}, {"name": "weights", "rank": rank}]
    return {"inputs": inputs, "graph": graph_of(function)}


def with_inputs(batch: list[Datum]) -> list[Datum]:
    return [replace(datum, inputs={"weights": list(datum.weights)}) for datum in batch]


async def test_training_on_a_graph_is_training_on_its_formula(model: SlottedModel) -> None:
    """Cross-entropy as a graph, in passes of several data and of one; metrics as they reduce."""
    batch = make_batch()
    wanted = await gradients_of(make_trainer(model), batch)
    plain = await train(make_trainer(model), batch)
    for pass_tokens in (1, 1024):
        trainer = make_trainer(model, config=TrainerConfig(pass_tokens=pass_tokens))
        output = await train(trainer, with_inputs(batch), "custom", custom(neg_ll))
        for got, expected in zip(output.logprobs, plain.logprobs, strict=True):
            assert got == pytest.approx(expected, abs=1e-5)
        loss = plain.metrics["train/loss_sum"]
        assert output.metrics["train/loss_sum"] == pytest.approx(loss, rel=1e-5)
        assert output.metrics["custom/neg_ll:sum"] == pytest.approx(loss, rel=1e-5)
        assert output.metrics["custom/length:mean"] == 1.0
        for one, other in zip(trainer.trainee("policy").gradients or (), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


async def test_soft_targets_come_as_a_table(model: SlottedModel) -> None:
    soft = Datum(
        tokens=(5, 6, 7),
        positions=(0, 0, 1, 1, 2, 2),
        targets=(7, 8, 9, 4, 5, 5),
        weights=(1.0,) * 6,
    )
    table: Any = [[0.5, 0.25], [0.0, 1.0], [2.0, -1.0]]
    asked = replace(soft, inputs={"weights": table})
    trainer, plain = make_trainer(model), make_trainer(model)

    def rows(logprobs: Any, weights: Any) -> Any:
        return -((logprobs * weights).sum(1) * 2.0).sum(), {}

    await train(trainer, [asked], "custom", custom(rows, rank=2))
    weights = tuple(2 * weight for row in table for weight in row)
    await train(plain, [replace(soft, weights=weights)])
    for one, other in zip(
        trainer.trainee("policy").gradients or (),
        plain.trainee("policy").gradients or (),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def node(op: str, target: str, *args: Any, name: str = "x") -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


LOGPROBS = node("placeholder", "logprobs", name="logprobs")
REF = {"ref": "logprobs"}


@pytest.mark.parametrize(
    "bad",
    [
        node("call_function", "torch.load", "/etc/passwd"),
        node("call_function", "builtins.eval", "1"),
        node("call_function", "torch.zeros", [10**12]),
        node("call_function", "os.system", "true"),
        node("call_method", "__reduce__", REF),
        node("call_method", "numpy", REF),
        node("call_method", "backward", REF),
        node("call_method", "expand", REF, 10**12),
        node("call_module", "linear", REF),
        node("get_attr", "_tensor_constant0"),
        node("import", "os"),
    ],
    ids=lambda bad: bad["target"],
)
def test_what_is_not_on_the_list_is_refused(bad: dict[str, Any]) -> None:
    graph: Any = {
        "format": 1,
        "nodes": [LOGPROBS, bad, node("output", "output", {"tuple": [REF, {}]})],
    }
    with pytest.raises(TrainError, match="which is not run here"):
        LossGraph(graph, names=("logprobs",))
    with pytest.raises(RookeryError):
        make_loss("custom", {"inputs": [{"name": "logprobs", "rank": 1}], "graph": graph})


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("call_function", "getattr", REF, "__class__")], "attribute '__class__'"),
        ([node("call_function", "getattr", REF, "grad_fn")], "attribute 'grad_fn'"),
        ([node("call_function", "operator.mul", "a", 10**9)], "tensors and numbers"),
        ([node("call_function", "operator.mul", [1], 10**9)], "tensors and numbers"),
        ([node("call_function", "operator.pow", 10, 10**9)], "cannot be computed"),
        ([node("call_function", "operator.add", 2**53, 2**53)], "whole number"),
        ([node("call_function", "operator.getitem", "text", 0)], "something else than tensors"),
        ([node("call_function", "operator.getitem", REF, REF)], "multiply by a mask"),
        ([node("call_method", "sum", "text")], "not a tensor"),
        ([node("call_method", "sum", {"ref": "nobody"})], "nobody"),
        ([node("call_method", "sum", {"device": "cuda"})], "'device' is not allowed"),
        ([], "loss is not a scalar"),
    ],
)
def test_values_that_are_not_allowed_are_refused(nodes: list[dict[str, Any]], message: str) -> None:
    result = {"tuple": [REF, {"dict": {}}]}
    document = {"format": 1, "nodes": [LOGPROBS, *nodes, node("output", "output", result)]}
    with pytest.raises(TrainError, match=message):
        LossGraph(document, names=("logprobs",))(torch.randn(4))


def test_a_graph_may_not_grow_without_bound() -> None:
    """Each line compares all with all: 20 numbers become 20^16 before anything is computed."""
    nodes, last = [LOGPROBS], "logprobs"
    for i in range(8):
        for dim in (0, -1):
            nodes.append(node("call_method", "unsqueeze", {"ref": last}, dim, name=f"u{i}{dim}"))
        pair = [{"ref": f"u{i}{dim}"} for dim in (0, -1)]
        nodes.append(node("call_function", "operator.mul", *pair, name=f"m{i}"))
        nodes.append(node("call_method", "reshape", {"ref": f"m{i}"}, -1, name=f"r{i}"))
        last = f"r{i}"
    nodes.append(node("call_method", "sum", {"ref": last}, name="loss"))
    nodes.append(node("output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]}))
    graph = LossGraph({"format": 1, "nodes": nodes}, names=("logprobs",))
    with pytest.raises(TrainError, match="more than 33,554,432 numbers"):
        graph(torch.randn(20))


def grown(num_times: int) -> dict[str, Any]:
    """A loss that makes 64 times as many numbers of its log-probabilities, so many times."""
    nodes, last = [LOGPROBS], "logprobs"
    for i in range(num_times):
        nodes.append(node("call_function", "torch.stack", [{"ref": last}] * 64, name=f"s{i}"))
        last = f"s{i}"
    nodes.append(node("call_method", "sum", {"ref": last}, name="loss"))
    nodes.append(node("output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]}))
    return {
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }


async def test_a_loss_is_bounded_over_all_data_of_a_pass(model: SlottedModel) -> None:
    """One position may have many numbers, and a pass has many of them."""
    short = Datum(tokens=(5,), positions=(0,), targets=(6,), weights=(1.0,))
    trainer = make_trainer(model)
    refused = TrainRequest(
        trainee="policy", data=(short,) * 8, loss="custom", loss_options=grown(3)
    )
    taken = TrainRequest(trainee="policy", data=(short,) * 8, loss="custom", loss_options=grown(2))
    outputs = await trainer.forward_backward([refused, taken])
    assert "At most 262,144 for each position" in outputs[0].error and not outputs[1].error


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "not of format 1"),
        ({"format": 2, "nodes": []}, "not of format 1"),
        ({"format": 1, "nodes": []}, "0 nodes"),
        ({"format": 1, "nodes": [LOGPROBS] * 2001}, "2001 nodes"),
        ({"format": 1, "nodes": [{}]}, "cannot be read"),
        ({"format": 1, "nodes": [LOGPROBS, LOGPROBS]}, "takes"),
    ],
)
def test_what_is_no_graph_is_refused(document: object, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        LossGraph(document, names=("logprobs",))


async def test_a_datum_without_its_inputs_fails_its_request_alone(model: SlottedModel) -> None:
    trainer = make_trainer(model)
    batch = make_batch((6,))
    bad = TrainRequest(
        trainee="policy", data=tuple(batch), loss="custom", loss_options=custom(neg_ll)
    )
    good = TrainRequest(trainee="policy", data=tuple(batch))
    outputs = await trainer.forward_backward([bad, good])
    assert "no input 'weights'" in outputs[0].error and not outputs[1].error
    assert any(g.any() for g in trainer.trainee("policy").gradients or ())
