"""A loss that the caller defines as a graph in plain data: computed per datum and summed.

    {"inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}], "graph": {...}}

The first input is the datum's log-probabilities in the shape of its targets, the others are in the
datum's `inputs`.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rookery.config import Config
from rookery.errors import TrainError, boundary
from rookery.train.losses.loss import Column, LossOutput, Targets
from rookery.types import Datum, Json

__all__ = ["Custom", "LossGraph"]

# A graph of tensor operations in plain data, run from a list of allowed operations.
#
#     graph = LossGraph({"format": 1, "nodes": [...]}, names=("logprobs", "weights"))
#     loss, metrics = graph(logprobs, weights)
#
# The format is that of the `tinker` SDK (torch.fx, node by node). It contains no code: operations
# are names that are looked up here, and unknown ones are refused. Each new shape of inputs first
# runs on fake tensors, which bounds the memory of a graph.


MAX_NODES = 2_000
MAX_VALUES = 1 << 25
"""Most numbers in all tensors of a graph for one datum: 128 MB of float32."""
MAX_VALUES_PER_POSITION = 1 << 18
"""Most numbers per position of a pass, about the work of a log-probability: time follows tokens."""
NODE_VALUES = 512
"""Numbers that a node counts as: starting an operation takes as long as computing this many."""
CHECK_RUNS = 4
"""Cost of a run on fake tensors, once per shape of data, in real runs."""
MAX_INTEGER = 1 << 53

METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_BOTH = """
abs add all amax amin any clamp clip cos cumsum diff div dot eq erf exp expm1 flip floor ge gt
isfinite isinf isnan le lerp log log1p log2 log_softmax logcumsumexp logical_and logical_not
logical_or logsumexp lt masked_fill max maximum mean min minimum mul nan_to_num ne neg pow prod
reciprocal relu round rsqrt sigmoid sign sin softmax sqrt square squeeze std sub sum tanh transpose
true_divide unsqueeze var where
"""
"""Functions of torch that are also methods of tensors."""
_METHODS = """
bool detach dim double float long reshape size view
"""
_OPERATORS = """
abs add and_ eq floordiv ge gt invert le lt mod mul ne neg or_ pos pow sub truediv xor
"""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _BOTH.split()},
    "torch.cat": torch.cat,
    "torch.stack": torch.stack,
    "torch.full_like": torch.full_like,
    "torch.ones_like": torch.ones_like,
    "torch.zeros_like": torch.zeros_like,
    "torch.nn.functional.logsigmoid": functional.logsigmoid,
    "torch._C._nn.log_sigmoid": functional.logsigmoid,
    "torch._C._nn.softplus": functional.softplus,
    "torch.nn.functional.relu": functional.relu,
    "torch.nn.functional.softplus": functional.softplus,
    "torch.nn.functional.log_softmax": functional.log_softmax,
    "torch.nn.functional.softmax": functional.softmax,
    "torch.nn.functional.sigmoid": torch.sigmoid,
    "torch.nn.functional.huber_loss": functional.huber_loss,
    "torch.nn.functional.mse_loss": functional.mse_loss,
    "torch.nn.functional.smooth_l1_loss": functional.smooth_l1_loss,
    "operator.getitem": operator.getitem,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()
}
"""These also take numbers, whose size is bounded because Python's integers are unbounded."""
_ALLOWED = {
    *(("call_method", name) for name in (*_BOTH.split(), *_METHODS.split())),
    *(("call_function", name) for name in (*_FUNCTIONS, *_ARITHMETIC)),
    ("call_function", "getattr"),
    ("placeholder", None),
    ("output", None),
}
"""Operations with their targets; None allows any."""
_ATTRIBUTES = {"shape", "ndim", "dtype", "T"}
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool")}


class LossGraph:
    """A checked graph. `names` are its inputs in order."""

    def __init__(self, document: object, *, names: Sequence[str]) -> None:
        with boundary(TrainError, "The graph of the loss cannot be read"):
            self._nodes = _read_nodes(document)
        placeholders = [node["target"] for node in self._nodes if node["op"] == "placeholder"]
        if placeholders != list(names):
            raise TrainError(
                f"The graph of the loss takes {placeholders}, and its inputs are {[*names]}."
            )
        self._num_values: dict[tuple[tuple[int, ...], ...], int] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss and the metrics of one datum, all scalars."""
        with boundary(TrainError, "The graph of the loss cannot be computed"):
            self._values(inputs)
            return _output(_Pass(inputs, max_values=None).run(self._nodes))

    def check_pass(self, data: Sequence[Sequence[torch.Tensor]], *, num_positions: int) -> None:
        """Raise TrainError if a pass's data need too much computation."""
        most = MAX_VALUES_PER_POSITION * num_positions
        num_runs = len(data) + CHECK_RUNS * len({_shapes(inputs) for inputs in data})
        num_values = NODE_VALUES * num_runs * len(self._nodes)
        if num_values <= most:
            with boundary(TrainError, "The graph of the loss cannot be computed"):
                num_values += sum(map(self._values, data))
        if num_values > most:
            raise TrainError(
                f"The loss has {len(self._nodes):,} operations: {num_values:,} numbers for the "
                f"{num_positions:,} positions of {len(data):,} data. At most "
                f"{MAX_VALUES_PER_POSITION:,} for each position are computed: use fewer operations "
                "and smaller inputs, or data of equal shapes."
            )

    def _values(self, inputs: Sequence[torch.Tensor]) -> int:
        """Return the numbers computed for one datum, from shapes alone."""
        shapes = _shapes(inputs)
        if shapes not in self._num_values:
            with FakeTensorMode():
                like = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
                shadow = _Pass(like, max_values=MAX_VALUES)
                _output(shadow.run(self._nodes))
            self._num_values[shapes] = shadow.num_values
        return self._num_values[shapes]


def _shapes(inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in inputs)


class _Pass:
    def __init__(self, inputs: Sequence[torch.Tensor], *, max_values: int | None) -> None:
        self._inputs = iter(inputs)
        self._max_values = max_values
        self.num_values = 0
        self._results: dict[str, Any] = {}

    def run(self, nodes: Sequence[dict[str, Any]]) -> Any:
        for node in nodes:
            result = self._run(node)
            if node["op"] == "output":
                return result
            self._count(result)
            self._results[node["name"]] = result
        raise TrainError("The graph of the loss has no output.")

    def _run(self, node: dict[str, Any]) -> Any:
        op, target = node["op"], node["target"]
        if op == "placeholder":
            return next(self._inputs)
        args = [self._read(arg) for arg in node["args"]]
        kwargs = {key: self._read(value) for key, value in node["kwargs"].items()}
        if "out" in kwargs:
            raise TrainError("the argument out is not allowed")
        if op == "output":
            return args[0]
        if op == "call_method":
            return self._call_method(target, args, kwargs)
        if target in _ARITHMETIC:
            return _calculate(_ARITHMETIC[target], args)
        if target == "getattr":
            return _attribute(*args)
        _require_tensors(target, args)
        return _FUNCTIONS[target](*args, **kwargs)

    def _call_method(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            raise TrainError(f"The method {name} is called of something that is not a tensor.")
        return getattr(args[0], name)(*args[1:], **kwargs)

    def _count(self, result: Any) -> None:
        if self._max_values is None:
            return
        parts = result if isinstance(result, tuple | list) else [result]
        self.num_values += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
        if self.num_values > self._max_values:
            raise TrainError(
                f"its tensors hold more than {self._max_values:,} numbers for one datum: shorten "
                "the data, or do not compare all positions with all others."
            )

    def _read(self, value: Any) -> Any:
        """Decode an argument in the SDK's format."""
        if isinstance(value, list):
            return [self._read(item) for item in value]
        if not isinstance(value, dict):
            return _small(value)
        [(kind, content)] = value.items()
        match kind:
            case "ref":
                return self._results[content]
            case "tuple":
                return tuple(self._read(item) for item in content)
            case "dict":
                return {key: self._read(item) for key, item in content.items()}
            case "slice":
                return slice(*(self._read(item) for item in content))
            case "ellipsis":
                return ...
            case "float":
                return float(content)
            case "dtype":
                return _DTYPES[content]
        raise TrainError(f"an argument of the kind {kind!r:.40} is not allowed")


def _read_nodes(document: object) -> list[dict[str, Any]]:
    """Return the nodes if all their operations are allowed."""
    if not isinstance(document, dict) or document.get("format") != 1:
        raise TrainError("The graph of the loss is not of format 1.")
    nodes: list[dict[str, Any]] = document["nodes"]
    if not 0 < len(nodes) <= MAX_NODES:
        raise TrainError(f"The graph of the loss has {len(nodes)} nodes; at most {MAX_NODES} run.")
    for node in nodes:
        op, target = node["op"], node["target"]
        if (op, target) not in _ALLOWED and (op, None) not in _ALLOWED:
            raise TrainError(
                f"The loss uses {target!r:.60} ({op!r:.40}), which is not run here. Write it with "
                "sums, means, comparisons and elementwise functions, or give "
                "forward_backward_custom the function itself."
            )
    return nodes


def _output(result: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise TrainError("it gives no pair of a loss and metrics")
    loss, metrics = result
    if not isinstance(metrics, dict) or not all(map(METRIC_KEY.fullmatch, metrics)):
        raise TrainError("its metrics are not named custom/NAME:sum or custom/NAME:mean")
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise TrainError(f"its {name} is not a scalar tensor")
    return loss, metrics


def _calculate(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calculate with tensors or numbers. Powers of numbers use floats, which bounds their size."""
    if not any(isinstance(arg, torch.Tensor) for arg in args):
        if not all(isinstance(arg, int | float | bool) for arg in args):
            raise TrainError(f"{function.__name__} takes tensors and numbers")
        if function is operator.pow:
            args = [float(arg) for arg in args]
    elif not all(isinstance(arg, torch.Tensor | int | float | bool) for arg in args):
        raise TrainError(f"{function.__name__} takes tensors and numbers")
    return _small(function(*args))


def _small(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise TrainError(f"a whole number is beyond {MAX_INTEGER:,}")
    return value


def _attribute(owner: Any, name: Any) -> Any:
    if not isinstance(owner, torch.Tensor) or name not in _ATTRIBUTES:
        raise TrainError(f"the attribute {name!r:.40} is not allowed: {sorted(_ATTRIBUTES)} are")
    return getattr(owner, name)


def _require_tensors(target: str, args: Sequence[Any]) -> None:
    """Require tensors: the same operations on strings and lists may not terminate."""
    if target == "operator.getitem":
        is_fine = isinstance(args[0], torch.Tensor | tuple)
        is_fine = is_fine and not _has_tensor(args[1])
    else:
        is_fine = any(_has_tensor(arg) for arg in args) and not any(
            isinstance(arg, str) for arg in args
        )
    if not is_fine:
        raise TrainError(
            f"{target} is called with something else than tensors, or picks elements by a tensor: "
            "multiply by a mask instead"
        )


def _has_tensor(value: Any) -> bool:
    parts = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)


class LossInput(Config):
    """One tensor that the loss reads."""

    name: str = Field(min_length=1, max_length=64)
    rank: Literal[0, 1, 2]


class Custom(Config):
    """Sum of the graph's loss over data; metrics keep their own names."""

    type: Literal["custom"] = "custom"
    needs: ClassVar[tuple[Column, ...]] = ()
    inputs: tuple[LossInput, ...] = Field(min_length=1, max_length=16)
    graph: dict[str, Any]
    """Document for `LossGraph`."""

    @cached_property
    def _run(self) -> LossGraph:
        return LossGraph(self.graph, names=[entry.name for entry in self.inputs])

    @model_validator(mode="after")
    def _check_graph(self) -> "Custom":
        if self.inputs[0].rank == 0:
            raise ValueError("log-probabilities have rank 1 ([T]) or 2 ([T, K])")
        assert self._run, "a TrainError says what is not allowed"
        return self

    def learns_from(self, datum: Datum) -> bool:  # noqa: ARG002
        return True

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        """Compute each datum's gradient with its loss, to hold one graph's tensors at a time."""
        sizes = torch.bincount(targets.datum, minlength=len(targets.num_rows)).tolist()
        parts = [
            part.requires_grad_(logprobs.requires_grad)
            for part in torch.split(logprobs.detach(), sizes)
        ]
        tensors = [self._inputs(part, targets, place) for place, part in enumerate(parts)]
        self._run.check_pass(tensors, num_positions=sum(targets.num_rows))
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        totals: dict[str, torch.Tensor] = {}
        for part, inputs in zip(parts, tensors, strict=True):
            loss, metrics = self._run(*inputs)
            if loss.requires_grad:
                gradients += torch.autograd.grad(loss, [part])
            else:
                gradients.append(torch.zeros_like(part))
            losses.append(loss.detach())
            for key, value in metrics.items():
                totals[key] = totals.get(key, torch.zeros_like(value)) + value.detach()
        total = torch.stack(losses).sum()
        loss = _Differentiated.apply(logprobs, total, torch.cat(gradients))  # type: ignore[no-untyped-call]
        return LossOutput(loss=loss, sums={"loss": total}, totals=totals)

    def _inputs(
        self, logprobs: torch.Tensor, targets: Targets, place: int
    ) -> tuple[torch.Tensor, ...]:
        rest = (
            self._tensor(one, targets.inputs[place], device=logprobs.device)
            for one in self.inputs[1:]
        )
        return self._logprobs(logprobs, targets.num_rows[place]), *rest

    def _logprobs(self, logprobs: torch.Tensor, num_rows: int) -> torch.Tensor:
        return logprobs if self.inputs[0].rank == 1 else logprobs.view(num_rows, -1)

    def _tensor(
        self, entry: LossInput, inputs: Mapping[str, Json], *, device: torch.device
    ) -> torch.Tensor:
        if entry.name not in inputs:
            raise TrainError(f"A datum has no input {entry.name!r}, which the loss reads.")
        tensor = torch.tensor(inputs[entry.name], device=device)
        if tensor.ndim != entry.rank:
            raise TrainError(
                f"The input {entry.name!r} of a datum has {tensor.ndim} dimensions; the loss reads "
                f"{entry.rank}."
            )
        return tensor


class _Differentiated(torch.autograd.Function):
    """A loss with a known gradient, so that its inputs need not be kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,  # noqa: ARG004
        loss: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: torch.Tensor) -> Any:
        [gradient] = ctx.saved_tensors
        return by_loss * gradient, None, None
