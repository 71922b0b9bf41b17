"""The fleet: a pool of vLLM servers behind the `Sampler` and `Adapters` ports."""

from rookery.fleet.client import Client, ClientConfig, ServerLost, ServerRefusal, open_session

__all__ = ["Client", "ClientConfig", "ServerLost", "ServerRefusal", "open_session"]
