"""The fleet: a pool of vLLM servers behind the `Sampler` and `Adapters` ports."""

from rookery.fleet.fleet import Fleet, open_fleet
from rookery.fleet.http.client import Client, ClientConfig, ServerLost, ServerRefusal, open_session
from rookery.fleet.servers.launch import LaunchProgress, LocalServer, open_servers
from rookery.fleet.servers.settings import FleetConfig, LaunchConfig

__all__ = [
    "Client",
    "ClientConfig",
    "Fleet",
    "FleetConfig",
    "LaunchConfig",
    "LaunchProgress",
    "LocalServer",
    "ServerLost",
    "ServerRefusal",
    "open_fleet",
    "open_servers",
    "open_session",
]
