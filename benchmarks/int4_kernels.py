"""Linear products of few rows on this CPU: float32, those of `weights: int4`, and others of torch.

    python benchmarks/int4_kernels.py                     # one thread
    python benchmarks/int4_kernels.py --threads 2

Microseconds for 1, 7 and 32 rows, the fastest of turns taken one by one, weights read from memory;
the error relative to float32 for normally distributed weights and inputs; and whether a row has the
same bits among 1 to 64 rows, without which a kernel is not used.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch

from rookery.errors import ModelError
from rookery.slots.linear import MakeProduct, PackedProduct, Product, int4_packing

__all__: list[str] = []

SHAPES = ((576, 3072), (576, 1536), (1536, 576), (2048, 2048))
ROWS = (1, 7, 32)
TURNS = 8
COLD_BYTES = 40e6
"""Bytes of float32 copies multiplied in turn: more than a cache holds."""


def int8_per_row(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """8-bit weights, float32 inputs."""
    assert bias is None
    scales = weight.abs().amax(1) / 127
    numbers = (weight / scales[:, None]).round().to(torch.int8)
    half = scales.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), numbers, half).float()


def int8_dynamic(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """8-bit weights and inputs; all input rows share one scale."""
    scales = (weight.abs().amax(1) / 127).double()
    zeros = torch.zeros(len(scales), dtype=torch.long)
    numbers = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(numbers, bias)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed)


def int4_reference(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Operator that uses KleidiAI on Arm; elsewhere torch has a plain implementation."""
    from rookery.slots.linear import ArmInt4Product

    return ArmInt4Product(weight, bias)


def make_kernels() -> dict[str, MakeProduct]:
    kernels: dict[str, MakeProduct] = {"float32": PackedProduct}
    try:
        packing = int4_packing()
    except ModelError as error:
        print(error)
    else:
        kernels["int4, layers"] = packing.layers
        if packing.head is not packing.layers:
            kernels["int4, head"] = packing.head
    kernels["int8 weights"] = int8_per_row
    kernels["int8, one scale"] = int8_dynamic
    if platform.machine() != "aarch64":
        kernels["Arm's operator"] = int4_reference
    return kernels


def fastest(products: dict[str, list[Product]], x: torch.Tensor) -> dict[str, float]:
    """Seconds of the fastest product of each kind."""
    best = dict.fromkeys(products, float("inf"))
    for _ in range(TURNS):
        for name, copies in products.items():
            for product in copies if best[name] > 0.005 else copies * 2:
                start = time.perf_counter()
                product(x)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def keeps_bits(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    together = product(rows)
    counts = range(1, len(rows) + 1)
    return all(torch.equal(product(rows[:n].contiguous()), together[:n]) for n in counts)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads")
    random = torch.Generator().manual_seed(0)
    for num_in, num_out in SHAPES:
        weight = torch.randn(num_out, num_in, generator=random) * 0.05
        rows = torch.randn(64, num_in, generator=random)
        exact = rows @ weight.t()
        num_copies = max(2, int(COLD_BYTES / weight.nbytes))
        products = {
            name: [make(weight, None) for _ in range(num_copies if name != "Arm's operator" else 1)]
            for name, make in make_kernels().items()
        }
        times = [fastest(products, rows[:n].contiguous()) for n in ROWS]
        print(f"{num_in} x {num_out}: microseconds for {ROWS} rows, times as fast as float32")
        for name, copies in products.items():
            cells = "".join(
                f"{own[name] * 1e6:9.0f} ({own['float32'] / own[name]:4.2f})" for own in times
            )
            wrong = float((copies[0](rows) - exact).norm() / exact.norm())
            bits = "the same bits" if keeps_bits(copies[0], rows) else "OTHER BITS"
            print(f"  {name:16}{cells}   error {wrong:.4f}   {bits}", flush=True)


if __name__ == "__main__":
    main()
