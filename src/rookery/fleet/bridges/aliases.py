"""A server's own weights by the names of the model's folder: views, no copies.

| in the folder               | on the server          | view                                    |
|-----------------------------|------------------------|-----------------------------------------|
| q_proj, k_proj, v_proj      | qkv_proj               | rows, in this order                     |
| gate_proj, up_proj          | gate_up_proj           | rows, in this order                     |
| embed_tokens, lm_head       | the same, maybe padded | the first rows                          |
| the rest                    | the same               | whole                                   |
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rookery.errors import FleetError

if TYPE_CHECKING:
    import torch

__all__ = ["alias_weights", "fused_name"]

Shapes = Mapping[str, Sequence[int]]


def alias_weights(
    served: Mapping[str, "torch.Tensor"], packed: Mapping[str, Sequence[str]], shapes: Shapes
) -> dict[str, "torch.Tensor"]:
    """A view for each name in `shapes`. FleetError names a weight that has none, and one of the
    server that no view covers: it would stay as it is."""
    found = {name: _view(name, served, packed, shapes) for name in shapes}
    covered = {view.untyped_storage().data_ptr() + _begin(view) for view in found.values()}
    for name, tensor in served.items():
        if tensor.untyped_storage().data_ptr() + _begin(tensor) not in covered:
            raise FleetError(
                f"The server's weight {name} {tuple(tensor.shape)} is none of the model's folder: "
                "write bridge: copy."
            )
    return found


def fused_name(name: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, Sequence[str]] | None:
    """The server's name of the layer that this weight is a part of, with all its parts; None when
    it is a layer of its own."""
    module, _, kind = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    for fused, parts in packed.items():
        if leaf in parts and fused != leaf:
            return f"{parent}.{fused}.{kind}", [f"{parent}.{part}.{kind}" for part in parts]
    return None


def _view(
    name: str,
    served: Mapping[str, "torch.Tensor"],
    packed: Mapping[str, Sequence[str]],
    shapes: Shapes,
) -> "torch.Tensor":
    shape = tuple(shapes[name])
    if name in served:
        whole = served[name][: shape[0]] if shape else served[name]
        return _checked(name, whole, shape)
    fused = fused_name(name, packed)
    if fused is None or fused[0] not in served:
        raise FleetError(
            f"The server has no weight that is {name} {shape} of the model's folder: write "
            "bridge: copy."
        )
    server_name, parts = fused
    rows = {part: shapes[part][0] for part in parts if part in shapes}
    if sum(rows.values()) != served[server_name].shape[0]:
        raise FleetError(
            f"The server's weight {server_name} has {served[server_name].shape[0]} rows, and "
            f"{', '.join(rows)} have {sum(rows.values())}: write bridge: copy."
        )
    begin = sum(rows[part] for part in parts[: list(parts).index(name)])
    return _checked(name, served[server_name][begin : begin + shape[0]], shape)


def _checked(name: str, view: "torch.Tensor", shape: tuple[int, ...]) -> "torch.Tensor":
    if tuple(view.shape) != shape:
        raise FleetError(
            f"{name} is {shape} in the model's folder and {tuple(view.shape)} on the server: write "
            "bridge: copy."
        )
    return view


def _begin(tensor: "torch.Tensor") -> int:
    return int(tensor.storage_offset()) * tensor.itemsize
