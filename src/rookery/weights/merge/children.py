"""Children from parents: the same operators for a pair of adapters and for a whole generation.

    child = merge([poet, clerk], weights=[0.4, 0.6], method=TiesConfig(), rank=8, key=(seed, 0))

    children = merge_stack(population, crosses=crosses, method=LinearConfig())

In delta space a child is the best approximation of rank `rank` to what the operator makes of
delta W. Linear and layerwise never build delta W: their cost per layer is
O((in + out) * (n * rank)^2) for a few parents and O((in + out) * n * rank^2) for many. TIES and
DARE build it, a few children of one layer at a time: O(in * out * n * rank), about a hundred times
as much.
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
# The
# products of its rows with one another, in double precision, bring it back to a rank at a cost of
# O((in + out) * rank^2): exact to float32, and quicker than two QRs and an SVD.


_POWER_STEPS = 2
"""Power iterations of `low_rank`. The start spans the parents. For what TIES makes of two trained
adapters the error is above the least by 20 % without a step, by 0.9 % after one and 0.1 % after two
at most; for DARE, whose spectrum is flat, by 2 %, 0.8 % and 0.5 %."""
_OVERSAMPLING = 8
"""Directions beyond the rank that `low_rank` follows, so that the last ones converge too."""
_KRYLOV_STEPS = 4
"""Steps of `truncate_many`. For a sum of random adapters, whose spectrum is flat, the error is
above the least by 0.06 % after three, 0.015 % after four and 0.001 % after six; where the spectrum
falls, three reach the rounding of float32."""
_NOTHING = 1e-7
"""Singular values below this part of the largest are rounding in float32."""


def truncate(a: torch.Tensor, b: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation of b @ a of the given rank, exact where the rank suffices.

    Each factor carries the square root of the singular values. Directions that are not needed
    are zero, so the shapes are always [..., rank, in] and [..., out, rank].
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
    that of `truncate` grows with its cube.

    Where `a` has many more rows than the rank, the best approximation is searched in the block
    Krylov space of b @ a from fixed random combinations of the rows of a.
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
    """The best approximation of the given rank of a dense [..., out, in] matrix, as `truncate`'s.

    For what is blended of so many adapters that their rows span more than the matrix has.
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
    """Factors of the given rank close to the best for a dense [..., out, in] matrix.

    Subspace iteration from `start` [..., m, in], rows that nearly span the answer (the parents'
    a). Costs 2 * (_POWER_STEPS + 1) products with the matrix instead of a full SVD.
    """
    width = min(rank + _OVERSAMPLING, *matrix.shape[-2:])
    extra = max(0, width - start.shape[-2])
    # Rows of the matrix itself stand in for missing directions: no randomness is needed.
    fill = matrix[..., :extra, :] if extra else start[..., :0, :]
    start = torch.cat([_without_zeros(start, matrix), fill], dim=-2)
    basis = _orthonormal(matrix @ start.mT)
    for _ in range(_POWER_STEPS):
        basis = _orthonormal(matrix @ _orthonormal(matrix.mT @ basis))
    return truncate(basis.mT @ matrix, basis, rank=rank)


def _without_zeros(start: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Zeros that fill a smaller rank span nothing: rows of the matrix take their place."""
    rows = torch.arange(start.shape[-2], device=matrix.device) % matrix.shape[-2]
    is_zero = (start == 0).all(dim=-1, keepdim=True)
    return torch.where(is_zero, matrix[..., rows, :], start)


def _padded(a: torch.Tensor, b: torch.Tensor, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = rank - a.shape[-2]
    if missing <= 0:
        return a, b
    return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


def _products(rows: torch.Tensor) -> torch.Tensor:
    """[..., k, k] of [..., k, n] rows with one another, in double precision."""
    rows = rows.double()
    return rows @ rows.mT


def _principal(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The left singular vectors of rows with these products as columns [..., k, k], and the
    singular values [..., k], descending; what is rounding is 0."""
    squares, axes = _eigh(products)
    lengths = squares.flip(-1).clamp(min=0).sqrt()
    return axes.flip(-1), torch.where(lengths > _NOTHING * lengths[..., :1], lengths, 0.0)


def _eigh(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not products.is_cuda:
        values, vectors = torch.linalg.eigh(products)
        return values, vectors
    # A GPU takes longer to begin on matrices this small than a core to finish them.
    values, vectors = torch.linalg.eigh(products.cpu())
    return values.to(products.device), vectors.to(products.device)


def _reciprocal(lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(lengths > 0, 1 / lengths, 0.0)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """[..., n, k] of the same span; columns that it does not need are 0."""
    axes, lengths = _principal(_products(columns.mT))
    return columns @ (axes * _reciprocal(lengths).unsqueeze(-2)).to(columns.dtype)


_FEW_PARENTS = 8
"""So many parents or fewer are cut exactly, whatever their ranks and the layer."""
_BATCH_NUMBERS = 1 << 22
"""Factors that are brought back to a rank together: 16 MB of each parent, and twice as doubles."""
_PATCH_NUMBERS = 1 << 24
"""Children of one layer are blended together up to this many numbers of delta W: 64 MB."""
_DENSE_NUMBERS = 1 << 28
"""Numbers of delta W that are blended at a time: 1 GB, and twice that for their parents."""
_GPU_NUMBERS = 1 << 26
"""The same on a GPU, where servers have most of the memory."""


def merge(
    parents: Sequence[Adapter],
    *,
    weights: Sequence[float],
    method: MergeConfig,
    rank: int | None = None,
    key: Key = (),
    device: torch.device | str = "cpu",
) -> Adapter:
    """One child named "child". The parents may differ in rank, layers, scale and dtype.

    `rank` defaults to the largest of the parents. It is made on `device`, and the same key gives
    the same bits there.
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
    """A row per cross, of the population's layout at `rank`. `out` is memory to use again."""
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
    """The same rows at another rank: exact when it grows, the best approximation when not."""
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
        for layers in _alike(population.layout.layers, num_rows=num_rows):
            parts = [_combined(population, chosen, method, name) for name in layers]
            a, b = map(torch.stack, zip(*parts, strict=True))
            new_a, new_b = cut(a, b, rank=children.layout.rank)
            for name, own_a, own_b in zip(layers, new_a, new_b, strict=True):
                children.a(name)[made] = own_a
                children.b(name)[made] = own_b


def _is_crowded(layer: LayerShape, *, num_parents: int, rank: int) -> bool:
    """Whether the parents' stacked factors have more rows than delta W itself."""
    return num_parents > _FEW_PARENTS and num_parents * rank > min(layer.num_in, layer.num_out)


def _alike(layers: Sequence[LayerShape], *, num_rows: int) -> Iterator[list[str]]:
    """Layers of one shape, by name: as many together as fit a batch. A call costs more than a small
    layer's numbers, `num_rows` for each input and output."""
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
    """Stacked factors [C, n * rank, in] and [C, out, n * rank] of children with n parents each."""
    index_C_n = torch.tensor([cross.parents for cross in crosses])
    a, b = population.a(layer)[index_C_n], population.b(layer)[index_C_n]
    weigh = WEIGHINGS[method.type]
    coefficients = [weigh(method, cross=cross, layer=layer) for cross in crosses]
    weighted = b * torch.tensor(coefficients, device=b.device)[:, :, None, None]
    return a.flatten(1, 2), weighted.transpose(1, 2).flatten(2)


class _Patch(NamedTuple):
    """A few children of one layer, and the parents they are made of."""

    layer: LayerShape
    first: int
    crosses: Sequence[Cross]
    parents: list[int]
    """Those that the crosses name."""
    rows: Rows
    """Their dense deltas."""


class _Dense(NamedTuple):
    """One layer of one child, before it is cut to its rank."""

    layer: str
    child: int
    matrix: torch.Tensor
    start: torch.Tensor | None
    """The parents' a, which nearly span what is kept; None where they are too many to help."""


def _blend_deltas(
    population: Stack, crosses: Sequence[Cross], method: MergeConfig, children: Stack
) -> None:
    """On the CPU blends have a thread each and products have all of them: by turns, never both. On
    a GPU, where a wait takes longer than the numbers, matrices of one shape are cut together."""
    is_on_gpu = computes_on_gpu(population)
    for patches in _patches(population, crosses):
        blended = each(partial(_blend_patch, method), patches, num_threads=1 if is_on_gpu else None)
        dense = [
            one
            for patch, matrices in zip(patches, blended, strict=True)
            for one in _unpacked(population, patch, matrices)
        ]
        for group in _of_one_shape(dense) if is_on_gpu else [[one] for one in dense]:
            _cut(group, children)


def computes_on_gpu(population: Stack) -> bool:
    return population.data.is_cuda


def _patches(population: Stack, crosses: Sequence[Cross]) -> Iterator[list[_Patch]]:
    """All children and layers, as many at a time as there are threads and the memory allows.

    Layers of one size come together: the threads of a smaller one would wait for the others.
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


def _cut(group: Sequence[_Dense], children: Stack) -> None:
    """Fill the children's factors."""
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
    for one, (own_a, own_b) in zip(group, factors, strict=True):
        children.a(one.layer)[one.child] = own_a
        children.b(one.layer)[one.child] = own_b


def _blend_patch(method: MergeConfig, patch: _Patch) -> torch.Tensor:
    """The dense matrices [C, out, in] that the operator makes of one layer."""
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
    """(begin, end, coefficients) of neighbouring factors that share them; for linear, one."""
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
    """One pass for two parents whose coefficients sum to 1, the common case; else one each."""
    if len(vectors) == 2 and abs(sum(coefficients) - 1) < 1e-12:
        # A weight in a tensor takes the quicker kernel.
        weight = torch.tensor(coefficients[1], device=out.device)
        torch.lerp(vectors[0], vectors[1], weight, out=out)
        return
    torch.mul(vectors[0], coefficients[0], out=out)
    for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
        out.add_(vector, alpha=coefficient)


_SUM = LinearConfig(normalise=False)


def block_names(parents: Sequence[Adapter]) -> tuple[str, ...]:
    """The blocks that any of them adapts, in the order of the model."""
    names = {block_of(layer) for parent in parents for layer in parent.factors}
    return tuple(sorted(names, key=_in_order))


def adapted_blocks(parents: Sequence[Adapter]) -> tuple[bool, ...]:
    """Of every block whether each of them changes it, in the order of the weights of a merge."""
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
    """Their weighted sum, named "child". The first weights, one each, are of the first block."""
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
    """What the adapter changes of one block."""
    return replace(
        parent,
        factors={k: lora for k, lora in parent.factors.items() if block_of(k) == block},
    )


def _in_order(name: str) -> list[tuple[int, str]]:
    """By number where there is one: layer 9 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
