"""The fork server: imports the evaluator once, then runs one candidate at a time.

Descriptor 0 is a socket to the program outside. A request is a header of eight bytes (the length
of the body) that carries two descriptors, for the result and for the output, and a JSON body. The
answer is a JSON line, sent when no process of the candidate is left. A byte in between means: end
the candidate; the end of the stream means: end everything.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from . import isolation
from .candidate import Descriptors, start_candidate
from .contract import UnusableEvaluator, load_evaluator
from .scratch import empty_folder
from .shim import provide_openevolve

__all__ = ["main"]

Settings = dict[str, Any]


def main(settings: Settings) -> None:
    """Serve until the socket is closed."""
    control = _take_control()
    if os.geteuid() == 0 and settings["isolation"] in ("namespaces", "jail"):
        isolation.drop_root()
    isolation.become_subreaper()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    provide_openevolve()
    if settings["isolation"] == "namespaces" and not isolation.can_nest(settings["scratch"]):
        settings |= {"isolation": "jail"}
    try:
        module = load_evaluator(Path(settings["evaluator"]))
    except UnusableEvaluator as error:
        _send(control, {"unusable": str(error)})
        return
    _send(control, {"ready": True, "is_isolated": settings["isolation"] != "jail"})
    settings |= {"server_bytes": _data_bytes()}
    while (request := _receive(control)) is not None:
        body, result, output = request
        status = _run(control, module, settings | body, result, output)
        if status is None:
            return
        _send(control, status)


def _data_bytes() -> int:
    """What this process has taken already, and every candidate starts with."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0


def _take_control() -> socket.socket:
    """The socket at descriptor 0, moved away from where programs look for their input."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    return control


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[Settings, int, int] | None:
    header, descriptors, _, _ = socket.recv_fds(control, 8, 2)
    if not header:
        return None
    size = int.from_bytes(header, "big")
    body = bytearray()
    while len(body) < size:
        chunk = control.recv(min(size - len(body), 1 << 20))
        if not chunk:
            return None
        body += chunk
    result, output = descriptors
    return json.loads(body), result, output


def _run(
    control: socket.socket, module: ModuleType, settings: Settings, result: int, output: int
) -> dict[str, Any] | None:
    """Run one candidate to its end; None if the program outside has gone."""
    reader, status = os.pipe()
    private = (control.fileno(), reader)
    to = Descriptors(result=result, output=output, status=status, private=private)
    child = start_candidate(module, settings, to)
    for descriptor in (result, output, status):
        os.close(descriptor)
    # The pipe is readable when the candidate's end is reported, and when all who hold it are gone.
    readable = select.select([control.fileno(), reader], [], [])[0]
    order = control.recv(1) if control.fileno() in readable else None
    num_ended = _end_descendants(child)
    code = os.read(reader, 16)
    os.close(reader)
    if settings["isolation"] in ("landlock", "none"):
        empty_folder(settings["scratch"])
    if order == b"":
        return None
    # sandlock goes on counting processes that were killed here: in time no candidate could fork.
    # Its first process is the monitor, the second one is left only if the candidate was stopped.
    is_worn = settings["isolation"] == "landlock" and num_ended > (1 if order is None else 2)
    return {
        "ended": int(code) if code else None,
        "is_stopped": order is not None,
        "is_worn": is_worn,
    }


def _end_descendants(child: int) -> int:
    """Kill and reap until this process has no children; how many it had. Orphans become its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        os.killpg(child, signal.SIGKILL)
    num_ended = 0
    while True:
        for pid in children.read_text().split() if children.exists() else ():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return num_ended
        num_ended += 1


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
