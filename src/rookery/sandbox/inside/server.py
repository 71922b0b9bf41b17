"""The fork server: imports the evaluator once, then runs one candidate at a time.

Descriptor 0 is a socket to the host process. A request is an eight-byte header (the length of the
body) and a JSON body. The header carries descriptors for the result, the output and, if the jail
has no /proc, the list of this process's children. The answer is a JSON line, sent when no process
of the candidate is left. A byte sent in between ends the candidate; end of stream ends the server.
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
from .contract import UnusableEvaluator, load_evaluator, provide_openevolve
from .isolation import empty_folder

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
    if settings["isolation"] == "jail":
        isolation.hide_memory()  # a candidate must not read the evaluator in its parent's memory
    try:
        module = load_evaluator(Path(settings["evaluator"]))
    except UnusableEvaluator as error:
        _send(control, {"unusable": str(error)})
        return
    is_proc_hidden = (
        settings["isolation"] == "landlock"
    )  # /proc is hidden: the host process measures
    is_isolated = settings["isolation"] != "jail"
    _send(control, {"is_isolated": is_isolated, "pid": os.getpid() if is_proc_hidden else None})
    settings |= {"server_bytes": 0 if is_proc_hidden else _data_bytes()}
    while (request := _receive(control)) is not None:
        body, descriptors = request
        status = _run(control, module, settings | body, descriptors)
        if status is None:
            return
        _send(control, status)


def _data_bytes() -> int:
    """Return this process's data segment in bytes, with which every candidate starts."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0


def _take_control() -> socket.socket:
    """Move the socket off descriptor 0, so that programs do not read it as standard input."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    return control


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[Settings, list[int]] | None:
    header, descriptors, _, _ = socket.recv_fds(control, 8, 3)
    if not header:
        return None
    size = int.from_bytes(header, "big")
    body = bytearray()
    while len(body) < size:
        chunk = control.recv(min(size - len(body), 1 << 20))
        if not chunk:
            return None
        body += chunk
    return json.loads(body), descriptors


def _run(
    control: socket.socket, module: ModuleType, settings: Settings, descriptors: list[int]
) -> dict[str, Any] | None:
    """Run one candidate to its end; None if the host process is gone."""
    result, output, *child_lists = descriptors
    reader, status = os.pipe()
    children = child_lists or _open_children()
    private = (control.fileno(), reader, *children)
    to = Descriptors(result=result, output=output, status=status, private=private)
    child = start_candidate(module, settings, to)
    for descriptor in (result, output, status):
        os.close(descriptor)
    # The pipe becomes readable when the exit status is written or when every writer has exited.
    readable = select.select([control.fileno(), reader], [], [])[0]
    order = control.recv(1) if control.fileno() in readable else None
    num_ended = _end_descendants(child, children)
    code = os.read(reader, 16)
    for descriptor in (reader, *children):
        os.close(descriptor)
    if settings["isolation"] in ("landlock", "none"):
        empty_folder(settings["scratch"])
    if order == b"":
        return None
    # sandlock keeps counting processes that were killed here, until no candidate can fork. One
    # remaining process is the monitor; two more are normal if the candidate was stopped.
    is_worn = settings["isolation"] == "landlock" and num_ended > (1 if order is None else 3)
    return {
        "ended": int(code) if code else None,
        "is_stopped": order is not None,
        "is_worn": is_worn,
    }


def _open_children() -> list[int]:
    """Open the file that lists this process's children; [] if the system has no such file."""
    path = f"/proc/self/task/{os.getpid()}/children"
    return [os.open(path, os.O_RDONLY | os.O_CLOEXEC)] if os.path.exists(path) else []


def _end_descendants(child: int, children: list[int]) -> int:
    """Kill and reap all children, adopted orphans included, and return how many there were."""
    if not children:
        os.killpg(child, signal.SIGKILL)
    num_ended = 0
    while True:
        for file in children:
            for pid in os.pread(file, 1 << 16, 0).split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return num_ended
        num_ended += 1


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
