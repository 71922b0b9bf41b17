"""What environment variables say about the service's parts: USE_VLLM and USE_MEGATRON."""

from collections.abc import Mapping

from rookery.engines import AnyEngineConfig
from rookery.errors import ConfigError
from rookery.fleet import FleetConfig

__all__ = ["engine_of_environment", "megatron_of_environment"]

_THIS_MACHINE = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def engine_of_environment(
    configured: AnyEngineConfig, environment: Mapping[str, str], *, port: int
) -> AnyEngineConfig:
    """The vLLM server of USE_VLLM, VLLM_BASE_URL or VLLM_HOST and VLLM_PORT; without them what is
    configured. `port` is the service's own."""
    if not _is_set(environment, "USE_VLLM"):
        return configured
    host = environment.get("VLLM_HOST") or "localhost"
    host = "127.0.0.1" if host == "0.0.0.0" else host
    vllm_port = environment.get("VLLM_PORT") or "8000"
    url = environment.get("VLLM_BASE_URL") or f"http://{host}:{vllm_port}"
    if url.rstrip("/") in {f"http://{name}:{port}" for name in _THIS_MACHINE}:
        raise ConfigError(
            f"The vLLM server and this service would both be at {url}: set `port` of the service "
            "to another, or VLLM_PORT and the --port of vLLM."
        )
    return FleetConfig(urls=(url,))


def megatron_of_environment(configured: str | None, environment: Mapping[str, str]) -> str | None:
    """The server of USE_MEGATRON and MEGATRON_SERVER_URL; without them what is configured."""
    if not _is_set(environment, "USE_MEGATRON"):
        return configured
    return environment.get("MEGATRON_SERVER_URL") or "http://localhost:5000"


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ConfigError(f"{name} is {value!r}; write true or false.")
    return value in _TRUE
