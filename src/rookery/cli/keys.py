"""`rookery keys add | list | remove`: who may use the service."""

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import console

__all__ = ["keys"]

keys = cyclopts.App(name="keys", help="Make, list and remove keys of the service.")

_File = Annotated[Path | None, Parameter(name="--file")]


@keys.command
def add(name: str, *, file: _File = None) -> int:
    """Make a key for a tenant and print it; it is not shown again.

        rookery keys add ada

    Parameters
    ----------
    name
        The tenant. Several keys of one name are of one tenant.
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import add_key, default_key_file

    key = add_key(file or default_key_file(), name=name)
    console.print(key, highlight=False, markup=False, soft_wrap=True)
    return 0


@keys.command(name="list")
def show(*, file: _File = None) -> int:
    """List the tenants that have keys, and when those were made.

    Parameters
    ----------
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import default_key_file, list_keys

    place = file or default_key_file()
    records = list_keys(place)
    if not records:
        line = f"No keys in {place}. Make one with `rookery keys add NAME`."
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for record in records:
        line = f"{record['name']}   {record['created']}   {record['sha256'][:12]}"
        console.print(line, highlight=False, markup=False)
    return 0


@keys.command
def remove(name: str, *, file: _File = None) -> int:
    """Remove all keys of a tenant; a running service refuses them at once.

    Parameters
    ----------
    name
        The tenant.
    file
        The key file; by default the one that `rookery serve` reads.
    """
    from rookery.service.keys import default_key_file, remove_key

    num = remove_key(file or default_key_file(), name=name)
    console.print(f"Removed {num} key{'s' * (num != 1)} of {name}.", highlight=False)
    return 0
