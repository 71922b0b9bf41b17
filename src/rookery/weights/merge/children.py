"""Merges parents into children, for one child or for a whole generation.

    child = merge([poet, clerk], weights=[0.4, 0.6], method=TiesConfig(), rank=8, key=(seed, 0))

    children = merge_stack(population, crosses=crosses, method=LinearConfig())

In delta space a child is the best approximation of rank `rank` to the operator's result on delta W.
Linear and layerwise never build delta W: their cost per layer is O((in + out) * (n * rank)^2) for
few parents and O((in + out) * n * rank^2) for many. TIES and DARE build it, for a few children of
one layer at a time: O(in * out * n * rank), about a hundred times as much.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from rookery.errors import AdapterError
from rookery.seeding import Key, bulk_stream
from rookery.types import Adapter, LoraFactors
from rookery.weights.folder import make_adapter
from rookery.weights.merge.cross import Cross, Rows, delta_rows, each, factor_rows
from rookery.weights.merge.methods import BLENDS, WEIGHINGS, LinearConfig, MergeConfig, block_of
from rookery.weights.stack import LayerShape, Stack, empty_stack, normal, places, stack, unstack

__all__ = [
    "adapted_blocks",
    "block_names",
    "change_rank",
    "low_rank",
    "merge",
    "merge_by_block",
    "merge_stack",
    "truncate",
]


# Exact algebra on delta W = b @ a without building it: combine, compare, cut to a rank.
#
# All functions take leading batch dimensions: a [..., rank, in], b [..., out, rank]. A sum of
# adapters is one adapter with stacked factors, `b_1 @ a_1 + b_2 @ a_2 == [b_1 b_2] @ [a_1; a_2]`.
# Gram matrices in double precision reduce its rank at a cost of O((in + out) * rank^2), exact to
# float32 and faster than two QRs and an SVD.


_POWER_STEPS = 2
"""Power iterations of `low_rank`, which starts from the parents' span. For TIES of two trained
adapters, the error exceeds the minimum by at most 20 % with no iteration, 0.9 % with one and 0.1 %
with two. For DARE, whose spectrum is flat, it is 2 %, 0.8 % and 0.5 %."""
_OVERSAMPLING = 8
"""Extra directions in `low_rank` beyond the rank, so that the last ones converge too."""
_KRYLOV_STEPS = 4
"""Steps of `truncate_many`. For a sum of random adapters, whose spectrum is flat, the error exceeds
the minimum by 0.06 % after three steps, 0.015 % after four and 0.001 % after six. With a falling
spectrum, three steps reach float32 rounding."""
_ROUNDING = 1e-7
"""Singular values below this fraction of the largest are float32 rounding errors."""


def truncate(a: torch.Tensor, b: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of the best approximation of b @ a of the given rank, exact if it suffices.

    Each factor carries the square root of the singular values. Unused directions are zero: the
    shapes are always [..., rank, in] and [..., out, rank].
    """
    axes, lengths = _principal(_products(a))
    core, inverse = axes * lengths.unsqueeze(-2), axes * _reciprocal(lengths).unsqueeze(-2)
    # a = core @ q with orthonormal rows q, so that b @ a has the singular values of b @ core.
    turn, values = _principal(core.mT @ _products(b.mT) @ core)
    kept = min(rank, a.shape[-2])
    turn, root = turn[..., :kept], values[..., :kept].sqrt()
    new_a = ((inverse @ turn) * root.unsqueeze(-2)).mT.to(a.dtype) @ a
    new_b = b @ ((core @ turn) * _reciprocal(root).unsqueeze(-2)).to(b.dtype)
    return _padded(new_a, new_b, rank=rank)


def truncate_many(
    a: torch.Tensor, b: torch.Tensor, *, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `truncate`, for stacked factors of many adapters: the cost is linear in their number,
    where that of `truncate` is cubic.

    If `a` has many more rows than the rank, search the best approximation in the block Krylov space
    of b @ a that starts from fixed random combinations of the rows of a.
    """
    width = rank + _OVERSAMPLING
    num_rows = a.shape[-2]
    if num_rows < 2 * width * (_KRYLOV_STEPS + 1):
        return truncate(a, b, rank=rank)
    mixed = normal(bulk_stream("truncate", width, num_rows), (width, num_rows)).to(a.device) @ a
    blocks = [torch.linalg.qr(b @ (a @ mixed.mT)).Q]
    for _ in range(_KRYLOV_STEPS):
        blocks.append(torch.linalg.qr(b @ (a @ (a.mT @ (b.mT @ blocks[-1])))).Q)
    basis = torch.linalg.qr(torch.cat(blocks, dim=-1)).Q
    return truncate((basis.mT @ b) @ a, basis, rank=rank)


def truncate_dense(matrix: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `truncate`, for a dense [..., out, in] matrix.

    Used if the parents have more rows together than the matrix.
    """
    num_out, num_in = matrix.shape[-2:]
    if num_out > num_in:
        b, a = truncate_dense(matrix.mT, rank=rank)
        return a.mT, b.mT
    axes, lengths = _principal(_products(matrix))
    kept = min(rank, num_out)
    turn, root = axes[..., :kept], lengths[..., :kept].sqrt().unsqueeze(-2)
    a = (turn * _reciprocal(root)).mT.to(matrix.dtype) @ matrix
    b = (turn * root).to(matrix.dtype)
    return _padded(a, b, rank=rank)


def low_rank(
    matrix: torch.Tensor, *, rank: int, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nearly optimal factors of the given rank for a dense [..., out, in] matrix.

    Subspace iteration from `start` [..., m, in], rows that nearly span the result (the parents' a).
    Costs 2 * (_POWER_STEPS + 1) products with the matrix instead of a full SVD.
    """
    width = min(rank + _OVERSAMPLING, *matrix.shape[-2:])
    extra = max(0, width - start.shape[-2])
    # Rows of the matrix itself replace missing directions, without randomness.
    fill = matrix[..., :extra, :] if extra else start[..., :0, :]
    start = torch.cat([_without_zeros(start, matrix), fill], dim=-2)
    basis = _orthonormal(matrix @ start.mT)
    for _ in range(_POWER_STEPS):
        basis = _orthonormal(matrix @ _orthonormal(matrix.mT @ basis))
    return truncate(basis.mT @ matrix, basis, rank=rank)


def _without_zeros(start: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Replace zero rows, the padding of smaller ranks, by rows of the matrix."""
    rows = torch.arange(start.shape[-2], device=matrix.device) % matrix.shape[-2]
    is_zero = (start == 0).all(dim=-1, keepdim=True)
    return torch.where(is_zero, matrix[..., rows, :], start)


def _padded(a: torch.Tensor, b: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = rank - a.shape[-2]
    if missing <= 0:
        return a, b
    return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


def _products(rows: torch.Tensor) -> torch.Tensor:
    """Return the Gram matrix [..., k, k] of rows [..., k, n], in double precision."""
    rows = rows.double()
    return rows @ rows.mT


def _principal(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From a Gram matrix, return the left singular vectors as columns [..., k, k] and the singular
    values [..., k], descending, with rounding errors set to 0."""
    squares, axes = _eigh(products)
    lengths = squares.flip(-1).clamp(min=0).sqrt()
    return axes.flip(-1), torch.where(lengths > _ROUNDING * lengths[..., :1], lengths, 0.0)


def _eigh(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not products.is_cuda:
        values, vectors = torch.linalg.eigh(products)
        return values, vectors
    # For matrices this small, a GPU takes longer to launch than a core to compute.
    values, vectors = torch.linalg.eigh(products.cpu())
    return values.to(products.device), vectors.to(products.device)


def _reciprocal(lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(lengths > 0, 1 / lengths, 0.0)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns [..., n, k] with the same span; unneeded columns are 0."""
    axes, lengths = _principal(_products(columns.mT))
    return columns @ (axes * _reciprocal(lengths).unsqueeze(-2)).to(columns.dtype)


_FEW_PARENTS = 8
"""Up to this many parents are truncated exactly, for any rank and layer."""
_BATCH_NUMBERS = 1 << 22
"""Numbers per parent truncated in one batch: 16 MB, and twice that as doubles."""
_PATCH_NUMBERS = 1 << 24
"""Limit on the numbers of delta W for children of one layer in one patch: 64 MB."""
_DENSE_NUMBERS = 1 << 28
"""Limit on the numbers of delta W in work: 1 GB, and twice that for their parents."""
_GPU_NUMBERS = 1 << 26
"""Limit like `_DENSE_NUMBERS` on a GPU, where servers use most of the memory."""


def merge(
    parents: Sequence[Adapter],
    *,
    weights: Sequence[float],
    method: MergeConfig,
    rank: int | None = None,
    key: Key = (),
    device: torch.device | str = "cpu",
) -> Adapter:
    """Merge into one adapter named "child". Parents may differ in rank, layers, scale and dtype.

    `rank` defaults to the parents' largest. On a given `device`, equal keys give equal bits.
    """
    cross = Cross(parents=tuple(range(len(parents))), weights=tuple(weights), key=key)
    population = stack(parents).to(device)
    children = merge_stack(population, crosses=[cross], method=method, rank=rank)
    return unstack(children.to("cpu"), names=["child"])[0]


def merge_stack(
    population: Stack,
    *,
    crosses: Sequence[Cross],
    method: MergeConfig,
    rank: int | None = None,
    out: Stack | None = None,
) -> Stack:
    """Make one row per cross, in the population's layout at `rank`. `out` is memory to reuse."""
    wanted = population.layout.rank if rank is None else rank
    if wanted < 1:
        raise AdapterError(f"rank is {rank}; give 1 or more, or leave it out.")
    for cross in crosses:
        if not all(0 <= parent < len(population.ranks) for parent in cross.parents):
            raise AdapterError(
                f"The cross names the parents {list(cross.parents)}; "
                f"the population has the rows 0 to {len(population.ranks) - 1}."
            )
    made_rank = wanted if method.space == "delta" else population.layout.rank
    layout = replace(population.layout, rank=made_rank)
    children = out or empty_stack(layout, num_rows=len(crosses), device=population.data.device)
    if children.layout != layout or len(children.ranks) != len(crosses):
        raise AdapterError("`out` has another layout or number of rows than the children to make.")
    is_weighing = method.type in WEIGHINGS
    if method.space == "factor":
        (_weigh_factors if is_weighing else _blend_factors)(population, crosses, method, children)
        return children if wanted == made_rank else change_rank(children, rank=wanted)
    (_weigh_deltas if is_weighing else _blend_deltas)(population, crosses, method, children)
    return children


def change_rank(population: Stack, *, rank: int) -> Stack:
    """Return the rows at another rank: exact if it grows, else the best approximation."""
    changed = empty_stack(
        replace(population.layout, rank=rank),
        num_rows=population.data.shape[0],
        device=population.data.device,
    )
    for layer in population.layout.layers:
        a, b = truncate(population.a(layer.name), population.b(layer.name), rank=rank)
        changed.a(layer.name).copy_(a)
        changed.b(layer.name).copy_(b)
    return changed


def _weigh_deltas(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, children: Stack
) -> None:
    by_num_parents: dict[int, list[int]] = defaultdict(list)
    for child, cross in enumerate(crosses):
        by_num_parents[len(cross.parents)].append(child)
    for made in by_num_parents.values():
        chosen = [crosses[child] for child in made]
        cut = truncate if len(chosen[0].parents) <= _FEW_PARENTS else truncate_many
        num_rows = len(made) * population.layout.rank
        for layers in _same_shape_batches(population.layout.layers, num_rows=num_rows):
            parts = [_combined(population, chosen, method, name) for name in layers]
            a, b = map(torch.stack, zip(*parts, strict=True))
            new_a, new_b = cut(a, b, rank=children.layout.rank)
            for name, child_a, child_b in zip(layers, new_a, new_b, strict=True):
                children.a(name)[made] = child_a
                children.b(name)[made] = child_b


def _is_crowded(layer: LayerShape, *, num_parents: int, rank: int) -> bool:
    """Return whether the parents' stacked factors have more rows than delta W itself."""
    return num_parents > _FEW_PARENTS and num_parents * rank > min(layer.num_in, layer.num_out)


def _same_shape_batches(layers: Sequence[LayerShape], *, num_rows: int) -> Iterator[list[str]]:
    """Yield batches of layer names of one shape, since a call costs more than a small layer. A
    layer has `num_rows` numbers per input and output."""
    by_shape: dict[tuple[int, int], list[str]] = defaultdict(list)
    for layer in layers:
        by_shape[layer.num_in, layer.num_out].append(layer.name)
    for (num_in, num_out), names in by_shape.items():
        numbers = num_rows * (num_in + num_out)
        size = max(1, _BATCH_NUMBERS // numbers)
        yield from (names[first : first + size] for first in range(0, len(names), size))


def _combined(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the factors of C children with n parents: [C, n * rank, in], [C, out, n * rank]."""
    index_C_n = torch.tensor([cross.parents for cross in crosses])
    a, b = population.a(layer)[index_C_n], population.b(layer)[index_C_n]
    weigh = WEIGHINGS[method.type]
    coefficients = [weigh(method, cross=cross, layer=layer) for cross in crosses]
    weighted = b * torch.tensor(coefficients, device=b.device)[:, :, None, None]
    return a.flatten(1, 2), weighted.transpose(1, 2).flatten(2)


class _Patch(NamedTuple):
    """A few children of one layer, and their parents."""

    layer: LayerShape
    first: int
    crosses: Sequence[Cross]
    parents: list[int]
    """Rows of the population that the crosses name."""
    rows: Rows
    """Dense deltas of `parents`."""


class _Dense(NamedTuple):
    """One layer of one child, before truncation to its rank."""

    layer: str
    child: int
    matrix: torch.Tensor
    start: torch.Tensor | None
    """The parents' a, which nearly span the result; None if the parents are too many to help."""


def _blend_deltas(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, children: Stack
) -> None:
    """On the CPU, alternate between blends with one thread each and products with all threads. On a
    GPU, where launches cost more than arithmetic, truncate matrices of one shape together."""
    is_on_gpu = computes_on_gpu(population)
    for patches in _patches(population, crosses):
        blended = each(partial(_blend_patch, method), patches, num_threads=1 if is_on_gpu else None)
        dense = [
            one
            for patch, matrices in zip(patches, blended, strict=True)
            for one in _unpacked(population, patch, matrices)
        ]
        for group in _of_one_shape(dense) if is_on_gpu else [[one] for one in dense]:
            _truncate_into(group, children)


def computes_on_gpu(population: Stack) -> bool:
    return population.data.is_cuda


def _patches(population: Stack, crosses: Sequence[Cross]) -> Iterator[list[_Patch]]:
    """Yield all children and layers in groups, limited by the number of threads and by memory.

    Layers are sorted by size: the thread of a smaller layer would wait for the others.
    """
    patches: list[_Patch] = []
    for layer in sorted(population.layout.layers, key=lambda shape: shape.num_out * shape.num_in):
        size = layer.num_out * layer.num_in
        num_together = max(1, _PATCH_NUMBERS // size)
        for first in range(0, len(crosses), num_together):
            group = crosses[first : first + num_together]
            used = sorted({parent for cross in group for parent in cross.parents})
            rows = delta_rows(population, layer=layer.name, parents=used)
            patches.append(_Patch(layer, first, group, used, rows))
            if len(patches) >= _num_at_a_time(population, numbers=size * len(group)):
                yield patches
                patches = []
    if patches:
        yield patches


def _num_at_a_time(population: Stack, *, numbers: int) -> int:
    if computes_on_gpu(population):
        return _GPU_NUMBERS // numbers
    return min(torch.get_num_threads(), _DENSE_NUMBERS // numbers)


def _unpacked(population: Stack, patch: _Patch, matrices: torch.Tensor) -> Iterator[_Dense]:
    layer, rank = patch.layer.name, population.layout.rank
    for i, (cross, matrix) in enumerate(zip(patch.crosses, matrices, strict=True)):
        start = None
        if not _is_crowded(patch.layer, num_parents=len(cross.parents), rank=rank):
            start = population.a(layer)[list(cross.parents)].flatten(0, 1)
        yield _Dense(layer, patch.first + i, matrix, start)


def _of_one_shape(matrices: Sequence[_Dense]) -> list[list[_Dense]]:
    groups: dict[tuple[torch.Size, torch.Size | None], list[_Dense]] = defaultdict(list)
    for one in matrices:
        groups[one.matrix.shape, None if one.start is None else one.start.shape].append(one)
    return list(groups.values())


def _truncate_into(group: Sequence[_Dense], children: Stack) -> None:
    matrices = [one.matrix for one in group]
    starts = [one.start for one in group if one.start is not None]
    rank = children.layout.rank
    if not starts:
        factors = [truncate_dense(matrix, rank=rank) for matrix in matrices]
    elif len(group) == 1:
        factors = [low_rank(matrices[0], rank=rank, start=starts[0])]
    else:
        a, b = low_rank(torch.stack(matrices), rank=rank, start=torch.stack(starts))
        factors = list(zip(a, b, strict=True))
    for one, (child_a, child_b) in zip(group, factors, strict=True):
        children.a(one.layer)[one.child] = child_a
        children.b(one.layer)[one.child] = child_b


def _blend_patch(method: MergeConfig, patch: _Patch) -> torch.Tensor:
    """Return the operator's dense results [C, out, in] for one layer."""
    layer = patch.layer
    local = [
        replace(cross, parents=tuple(patch.parents.index(parent) for parent in cross.parents))
        for cross in patch.crosses
    ]
    device = patch.rows.data.device
    dense = torch.empty(len(local), layer.num_out * layer.num_in, device=device)
    BLENDS[method.type](method, rows=patch.rows, crosses=local, out=dense)
    return dense.view(-1, layer.num_out, layer.num_in)


def _blend_factors(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, children: Stack
) -> None:
    rows = factor_rows(population)
    BLENDS[method.type](method, rows=rows, crosses=crosses, out=children.data)


def _weigh_factors(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, children: Stack
) -> None:
    for child, cross in enumerate(crosses):
        for begin, end, coefficients in _stretches(population, cross, method):
            vectors = [population.data[parent, begin:end] for parent in cross.parents]
            _weighted_sum(vectors, coefficients, out=children.data[child, begin:end])


def _stretches(
    population: Stack, cross: Cross, method: MergeConfig
) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    """Yield (begin, end, coefficients) of neighbouring factors with equal coefficients."""
    weigh = WEIGHINGS[method.type]
    begin, current = 0, None
    all_places = places(population.layout)
    for place in all_places[:1] if method.type == "linear" else all_places:
        coefficients = weigh(method, cross=cross, layer=place.layer)
        if current is not None and coefficients != current:
            yield begin, place.start, current
            begin = place.start
        current = coefficients
    if current is not None:
        yield begin, population.data.shape[1], current


def _weighted_sum(
    vectors: Sequence[torch.Tensor], coefficients: Sequence[float], *, out: torch.Tensor
) -> None:
    """Sum the vectors; the common case, two coefficients of sum 1, takes only one pass."""
    if len(vectors) == 2 and abs(sum(coefficients) - 1) < 1e-12:
        # A tensor as the weight selects the faster kernel.
        weight = torch.tensor(coefficients[1], device=out.device)
        torch.lerp(vectors[0], vectors[1], weight, out=out)
        return
    torch.mul(vectors[0], coefficients[0], out=out)
    for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
        out.add_(vector, alpha=coefficient)


_SUM = LinearConfig(normalise=False)


def block_names(parents: Sequence[Adapter]) -> tuple[str, ...]:
    """Return the blocks that any parent adapts, in the order of the model."""
    names = {block_of(layer) for parent in parents for layer in parent.factors}
    return tuple(sorted(names, key=_in_order))


def adapted_blocks(parents: Sequence[Adapter]) -> tuple[bool, ...]:
    """Return, for every block and parent, whether the parent changes the block. The order is that
    of the weights of `merge_by_block`."""
    blocks = [
        {block_of(layer) for layer, lora in parent.factors.items() if lora.a.any() and lora.b.any()}
        for parent in parents
    ]
    return tuple(name in adapted for name in block_names(parents) for adapted in blocks)


def merge_by_block(
    parents: Sequence[Adapter],
    *,
    weights: Sequence[float],
    rank: int,
    device: torch.device | str = "cpu",
) -> Adapter:
    """Return the weighted sum, named "child". `weights` has one weight per parent for the first
    block of `block_names`, then for the second, and so on."""
    names, count = block_names(parents), len(parents)
    if len(weights) != len(names) * count:
        raise AdapterError(
            f"There are {len(weights)} weights for {count} adapters of {len(names)} blocks: give "
            f"{len(names) * count}."
        )
    factors: dict[str, LoraFactors] = {}
    for place, name in enumerate(names):
        block_weights = weights[place * count : (place + 1) * count]
        parts = [
            (_part(parent, name), weight)
            for parent, weight in zip(parents, block_weights, strict=True)
        ]
        parts = [(part, weight) for part, weight in parts if part.factors]
        child = merge(
            [part for part, _ in parts],
            weights=[weight for _, weight in parts],
            method=_SUM,
            rank=rank,
            device=device,
        )
        factors |= child.factors
    return make_adapter("child", base=parents[0].base, factors=factors)


def _part(parent: Adapter, block: str) -> Adapter:
    return replace(
        parent,
        factors={k: lora for k, lora in parent.factors.items() if block_of(k) == block},
    )


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort key that orders numbers by value: layer 9 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
