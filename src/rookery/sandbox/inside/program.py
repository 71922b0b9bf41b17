"""The program's process: loads the program's files and calls its functions for the evaluator.

It cannot reach anything that decides a score, neither the evaluator's memory nor the result
descriptor. The evaluator's side is `proxy.py`. Requests are pickles, since the evaluator is
trusted; answers are plain data (`values.py`).

Each thread of the evaluator has its own socket, served by one thread here. The main thread serves
the evaluator's main thread, so that signals work. Closing a socket during a call ends the call.
"""

import asyncio
import builtins
import contextlib
import ctypes
import importlib
import importlib.util
import io
import marshal
import os
import pickle
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

from .values import encode, receive, send

__all__ = ["find_export", "find_thing", "rebuild_error", "serve_program"]

_MUTABLE = (list, dict, set, bytearray)
_HANG_UP = select.POLLHUP | select.POLLRDHUP


class _Ended(BaseException):
    """The evaluator no longer waits for this call."""


class Export:
    """Proxy of an evaluator's function or object; calls go over the socket that is being served."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _PROCESS.ask(["call", self._number, args, options])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _PROCESS.ask(["get", self._number, name])


class _Process:
    """The program's objects that the evaluator references by number, and its call sockets."""

    def __init__(self, reseed: Callable[[int], None]) -> None:
        self._things: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._serving = threading.local()
        self._threads: dict[int, tuple[socket.socket, int]] = {}
        self._pid = os.getpid()
        self._operations: dict[str, Callable[..., Any]] = {
            "load": _load,
            "run": _run,
            "get": lambda thing, name: getattr(thing, name),
            "set": lambda thing, name, value: setattr(thing, name, value),
            "dir": lambda thing: dir(thing),
            "iter": lambda thing: iter(thing),
            "next": lambda thing: next(thing),
            "await": lambda thing: asyncio.run(_wait(thing)),
            "call": lambda thing, args, options: thing(*args, **options),
            "seed": lambda name, args: _seed(name, args),
            "reseed": reseed,
        }

    def find(self, number: int) -> Any:
        return self._things[number]

    def refer(self, thing: Any) -> list[Any]:
        number = self._numbers.get(id(thing))
        if number is None:
            self._next = number = self._next + 1
            self._things[number], self._numbers[id(thing)] = thing, number
        name = getattr(thing, "__name__", type(thing).__name__)
        kind = "call" if callable(thing) else "iterate" if hasattr(thing, "__next__") else ""
        return [number, str(name), kind]

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._numbers.pop(id(self._things.pop(number, None)), None)

    def ask(self, request: list[Any]) -> Any:
        """Have the evaluator call one of its functions, during a call from the evaluator."""
        channel = getattr(self._serving, "channel", None)
        if channel is None or os.getpid() != self._pid:
            raise RuntimeError(
                "A function of the evaluator can be called only by the thread of the program that "
                "the evaluator has called."
            )
        send(channel, encode(request, self.refer))
        while (answer := self._next_request(channel)) is not None:
            kind, *parts = answer
            if kind == "returned":
                return parts[0]
            if kind == "raised":
                raise rebuild_error(*parts)
            self._answer(channel, kind, parts)
        raise _Ended

    def serve(self, channel: socket.socket) -> None:
        """Answer requests until the evaluator hangs up."""
        self._threads[channel.fileno()] = (channel, threading.get_ident())
        self._serving.channel = channel
        with contextlib.suppress(_Ended, OSError), channel:
            while (request := self._next_request(channel)) is not None:
                self._answer(channel, request[0], request[1:])

    def accept(self, control: socket.socket, main: "queue.SimpleQueue[socket.socket]") -> None:
        """Accept new sockets, and end the calls of sockets that were closed."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor != control.fileno():
                    poll.unregister(descriptor)
                    _, thread = self._threads.pop(descriptor, (None, 0))
                    # If the thread has ended, this call has no effect.
                    raised = ctypes.py_object(_Ended)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
                    continue
                kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not kind:
                    os._exit(0)
                channel = socket.socket(fileno=descriptors[0])
                poll.register(channel, _HANG_UP)
                if kind == b"M":
                    main.put(channel)
                else:
                    threading.Thread(target=self.serve, args=(channel,), daemon=True).start()

    def _next_request(self, channel: socket.socket) -> list[Any] | None:
        try:
            dead, *request = pickle.loads(receive(channel))  # from the evaluator, which is trusted
        except EOFError:
            return None
        self.forget(dead)
        return list(request)

    def _answer(self, channel: socket.socket, kind: str, parts: list[Any]) -> None:
        args, capture = (list(parts[1]), parts.pop()) if kind == "call" else ([], False)
        before = [_snapshot(value) for value in args]
        printed = (io.StringIO(), io.StringIO())
        try:
            with contextlib.ExitStack() as stack:
                if capture:
                    stack.enter_context(contextlib.redirect_stdout(printed[0]))
                    stack.enter_context(contextlib.redirect_stderr(printed[1]))
                value = self._operations[kind](*parts)
            changed = {
                place: value
                for place, value in enumerate(args)
                if before[place] is not None and before[place] != _snapshot(value)
            }
            texts = [each.getvalue() for each in printed]
            data = encode(["value", value, changed, texts], self.refer)
        except _Ended:
            raise
        except BaseException as error:  # noqa: BLE001 (the program's own, `sys.exit` included)
            data = encode(["error", *describe_error(error)], self.refer)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the program closed it
                stream.flush()
        send(channel, data)


def serve_program(control: socket.socket, reseed: Callable[[int], None]) -> None:
    """Serve the evaluator's process until it ends. Never returns. `reseed` seeds all generators."""
    global _PROCESS
    _PROCESS = _Process(reseed)
    main: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    threading.Thread(target=_PROCESS.accept, args=(control, main), daemon=True).start()
    while True:
        with contextlib.suppress(_Ended):
            _PROCESS.serve(main.get())


def find_export(number: int) -> Export:
    """Reconstruct an evaluator's function while unpickling a request."""
    return Export(number)


def find_thing(number: int) -> Any:
    """Resolve a reference to an object of the program while unpickling a request."""
    return _PROCESS.find(number)


def describe_error(error: BaseException) -> tuple[list[str], str, str, int | None]:
    """Return its class names, text, traceback, and the number the evaluator gave it, if any."""
    names = [each.__name__ for each in type(error).__mro__]
    text = "".join(traceback.format_exception(error))[-20_000:]
    return names, str(error), text, getattr(error, "rookery_number", None)


def rebuild_error(names: list[str], message: str, text: str, number: int | None) -> BaseException:
    """Make an exception named `names[0]`, derived from the first name that is a Python built-in."""
    kinds = [kind for name in names if (kind := _builtin_error(name)) is not None]
    base = kinds[0] if kinds else RuntimeError
    made = type(str(names[0]), (base,), {}) if names[0] != base.__name__ else base
    try:
        error: BaseException = made(message)
    except TypeError:  # some built-ins take more than a text, such as UnicodeDecodeError
        error = type(str(names[0]), (ValueError,), {})(message)
    error.add_note(f"In the program's process:\n{text}")
    vars(error)["rookery_number"] = number
    return error


def _builtin_error(name: str) -> type[BaseException] | None:
    kind = _KeyError if name == "KeyError" else vars(builtins).get(name)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


class _KeyError(KeyError):
    """A KeyError whose text is used unchanged; KeyError itself would quote it again."""

    __str__ = Exception.__str__


_KeyError.__name__ = "KeyError"


async def _wait(thing: Any) -> Any:
    return await thing


def _snapshot(value: Any) -> bytes | None:
    """Pickle an argument to detect changes in place; None if it is immutable or not plain."""
    is_array = type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
    if not (is_array or type(value) in _MUTABLE):
        return None
    try:
        return pickle.dumps(value, 5)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None


def _load(
    name: str, path: str, locations: list[str] | None, how: str, place: dict[str, Any]
) -> Any:
    """Execute a file as a module.

    `how`: "import" reuses a loaded module, "registered" replaces it, "apart" does not register.
    """
    _move(place)
    known = sys.modules.get(name)
    if how == "import" and known is not None and getattr(known, "__file__", None) == path:
        return known
    spec = importlib.util.spec_from_file_location(
        name, path, loader=SourceFileLoader(name, path), submodule_search_locations=locations
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if how != "apart":
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _run(code: bytes, names: dict[str, Any], place: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Execute code in a namespace; return its value and the names that it set."""
    _move(place)
    namespace = dict(names)
    value = eval(marshal.loads(code), namespace)
    new = {
        name: each
        for name, each in namespace.items()
        if name != "__builtins__" and (name not in names or names[name] is not each)
    }
    return value, new


def _move(place: dict[str, Any]) -> None:
    """Adopt the evaluator's working directory, module path and environment."""
    os.chdir(place["cwd"])
    sys.path[:] = place["path"]
    for name in os.environ.keys() - place["environ"].keys():
        del os.environ[name]
    os.environ.update(place["environ"])


def _seed(name: str, args: tuple[Any, ...]) -> None:
    importlib.import_module(name).seed(*args)


_PROCESS = _Process(lambda _: None)
