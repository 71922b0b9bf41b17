"""Weights by vLLM's weight transfer, on a real server on the CPU. About two minutes.

NCCL needs a GPU on each side; `store_transfer.py` stands in for it on both. The routes, their
order, the names of weights and what vLLM does with them are the real ones.
"""

from pathlib import Path

import pytest
import torch
from tests.real.peers import needs_vllm, served_on_cpu
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rookery.embedded import resolve_model
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.bridges.reload import update_weights
from rookery.fleet.bridges.transfer import Meeting, open_transfer
from rookery.fleet.servers.launch import reserve_port
from rookery.types import SampleRequest, SamplingParams

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]


class StoreGroup:
    """This process's end of the group in `store_transfer.py`."""

    def __init__(self, meeting: Meeting) -> None:
        self._store = TCPStore(
            meeting.address, meeting.port, is_master=True, wait_for_workers=False
        )
        self._num = 0

    def broadcast(self, tensor: torch.Tensor) -> None:
        data = bytes(tensor.contiguous().view(torch.uint8).numpy())
        self._store.set(f"tensor {self._num}", data)  # type: ignore[arg-type]
        self._num += 1

    def close(self) -> None:
        del self._store


def make_model(folder: Path) -> LlamaForCausalLM:
    """With a head of its own: vLLM on the CPU keeps the old head of tied ones."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("smollm2").path).save_pretrained(folder)
    return model


async def test_a_server_gets_weights_that_it_has_no_file_of(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    extension = ("--worker-extension-cls", "store_transfer.WorkerExtension")
    launch = served_on_cpu(
        tmp_path / "model", max_loras=0, extension=False,
        args=("--weight-transfer-config", '{"backend": "nccl"}', *extension),
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    async with open_fleet(FleetConfig(launch=LaunchConfig(**launch))) as fleet:
        [replica] = fleet.pool.replicas
        port = reserve_port("127.0.0.1").port
        transfer = await open_transfer(replica, port=port, device="cpu", join=StoreGroup)
        versions = {fleet.base}
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
            gap = await update_weights(fleet, model, give_from=transfer.send_from)
            assert gap < 1e-3
            versions.add(fleet.base)
        assert len(versions) == 3
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        request = SampleRequest(model=fleet.base, prompt=(1, 2, 3), params=params)
        [[completion]] = await fleet.sample([request])
        with torch.inference_mode():
            expected = int(model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
        assert completion.tokens[0] == expected
        await transfer.close()
