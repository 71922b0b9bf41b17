"""How close the operators on stacks come to the machine's copy bandwidth, beside two peers.

    python benchmarks/operators.py                    # 10 adapters of 41 MB, all cores
    python benchmarks/operators.py --blocks 7         # 10 adapters of 11 MB
    python benchmarks/operators.py --threads 1

Adapters of rank 8 for the linear layers of a 2-billion-parameter model, 364 tensors each. Every
child has two parents. Traffic counts only what every operator needs: two reads and one write of an
adapter per child. The second read of each parent by TIES, to find its limits, and the random
factors of DARE are not counted. Copy bandwidth, one read and one write, is measured in the same
rounds as the operators, and the best round of each counts. The peers merge the same parents tensor
by tensor: `loop` selects with torch.topk and masks with bernoulli, as published evolution code
does; `peft` calls peft.utils.merge_utils.

Run it alone on the machine: other load slows the copy and the operators unequally.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from peft.utils import merge_utils

from rookery.starters import DEMOS
from rookery.weights import read_adapter
from rookery.weights.merge import (
    Cross,
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    merge,
    merge_stack,
)
from rookery.weights.merge.children import low_rank
from rookery.weights.merge.compiled import Blend, Trim, load_compiled
from rookery.weights.merge.cross import factor_rows
from rookery.weights.stack import LayerShape, Layout, Stack, empty_stack, places

LINEARS = {
    "self_attn.q_proj": (2304, 2048),
    "self_attn.k_proj": (2304, 1024),
    "self_attn.v_proj": (2304, 1024),
    "self_attn.o_proj": (2048, 2304),
    "mlp.gate_proj": (2304, 9216),
    "mlp.up_proj": (2304, 9216),
    "mlp.down_proj": (9216, 2304),
}
SMALL_LINEARS = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
"""Linear layers of one of the 30 blocks of SmolLM2-135M."""
FOUNDERS = DEMOS / "founders"
DENSITY = 0.7
BARS = {"linear": 0.70, "ties": 0.25, "dare": 0.25}
"""Required share of copy bandwidth by operator."""
PEER_CHILDREN = 1
"""Children per peer, each of which takes up to two seconds."""

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    merges: dict[str, Merge]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    population = make_population(num_blocks=options.blocks, num_adapters=options.population)
    num_bytes = population.data[0].numel() * 4
    print(
        f"{options.population} adapters of {num_bytes / 1e6:.1f} MB, "
        f"{len(places(population.layout))} tensors each, {options.threads} threads, "
        f"best of {options.repeats} rounds"
    )
    out = empty_stack(population.layout, num_rows=options.population)
    seconds = best_of_each(jobs_of(population, out), repeats=options.repeats)
    bandwidth = 2 * population.data.numel() * 4 / seconds.pop("copy")
    print(f"copy bandwidth: {bandwidth / 1e9:.1f} GB/s, one read and one write")
    print(f"passes: {'torch' if load_compiled() is None else 'compiled'}\n")
    print(f"{'operator':<11}{'ms/child':>9}{'of copy':>9}{'bar':>7}", end="")
    print("".join(f"{peer.name + ' ms':>11}{'of copy':>9}" for peer in PEERS))
    for name, duration in seconds.items():
        report(name, population, duration / options.population, bandwidth)
    torch.set_num_threads(1)
    profile_ties(population, repeats=options.repeats)
    time_deltas()
    compare_with_svd()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=26, help="transformer blocks, 1.6 MB each")
    parser.add_argument("--population", type=int, default=10, help="adapters, and children made")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10, help="rounds")
    return parser.parse_args()


def make_population(
    *, num_blocks: int, num_adapters: int, linears: Mapping[str, tuple[int, int]] = LINEARS
) -> Stack:
    layers = [
        LayerShape(f"model.layers.{block}.{name}", *sizes)
        for block in range(num_blocks)
        for name, sizes in linears.items()
    ]
    layout = Layout(base="", layers=tuple(sorted(layers)), rank=8)
    population = empty_stack(layout, num_rows=num_adapters)
    population.data.normal_(generator=torch.Generator().manual_seed(0))
    return population


def jobs_of(population: Stack, out: Stack) -> dict[str, Callable[[], object]]:
    """Jobs: a copy of the whole population, and a generation of children per operator."""
    num = population.data.shape[0]
    crosses = [
        Cross(parents=(child, (child + 3) % num), weights=(0.4, 0.6), key=(0, child))
        for child in range(num)
    ]
    merges: dict[str, Callable[[], object]] = {
        method.type: partial(merge_stack, population, crosses=crosses, method=method, out=out)
        for method in METHODS
    }
    return {"copy": partial(out.data.copy_, population.data)} | merges


def time_peer(population: Stack, merge_pair: Merge) -> float:
    """Seconds per child of a loop over the tensors of two parents."""
    tensors = [population.data[:, place.start : place.stop] for place in places(population.layout)]

    def make() -> None:
        for child in range(PEER_CHILDREN):
            for pair in tensors:
                merge_pair([pair[child], pair[child + 3]])

    return best(make, repeats=2) / PEER_CHILDREN


def report(name: str, population: Stack, seconds: float, bandwidth: float) -> None:
    num_bytes = 3 * population.data[0].numel() * 4
    part = num_bytes / seconds / bandwidth
    bar = BARS.get(name)
    verdict = "" if bar is None else f"{bar:.0%}" + (" ok" if part >= bar else " --")
    print(f"{name:<11}{seconds * 1e3:>9.1f}{part:>9.1%}{verdict:>7}", end="")
    for peer in PEERS:
        if merge_pair := peer.merges.get(name):
            theirs = time_peer(population, merge_pair)
            print(f"{theirs * 1e3:>11.1f}{num_bytes / theirs / bandwidth:>9.1%}", end="")
    print(flush=True)


def profile_ties(population: Stack, *, repeats: int) -> None:
    """Print the time of each part of TIES on one thread, in nanoseconds per number of a child."""
    pieces, values = factor_rows(population).pieces, population.data.numpy()
    bounds = np.array([(piece.start, piece.stop) for piece in pieces], np.int64)
    counts = np.array([int(DENSITY * piece.sizes[0]) for piece in pieces], np.int64)
    target, engine = np.empty_like(values[0]), load_compiled()
    if engine is None:
        return
    print("\nTIES by stage, one thread, ns per number:")
    limits = [engine.limits(values[row], bounds=bounds, counts=counts) for row in (0, 1)]
    blend = Blend(
        rows=[values[0], values[1]],
        bounds=bounds,
        entries=Trim(limits),
        weights=np.array([0.4, 0.6], np.float32),
        out=target,
    )
    stages: dict[str, Callable[[], object]] = {
        "limits, once per parent": partial(engine.limits, values[0], bounds=bounds, counts=counts),
        "trim, elect and average": partial(engine.blend, blend),
    }
    for stage, function in stages.items():
        seconds = best(function, repeats=repeats)
        print(f"  {stage:<40}{seconds / target.size * 1e9:>6.2f}")


def time_deltas() -> None:
    """Print the time of one child in delta space for SmolLM2-135M on one thread."""
    parents = make_population(num_blocks=30, num_adapters=2, linears=SMALL_LINEARS)
    crosses = [Cross(parents=(0, 1), weights=(0.4, 0.6), key=(0,))]
    print("\nIn delta space, SmolLM2-135M at rank 8, one thread, s per child:")
    for method in (LinearConfig(), DareConfig(), DareTiesConfig(), TiesConfig()):
        make = partial(merge_stack, parents, crosses=crosses, method=method)
        print(f"  {method.type:<11}{best(make, repeats=2):>6.2f}", flush=True)


def compare_with_svd() -> None:
    """Compare children of two trained adapters with the nearest matrices of their rank."""
    parents = [read_adapter(folder) for folder in sorted(FOUNDERS.iterdir())[:2]]
    rank = parents[0].rank
    print(f"\nTwo of {FOUNDERS.name}, delta W cut to rank {rank}, beside a full SVD:")
    for method in (TiesConfig(), DareConfig()):
        whole = merge(parents, weights=(0.5, 0.5), method=method, rank=576, key=(0,))
        excess, own_s, svd_s = [], 0.0, 0.0
        for name, factors in whole.factors.items():
            dense = factors.b @ factors.a
            start = torch.cat([parent.factors[name].a for parent in parents])
            began = time.perf_counter()
            a, b = low_rank(dense, rank=rank, start=start)
            between = time.perf_counter()
            values = torch.linalg.svd(dense, full_matrices=False)[1]
            own_s, svd_s = own_s + between - began, svd_s + time.perf_counter() - between
            excess.append(float((dense - b @ a).norm() / values[rank:].norm()) - 1)
        print(
            f"  {method.type:<6}error above the least: {max(excess):.2%} at most, "
            f"{sum(excess) / len(excess):.2%} on average; {svd_s / own_s:.0f}x faster"
        )


def best(function: Callable[[], object], *, repeats: int) -> float:
    """Fastest of several runs in seconds, after one warm-up run."""
    return best_of_each({"": function}, repeats=repeats)[""]


def best_of_each(jobs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Fastest run of each job in seconds. Jobs take turns, so that other load affects all alike."""
    least = dict.fromkeys(jobs, float("inf"))
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds = time.perf_counter() - start
            if turn:
                least[name] = min(least[name], seconds)
    return least


def loop_linear(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    return (torch.stack(list(pair)) * torch.tensor([[0.4], [0.6]])).sum(0)


def loop_trim(tensor: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(tensor)
    mask[torch.topk(tensor.abs(), int(DENSITY * tensor.numel())).indices] = 1
    return tensor * mask


def loop_drop(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.bernoulli(torch.full_like(tensor, DENSITY)) / DENSITY


def loop_elect(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(pair))
    mask = stacked.sign() == torch.where(stacked.sum(0) >= 0, 1, -1)
    weighted = stacked * torch.tensor([[0.4], [0.6]]) * mask
    return weighted.sum(0) / mask.sum(0).clamp(min=1)


WEIGHTS = torch.tensor([0.4, 0.6])
PEERS = (
    Peer(
        name="loop",
        merges={
            "linear": loop_linear,
            "ties": lambda pair: loop_elect([loop_trim(tensor) for tensor in pair]),
            "dare": lambda pair: loop_linear([loop_drop(tensor) for tensor in pair]),
            "dare_ties": lambda pair: loop_elect([loop_drop(tensor) for tensor in pair]),
        },
    ),
    Peer(
        name="peft",
        merges={
            "linear": lambda pair: merge_utils.task_arithmetic(list(pair), WEIGHTS),
            "ties": lambda pair: merge_utils.ties(list(pair), WEIGHTS, DENSITY),
            "dare": lambda pair: merge_utils.dare_linear(list(pair), WEIGHTS, DENSITY),
            "dare_ties": lambda pair: merge_utils.dare_ties(list(pair), WEIGHTS, DENSITY),
        },
    ),
)
METHODS: tuple[MergeConfig, ...] = (
    LinearConfig(space="factor"),
    TiesConfig(space="factor", density=DENSITY),
    DareConfig(space="factor", density=DENSITY),
    DareTiesConfig(space="factor", density=DENSITY),
    LayerwiseConfig(space="factor", mode="mix"),
)

if __name__ == "__main__":
    main()
