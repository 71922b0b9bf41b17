"""`rookery serve`: sampling and training over HTTP."""

from functools import partial
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import check_flags, log_warnings, say
from rookery.config import load_config

__all__ = [
    "keys",
    "serve",
]

# `rookery keys add | list | remove`.


keys = cyclopts.App(name="keys", help="Make, list and remove keys of the service.")

_File = Annotated[Path | None, Parameter(name="--file")]


@keys.command
def add(name: str, *, file: _File = None) -> int:
    """Make a key for a tenant and print it once.

        rookery keys add ada

    Parameters
    ----------
    name
        The tenant. A tenant may have several keys.
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import add_key, default_key_file

    key = add_key(file or default_key_file(), name=name)
    say(key)
    return 0


@keys.command(name="list")
def show(*, file: _File = None) -> int:
    """List the tenants with keys, and when each key was made.

    Parameters
    ----------
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import default_key_file, list_keys

    place = file or default_key_file()
    records = list_keys(place)
    if not records:
        say(f"No keys in {place}. Make one with `rookery keys add NAME`.")
    for record in records:
        say(f"{record['name']}   {record['created']}   {record['sha256'][:12]}")
    return 0


@keys.command
def remove(name: str, *, file: _File = None) -> int:
    """Remove all keys of a tenant. A running service refuses them at once.

    Parameters
    ----------
    name
        The tenant.
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import default_key_file, remove_key

    num = remove_key(file or default_key_file(), name=name)
    say(f"Removed {num} key{'s' * (num != 1)} of {name}.")
    return 0


def serve(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Serve sampling and training to the tinker SDK, OpenAI clients and plain HTTP.

    Any value of the config is a flag with a dotted name. Ctrl-C ends the service. After a restart
    it continues with all requests that clients had sent.

        rookery keys add ada
        rookery serve configs/serve.yaml
        rookery serve configs/serve.yaml --anonymous --port 8001

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it. run:NAME/PART refers to the output of a
        run in runs/.
    """
    from rookery.compose.serve import ServeConfig
    from rookery.compose.serve import serve as run_service
    from rookery.runs.run_folder import in_folder, resolve_references

    log_warnings()
    check_flags(overrides, fields=ServeConfig.model_fields, own_flags=())
    resolve = partial(resolve_references, find=in_folder("runs"))
    loaded = load_config(ServeConfig, config, overrides=overrides, resolve=resolve)
    loaded = loaded.from_folder(config.parent)

    def ready(url: str) -> None:
        lines = [
            f"{url}   models: {', '.join(loaded.models)}",
            f"  export TINKER_BASE_URL={url} TINKER_API_KEY="
            + ("tml-any" if loaded.anonymous else "tml-..."),
            f"  {url}/status shows queues and tenants, to this machine alone",
            "Ctrl-C ends it; started again, it goes on where it was.",
        ]
        for line in lines:
            say(line)

    def stopping(num_pending: int, limit_s: float) -> None:
        left = f" The next start goes on with {num_pending} requests." if num_pending else ""
        say(f"Stopping, within {limit_s:g} s.{left} Ctrl-C again stops now.")

    run_service(loaded, on_ready=ready, on_stop=stopping)
    return 0
