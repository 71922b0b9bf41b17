"""`import vllm_backend`: the same as `rookery.vllm_backend`, under the name its document uses."""

from rookery.vllm_backend import (
    BackendConfig,
    close_communicator,
    generate_with_vllm,
    get_client_info,
    init_communicator,
    initialize_vllm_client,
    list_lora_adapters,
    register_lora_adapter,
    reset_prefix_cache,
    shutdown_vllm_client,
    unregister_lora_adapter,
    update_model_weights,
)

__all__ = [
    "BackendConfig",
    "close_communicator",
    "generate_with_vllm",
    "get_client_info",
    "init_communicator",
    "initialize_vllm_client",
    "list_lora_adapters",
    "register_lora_adapter",
    "reset_prefix_cache",
    "shutdown_vllm_client",
    "unregister_lora_adapter",
    "update_model_weights",
]
