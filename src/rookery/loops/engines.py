"""The engines that a loop can run on, as a config names them: `engine: {type: fleet, ...}`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rookery.embedded import EngineConfig
from rookery.fleet import FleetConfig

__all__ = ["EngineChoice"]


def _is_embedded_unless_told(value: Any) -> Any:
    is_untold = isinstance(value, dict) and "type" not in value
    return {"type": "embedded", **value} if is_untold else value


EngineChoice = Annotated[
    EngineConfig | FleetConfig,
    Field(discriminator="type"),
    BeforeValidator(_is_embedded_unless_told),
]
"""In this process (`type: embedded`, the default) or vLLM servers (`type: fleet`)."""
