"""Model families on a real vLLM on the CPU: one copy of the weights, or the reason and copies.

Yi and DeepSeek-Coder are Llama models by their configs. A server per family takes a quarter of an
hour together.
"""

from pathlib import Path
from typing import Any

import bridge_training
import pytest
from bridge_training import training
from marks import long
from safetensors.torch import load_file, save_file
from tests.real.peers import needs_vllm, served_on_cpu
from tiny import write_tiny_model

from rookery.compose.grpo.bridge import choose_bridge
from rookery.compose.grpo.setup import plan_bridge
from rookery.engines import open_servers
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY

pytestmark = [needs_vllm, long, pytest.mark.timeout(1200)]
NEAR = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
ALIASED: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {},
    "Mistral": {},
    "Phi": {},
    "Phi3": {},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"head_dim": 32},
    "Starcoder2": {},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}  # fmt: skip
COPIED: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral": (EXPERTS, "holds the weights of all experts"),
    "DeepseekV2": (LATENT, "multi-head latent attention|holds the weights of all experts"),
}


def config_of(folder: Path) -> GrpoConfig:
    return bridge_training.config_of("auto", **served_on_cpu(folder, max_model_len=256))


@pytest.mark.parametrize("kind", ALIASED)
async def test_trainer_and_server_have_one_copy(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", kind, **SIZES, **ALIASED[kind])
    async with training(config_of(folder), tmp_path) as trained:
        assert trained.bridge.name == "alias", trained.bridge.why
        await trained.trainer.publish(POLICY)
        assert await trained.gap() < NEAR
        await trained.step()
        assert await trained.gap() < NEAR


async def test_a_weight_that_the_server_lacks_is_named(tmp_path: Path) -> None:
    """vLLM's Gemma 2 takes its embeddings for the output layer, whatever the config says."""
    untied = {"head_dim": 32, "tie_word_embeddings": False}
    folder = write_tiny_model(tmp_path / "tiny", "Gemma2", **SIZES, **untied)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]  # it refuses to load one
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    plan = plan_bridge(config_of(folder), folder=folder)
    async with open_servers(plan.engine) as engine:
        bridge = await choose_bridge(plan, engine)
        bridge.release()
    assert bridge.name == "copy" and "no weight that is lm_head.weight" in bridge.why


@pytest.mark.parametrize("kind", COPIED)
async def test_layouts_of_their_own_are_copied_with_the_reason(kind: str, tmp_path: Path) -> None:
    extra, reason = COPIED[kind]
    folder = write_tiny_model(tmp_path / "tiny", kind, **{**SIZES, **extra})
    plan = plan_bridge(config_of(folder), folder=folder)
    async with open_servers(plan.engine) as engine:
        bridge = await choose_bridge(plan, engine)
        bridge.release()
    assert bridge.name == "copy" and any(part in bridge.why for part in reason.split("|"))
