"""Adapted output layers on the CPU, on a stand-in for vLLM's table of adapters."""

from types import SimpleNamespace

import torch

from rookery.fleet.vllm_plugin.output_layer import install_output_layer


class Table:
    """Computes logits as vLLM's CPU code does: slot -1 is the last one."""

    def __init__(self, *slots: int) -> None:
        self.sampler_indices = torch.tensor(slots)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        chosen = self.sampler_indices
        hidden = torch.einsum("bi,bri->br", x, a[chosen]) * scale
        y += torch.einsum("br,bvr->bv", hidden, b[chosen])


def test_tokens_without_an_adapter_keep_their_logits() -> None:
    x, a, b = torch.randn(3, 4), torch.randn(2, 2, 4), torch.randn(2, 5, 2)
    stock, mended = torch.zeros(3, 5), torch.zeros(3, 5)
    table = Table(0, -1, 1)
    table.add_lora_logits(stock, x, a, b, 1.0)
    inner = SimpleNamespace(punica_wrapper_mapping={"language": table})
    assert install_output_layer(inner, torch.device("cpu"))
    table.add_lora_logits(mended, x, a, b, 1.0)
    assert torch.equal(mended[[0, 2]], stock[[0, 2]])
    assert stock[1].any() and not mended[1].any()


def test_gpu_kernels_skip_such_tokens_themselves() -> None:
    table = Table(0)
    inner = SimpleNamespace(punica_wrapper_mapping={"language": table})
    assert install_output_layer(inner, torch.device("cuda:0"))
    assert "add_lora_logits" not in vars(table)


def test_what_another_version_keeps_there_is_not_taken_for_mended() -> None:
    assert not install_output_layer(SimpleNamespace(), torch.device("cpu"))
    odd = SimpleNamespace(punica_wrapper_mapping={"language": SimpleNamespace()})
    assert not install_output_layer(odd, torch.device("cpu"))
