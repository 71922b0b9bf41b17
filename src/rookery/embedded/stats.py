"""What an engine has computed, and what it holds."""

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Tokens since the start, and what is held now."""

    requested_tokens: int
    """Prompt tokens as asked for."""
    prompt_tokens: int
    """Prompt tokens computed: every shared prefix counts once per model."""
    trunk_tokens: int
    """Prompt tokens computed below the first adapted layer: once for all models."""
    decoded_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values are held now, once per model and once below them."""
    num_in_flight: int
    """Requests that are being computed now, or wait for it."""
