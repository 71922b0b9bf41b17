"""A centre and its members, each given by a seed, from which a worker computes adapters.

    centre folder:  rookery_centre.json   {"format": 1, "rank": 1,
                                           "layers": [["model.layers.0.self_attn.q_proj", its name
                                                       in the noise, rank, in, out, scale,
                                                       "bfloat16", "bfloat16"], ...]}
                    rookery_centre.bin    A and B of each layer in float32, one after the other
    a member:       {"centre": "/dev/shm/.../e003@1f2c.centre", "seed": 4711, "amount": -0.01},
                    as text in the place of an adapter's path

A member is centre + amount * noise(seed) in float32, rounded to the dtypes of the adapter. Then B
is multiplied by the scale, as in a PEFT folder of the same adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

__all__ = [
    "CENTRE",
    "CENTRE_FORMAT",
    "NUMBERS",
    "Centre",
    "LayerNoise",
    "PopulationMember",
    "draws",
    "perturbed",
    "read_member",
]


if TYPE_CHECKING:
    import torch


# Normal numbers named by a seed and a layer, with equal bits on every device and in any batch.
#
#     noise = LayerNoise([("model.layers.0.self_attn.q_proj", 8, 576, 576), ...], rank=1)
#     drawn = noise.draw([7, 8, 9], device)                # [3, numbers]: a line for each seed
#     for a, b in noise.factors(drawn): ...                # [3, 8, 576] and [3, 576, 8] per layer
#
# A number is an entry of a table of normal quantiles, at an index that an integer hash of (seed,
# layer, place) gives. Integers and a table are the same on CPU and GPU, whereas logarithms and
# cosines differ in their last bits. A worker fills its slots with these numbers, and the trainer's
# side sums the same ones for its update.
#
# The noise of a factor has `rank` r: the sum of r outer products of normal vectors, over sqrt(r). A
# factor with at most r rows or columns has an independent normal number in every place.


_QUANTILES = 2**16
_GRID = 2.0**16
"""Quantiles are multiples of its inverse, so that every mathematical library rounds them alike."""
_AT_ONCE = 2**24
"""Numbers drawn together: 64 MiB, and twice that for intermediate results."""


class LayerNoise:
    """Noise for adapters of one layout. `layers` has (name, rank, in, out) per layer."""

    def __init__(self, layers: Sequence[tuple[str, int, int, int]], *, rank: int) -> None:
        self.layers, self.rank = tuple(layers), rank
        self._sizes = [
            (self._size(lora_rank, num_in), self._size(num_out, lora_rank))
            for _, lora_rank, num_in, num_out in self.layers
        ]
        """Per layer, how many numbers A and B are made from."""
        self._halves = [(a + b + 1) // 2 for a, b in self._sizes]
        """Hashes per layer: each gives two numbers."""
        self._keys = [_layer_key(name) for name, *_ in self.layers]
        self._places: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def is_one_each(self) -> bool:
        """True if a seed draws one number for every place of every factor, in order."""
        return all(
            self._is_full(rank, num_in)
            and self._is_full(num_out, rank)
            and rank * (num_in + num_out) % 2 == 0  # a hash gives two
            for _, rank, num_in, num_out in self.layers
        )

    @property
    def num_numbers(self) -> int:
        """Numbers that one seed draws."""
        return 2 * sum(self._halves)

    def draw(self, seeds: Sequence[int], device: Any) -> torch.Tensor:
        """Draw a line of normal float32 numbers for each seed."""
        import torch

        keys, layer, place = self._on(device)
        words = torch.tensor([[_signed(s), _signed(s >> 32)] for s in seeds], dtype=torch.int32)
        low, high = words.to(device).T.unsqueeze(2)
        first = _mixed(_mixed(keys[0] ^ low) + high)  # a key of 64 bits for each seed and layer
        second = _mixed(_mixed(keys[1] ^ high) + low)
        hashed = _mixed(first.index_select(1, layer).bitwise_xor_(place))
        hashed = _mixed(hashed.add_(second.index_select(1, layer)))
        halves = torch.stack([hashed & 0xFFFF, (hashed >> 16) & 0xFFFF], dim=2)
        numbers = _quantiles(device).index_select(0, halves.view(-1))
        return numbers.view(len(seeds), self.num_numbers)

    def factors(self, drawn: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the noise of A and B per layer, for each line of `draw`."""
        for part_a, part_b, (_, rank, num_in, num_out) in self._parts(drawn):
            yield self._factor(part_a, rank, num_in), self._factor(part_b, num_out, rank)

    def summed(self, drawn: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """Return their sum with these amounts as one line: A and B of each layer, one after the
        other."""
        import torch

        if self.is_one_each:
            return amounts @ drawn
        pieces = []
        for part_a, part_b, (_, rank, num_in, num_out) in self._parts(drawn):
            pieces.append(self._sum(part_a, amounts, rank, num_in).flatten())
            pieces.append(self._sum(part_b, amounts, num_out, rank).flatten())
        return torch.cat(pieces)

    def _size(self, rows: int, columns: int) -> int:
        if self._is_full(rows, columns):
            return rows * columns
        return self.rank * (rows + columns)

    def _is_full(self, rows: int, columns: int) -> bool:
        return min(rows, columns) <= self.rank

    def _parts(self, drawn: torch.Tensor) -> Iterator[tuple[Any, Any, tuple[str, int, int, int]]]:
        begin = 0
        for (size_a, size_b), half, layer in zip(
            self._sizes, self._halves, self.layers, strict=True
        ):
            middle = begin + size_a
            yield drawn[:, begin:middle], drawn[:, middle : middle + size_b], layer
            begin += 2 * half

    def _factor(self, part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Multiply and add one after another, so that every device rounds alike."""
        if self._is_full(rows, columns):
            return part.reshape(len(part), rows, columns)
        left, right = self._sides(part, rows, columns)
        noise = left[:, 0, :, None] * right[:, 0, None, :]
        for i in range(1, self.rank):
            noise += left[:, i, :, None] * right[:, i, None, :]
        return noise if self.rank == 1 else noise.mul_(1 / sqrt(self.rank))

    def _sum(
        self, part: torch.Tensor, amounts: torch.Tensor, rows: int, columns: int
    ) -> torch.Tensor:
        if self._is_full(rows, columns):
            return (amounts @ part).view(rows, columns)
        left, right = self._sides(part, rows, columns)
        weighted = left * (amounts / sqrt(self.rank))[:, None, None]
        return weighted.reshape(-1, rows).T @ right.reshape(-1, columns)

    def _sides(
        self, part: torch.Tensor, rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = part[:, : self.rank * rows], part[:, self.rank * rows :]
        return left.reshape(-1, self.rank, rows), right.reshape(-1, self.rank, columns)

    def _on(self, device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the layers' keys, and per hash its layer and its place in the layer."""
        import torch

        if device not in self._places:
            halves = torch.tensor(self._halves)
            layer = torch.repeat_interleave(torch.arange(len(halves)), halves)
            begin = torch.repeat_interleave(halves.cumsum(0) - halves, halves)
            place = torch.arange(len(layer)) - begin
            keys = torch.tensor(self._keys, dtype=torch.int32).T.contiguous()
            as_int = (keys, layer.to(torch.int32), place.to(torch.int32))
            self._places[device] = tuple(t.to(device) for t in as_int)  # type: ignore[assignment]
        return self._places[device]


def draws(
    noise: LayerNoise, seeds: Sequence[int], amounts: Sequence[float], device: Any
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield slices of the seeds, their lines and amounts: up to `_AT_ONCE` numbers together."""
    import torch

    size = max(1, _AT_ONCE // noise.num_numbers)
    for first in range(0, len(seeds), size):
        part = slice(first, first + size)
        moved = torch.tensor(amounts[part], dtype=torch.float32).to(device)
        yield part, noise.draw(seeds[part], device), moved


def perturbed(
    centre: Sequence[tuple[torch.Tensor, torch.Tensor]],
    noise: LayerNoise,
    drawn: torch.Tensor,
    amounts: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield A and B per layer, centre + amount * noise for each line: float32, [lines, ...]."""
    moved = amounts[:, None, None]
    for (a, b), (noise_a, noise_b) in zip(centre, noise.factors(drawn), strict=True):
        # A product, then a sum: one fused kernel would round once on a GPU, and twice elsewhere.
        yield (noise_a * moved).add_(a), (noise_b * moved).add_(b)


def _layer_key(name: str) -> tuple[int, int]:
    digest = blake2b(name.encode(), digest_size=8, person=b"rookery-noise").digest()
    number = int.from_bytes(digest, "little")
    return _signed(number), _signed(number >> 32)


def _signed(number: int) -> int:
    """Return the low 32 bits as a value of torch's int32."""
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply a bijection of 32 bits in which every output bit depends on every input bit. int32
    multiplies modulo 2^32; the masks remove the sign bits that its shifts bring in."""
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


@cache
def _quantiles(device: Any) -> torch.Tensor:
    """Return the normal quantiles at the middles of 2^16 equal parts; exactly symmetric."""
    import torch

    normal = NormalDist()
    middles = ((i + 0.5) / _QUANTILES for i in range(_QUANTILES // 2))
    lower = torch.tensor([round(normal.inv_cdf(p) * _GRID) / _GRID for p in middles])
    return torch.cat([lower, -lower.flip(0)]).to(device)


if TYPE_CHECKING:
    import torch


CENTRE, NUMBERS = "rookery_centre.json", "rookery_centre.bin"
CENTRE_FORMAT = 1
_KEPT = 2
"""Centres kept on the device: members of the last step may be used while the next begins."""


class Centre:
    """Numbers from which all members of a step are computed."""

    def __init__(self, folder: Path, device: Any) -> None:
        import torch

        manifest = json.loads((folder / CENTRE).read_text(encoding="utf-8"))
        if manifest["format"] != CENTRE_FORMAT:
            raise ValueError(
                f"centre format {manifest['format']}, this worker reads {CENTRE_FORMAT}"
            )
        self.layers: list[list[Any]] = manifest["layers"]
        self.layout = json.dumps(self.layers)
        named = [(name, *sizes) for _, name, *sizes, _, _, _ in self.layers]
        self.noise = LayerNoise(named, rank=manifest["rank"])
        self._sizes = [n for _, rank, n_in, n_out in named for n in (rank * n_in, n_out * rank)]
        ends = list(accumulate(self._sizes, initial=0))
        self.begins = list(zip(ends[::2], ends[1::2], strict=False))
        """Per layer, where A and B begin in a line of numbers."""
        numbers = torch.from_file(str(folder / NUMBERS), size=ends[-1], dtype=torch.float32)
        self._numbers = numbers.to(device, copy=True)
        kinds = {
            getattr(torch, kind) for *_, kind_a, kind_b in self.layers for kind in (kind_a, kind_b)
        }
        self._kind = kinds.pop() if len(kinds) == 1 and self.noise.is_one_each else None
        """Dtype of all factors, if members can be computed in one piece."""
        scales = [s for *_, scale, _, _ in self.layers for s in (1.0, scale)]
        self._scales = torch.repeat_interleave(torch.tensor(scales), torch.tensor(self._sizes)).to(
            device
        )
        self._device = device

    def members(
        self, seeds: Sequence[int], amounts: Sequence[float], dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the members and a line of numbers for each: A and B of every layer, one
        after the other, in the servers' form."""
        for part, drawn, moved in draws(self.noise, seeds, amounts, self._device):
            if self._kind is None:
                lines = self._layer_by_layer(drawn, moved)
            else:  # rounds where `perturbed` does, in a few kernels for all layers
                lines = (drawn * moved[:, None]).add_(self._numbers).to(self._kind)
                lines = (lines * self._scales).to(self._kind)
            yield part, lines.to(dtype)

    def factors(self, line: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B per layer, as parts of a line."""
        import torch

        pieces = iter(torch.split(line, self._sizes))
        return [
            (next(pieces).view(rank, n_in), next(pieces).view(n_out, rank))
            for _, rank, n_in, n_out in self.noise.layers
        ]

    def _layer_by_layer(self, drawn: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        import torch

        made, pieces = perturbed(self.factors(self._numbers), self.noise, drawn, moved), []
        for (a, b), (*_, scale, kind_a, kind_b) in zip(made, self.layers, strict=True):
            rounded = a.to(getattr(torch, kind_a)), b.to(getattr(torch, kind_b)) * scale
            pieces += [factor.flatten(1) for factor in rounded]
        return torch.cat(pieces, dim=1)


@dataclass(frozen=True)
class PopulationMember:
    """One adapter of a population, computed only when needed."""

    centre: Centre
    layers: tuple[Any, ...]
    """Per layer vLLM's name, rank, in, out, and where A and B begin in a line."""
    seed: int
    amount: float


_centres: dict[tuple[str, str], Centre] = {}


def read_member(text: str, device: Any) -> tuple[Centre, int, float] | None:
    """Parse a member's centre, seed and amount; None if the text is a path."""
    if not text.startswith("{"):
        return None
    recipe = json.loads(text)
    key = recipe["centre"], str(device)
    centre = _centres.pop(key, None) or Centre(Path(recipe["centre"]), device)
    _centres[key] = centre
    while len(_centres) > _KEPT:
        del _centres[next(iter(_centres))]
    return centre, int(recipe["seed"]), float(recipe["amount"])
