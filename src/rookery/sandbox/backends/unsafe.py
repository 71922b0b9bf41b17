"""No jail: a plain process with limits. A generated program can do what its user can do."""

from rookery.sandbox.backends.jail import Jail, box_aliases, environment, server_command
from rookery.sandbox.box import Box
from rookery.sandbox.config import SandboxConfig

__all__ = ["unsafe_jail"]


def unsafe_jail(config: SandboxConfig, box: Box) -> Jail:
    """The server's command as it is. Only the environment is hidden."""
    command = server_command(config, box, inside=box.inside, scratch=box.scratch, isolation="none")
    return Jail(
        command=command, environment=environment(config, box.scratch), aliases=box_aliases(box)
    )
