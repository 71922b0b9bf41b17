"""The `restart` bridge: servers of our own are started again on a folder. The slowest one, which
needs nothing of a server."""

from pathlib import Path

from rookery.errors import FleetError
from rookery.fleet.bridges.update import Give
from rookery.fleet.fleet import Fleet
from rookery.fleet.routing.replica import Replica

__all__ = ["require_own_servers", "restart_on"]


def require_own_servers(fleet: Fleet) -> None:
    """FleetError unless this process has started all servers."""
    if any(replica.local is None for replica in fleet.pool.replicas):
        raise FleetError(
            "restart is for servers that are started here, and the fleet has some by URL: write "
            "bridge: reload, or a launch section."
        )


def restart_on(folder: Path) -> Give:
    """Have a server serve the model in a folder, under the name it had."""

    async def give(replica: Replica) -> None:
        assert replica.local is not None, "require_own_servers was called"
        await replica.local.serve_model(str(folder), name=replica.capabilities.model)
        await replica.reattach()

    return give
