"""Stand-ins for the program, in the evaluator's process.

Evaluators load a program with `importlib`, `import`, `runpy` or `exec`. Each of them returns a
stand-in here, and the program's code runs in its own process (`program.py`). Arguments travel as
pickles to the program, results come back as plain data. Nothing that a program does reaches the
memory in which its score is computed.

| in the program               | in the evaluator                                                 |
|------------------------------|------------------------------------------------------------------|
| numbers, text, lists, arrays | an equal value                                                   |
| a function, class, object    | a `Remote` with attributes; functions and classes can be called  |
| the module                   | a module that looks its names up in the program's process        |

Other operations on a Remote are refused and noted: an evaluator that needs them must run the
program in its own process.
"""

import builtins
import functools
import importlib.machinery
import io
import marshal
import os
import pickle
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

from .program import find_export, find_thing, rebuild_error
from .values import decode, receive, send

__all__ = ["PROGRAM_ENDED", "ProgramProxy"]

PROGRAM_ENDED = 77
"""Exit code of the evaluator's process if the program's process ended first."""
_MP = ("multiprocessing.", "concurrent.futures.")
_SPAWNING = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
_PICKLED = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "range", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "_codecs": {"encode"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
}
"""Names that the evaluator may unpickle, since a program may have written the pickle."""
_KNOWN = ("__name__", "__doc__", "__qualname__", "__module__")
_PROBED = ("__code__", "__signature__", "__array__", "__array_interface__", "__deepcopy__")


class _Refused(TypeError):
    """The evaluator tried an operation that is impossible on a program in another process."""


class ProgramProxy:
    """The connection to the program's process. `unsupported` names the first refusal, or is ""."""

    def __init__(
        self, control: socket.socket, *, scratch: str, evaluator: str, names: frozenset[str]
    ) -> None:
        self.unsupported = ""
        self._names = names
        self._control = control
        self._pid = os.getpid()
        self._local = threading.local()
        self._roots = tuple({scratch, os.path.realpath(scratch), "/dev/shm"})
        self._folder = str(Path(evaluator).parent)
        self._exports: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._seeds: list[tuple[str, tuple[Any, ...]]] = []
        self.dead: list[int] = []

    def note_seed(self, module: str, args: tuple[Any, ...]) -> None:
        """Queue a seed that the evaluator set, for the program's generators too."""
        self._seeds.append((module, args))

    def reseed(self, seed: int) -> None:
        """Seed the program's generators as at its start."""
        self._seeds.clear()
        self.request("reseed", seed)

    def refuse(self, what: str) -> NoReturn:
        self.unsupported = self.unsupported or what
        raise _Refused(
            f"{what} is not possible while the program runs in a process of its own; "
            "`isolate: never` runs it in the evaluator's."
        )

    def install(self) -> None:
        """Redirect all code below the scratch folder to the other process, from now on."""
        loader: Any = importlib.machinery.SourceFileLoader
        compiled: Any = importlib.machinery.SourcelessFileLoader
        for kind in (loader, compiled):
            kind.exec_module = self._redirected_import(kind.exec_module)
        for name in ("exec", "eval"):
            vars(builtins)[name] = self._redirected_run(vars(builtins)[name])
        vars(runpy)["read_code"] = lambda _: None  # never load a program as compiled bytecode
        sys.meta_path.insert(0, self)
        sys.addaudithook(self._audit)

    def owns(self, path: object) -> bool:
        """Return whether a path is in a folder that programs can write."""
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.path.abspath(name := os.fspath(path))
        if isinstance(name, bytes) or name.startswith("<"):  # "<string>": code without a file
            return False
        return any(
            each == root or each.startswith(root + os.sep)
            for root in self._roots
            for each in (text, os.path.realpath(text))
        )

    def is_evaluators(self, module: str) -> bool:
        """Return whether a module comes from the evaluator's folder."""
        file = getattr(sys.modules.get(module), "__file__", None)
        return isinstance(file, str) and file.startswith(self._folder + os.sep)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find installed modules and the evaluator's before files of the scratch folder, so that a
        program cannot shadow them, whatever the order of `sys.path`. Names of the program's own
        files shadow the evaluator's folder, which may hold the initial program."""
        if path is not None:
            return None
        trusted = [each for each in sys.path if not self.owns(each or os.getcwd())]
        if name in self._names:
            trusted = [each for each in trusted if each != self._folder]
        spec = importlib.machinery.PathFinder.find_spec(name, trusted, target)
        return spec if spec is not None and spec.loader is not None else None

    def request(self, kind: str, *parts: Any) -> Any:
        """Ask the program's process, and serve its calls meanwhile."""
        while self._seeds:
            self.request("seed", *self._seeds.pop(0))
        channel = self._channel()
        is_whole = False
        try:
            self._send(channel, kind, *parts)
            while True:
                answer, *content = decode(receive(channel), self._resolve)
                if answer == "value" or answer == "error":
                    is_whole = True
                    break
                self._serve(channel, answer, content)
        except (EOFError, ConnectionError):
            os._exit(PROGRAM_ENDED)
        finally:
            if not is_whole:  # a late answer must not be read as that of the next request
                del self._local.channel
                channel.shutdown(socket.SHUT_RDWR)
        if answer == "error":
            names, message, text, number = content
            raise self._errors.get(number) or rebuild_error(names, message, text, None)
        return content

    def call(self, number: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        sys.stdout.flush()
        is_captured = sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__
        value, changed, texts = self.request("call", _Thing(number), args, options, is_captured)
        for place, new in changed.items():
            _replace(args[place], new)
        for stream, text in zip((sys.stdout, sys.stderr), texts, strict=True):
            if text:
                stream.write(text)
        return value

    def _channel(self) -> socket.socket:
        known: socket.socket | None = getattr(self._local, "channel", None)
        if known is not None and self._local.pid == os.getpid():
            return known
        ours, theirs = socket.socketpair()
        is_main = threading.current_thread() is threading.main_thread()
        kind = b"M" if is_main and os.getpid() == self._pid else b"T"
        with theirs:
            socket.send_fds(self._control, [kind], [theirs.fileno()])
        self._local.channel, self._local.pid = ours, os.getpid()
        return ours

    def _send(self, channel: socket.socket, *message: Any) -> None:
        dead, self.dead = self.dead, []
        data = io.BytesIO()
        _Pickler(data, self).dump((dead, *message))
        send(channel, data.getvalue())

    def _resolve(self, number: int, name: str, kind: str) -> "Remote":
        return _KINDS[kind](self, int(number), str(name))

    def export(self, value: Any) -> int:
        self._exports[id(value)] = value
        return id(value)

    def _serve(self, channel: socket.socket, kind: str, message: list[Any]) -> None:
        """Call an evaluator's function for the program; only exported ones can be called."""
        try:
            number, *parts = message
            value = self._exports[number]
            if kind == "call":
                value = value(*parts[0], **parts[1])
            else:
                value = self._public(value, parts[0])
        except Exception as error:  # noqa: BLE001 (raised again in the program)
            self._errors[id(error)] = error
            names = [each.__name__ for each in type(error).__mro__]
            self._send(channel, "raised", names, str(error), "", id(error))
            return
        self._send(channel, "returned", value)

    def _public(self, value: Any, name: str) -> Any:
        """Return a public method or plain attribute of an evaluator's object."""
        attribute = getattr(value, name) if not name.startswith("_") else None
        is_method = isinstance(attribute, MethodType) and attribute.__self__ is value
        if attribute is None or not (self.is_evaluators(type(value).__module__) or is_method):
            raise AttributeError(name)
        if not is_method and isinstance(attribute, ModuleType | FunctionType | type):
            raise AttributeError(name)
        return attribute

    def _place(self) -> dict[str, Any]:
        return {"cwd": os.getcwd(), "path": list(sys.path), "environ": dict(os.environ)}

    def _redirected_import(self, load: Callable[..., None]) -> Callable[..., None]:
        def exec_module(loader: Any, module: ModuleType) -> None:
            if not self.owns(loader.path):
                load(loader, module)
                return
            spec = module.__spec__
            is_import = spec is not None and getattr(spec, "_initializing", False)
            is_known = sys.modules.get(module.__name__) is module
            how = "import" if is_import else "registered" if is_known else "apart"
            folders = list(module.__path__) if hasattr(module, "__path__") else None
            path = os.path.abspath(loader.path)
            [remote, *_] = self.request("load", module.__name__, path, folders, how, self._place())
            vars(module)["__remote__"] = remote
            module.__class__ = RemoteModule

        return exec_module

    def _redirected_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `exec` or `eval`: calls from the evaluator, or on the program's code, go remote."""
        mode = run.__name__

        @functools.wraps(run)
        def redirected(
            source: Any, globals: Any = None, locals: Any = None, /, **options: Any
        ) -> Any:
            caller = sys._getframe(1)
            names = caller.f_globals if globals is None else globals
            inner = locals if locals is not None else caller.f_locals if globals is None else names
            is_code = isinstance(source, CodeType)
            is_theirs = self.owns(names.get("__file__")) or (
                is_code and self.owns(source.co_filename)
            )
            if not (is_theirs or caller.f_code.co_filename.startswith(self._folder + os.sep)):
                return run(source, names, inner, **options)
            code = source if is_code else compile(source, "<string>", mode)
            sent = {
                name: value
                for name, value in {**names, **inner}.items()
                if name != "__builtins__" and self._can_send(value)
            }
            [[value, new], *_] = self.request("run", marshal.dumps(code), sent, self._place())
            inner.update(new)
            return value

        return redirected

    def _can_send(self, value: Any) -> bool:
        try:
            _Pickler(io.BytesIO(), self).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
            return False
        return True

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse the remaining ways to get a program's code or pickles into this process."""
        if event == "exec" and self.owns(args[0].co_filename):
            self.refuse("Executing the program's code in the evaluator's process")
        if event == "import" and args[1] and self.owns(args[1]):
            self.refuse("Loading the program's library into the evaluator's process")
        if event == "ctypes.dlopen" and args[0] and self.owns(args[0]):
            self.refuse("Loading the program's library into the evaluator's process")
        if event == "pickle.find_class":
            module, name = args
            # Forks of the evaluator may exchange anything: the program is in none of them.
            is_between = str(sys._getframe(1).f_globals.get("__name__")).startswith(_MP)
            if is_between and sys.modules.keys().isdisjoint(_SPAWNING):
                return
            builtin = getattr(builtins, name, None) if module == "builtins" else None
            is_error = isinstance(builtin, type) and issubclass(builtin, BaseException)
            if not (is_error or name in _PICKLED.get(module, ())):
                self.refuse(f"Unpickling {module}.{name}")


class _Thing:
    """A reference that the program's process resolves to its object."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Pickler(pickle.Pickler):
    """Pickles for the program: the evaluator's functions and objects become callable numbers, and
    references to the program's objects resolve there."""

    def __init__(self, file: io.BytesIO, proxy: ProgramProxy) -> None:
        super().__init__(file, 5)
        self._proxy = proxy

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _Thing):
            return find_thing, (value.number,)
        if isinstance(value, Remote):
            return find_thing, (object.__getattribute__(value, "_number"),)
        if isinstance(value, RemoteModule):
            return self.reducer_override(vars(value)["__remote__"])
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, type):
            return NotImplemented
        is_function = isinstance(value, FunctionType | MethodType | functools.partial)
        module = value.__module__ if is_function and hasattr(value, "__module__") else ""
        if is_function and (not _is_named(value) or self._proxy.is_evaluators(module)):
            return find_export, (self._proxy.export(value),)
        if not is_function and self._proxy.is_evaluators(type(value).__module__):
            return find_export, (self._proxy.export(value),)
        return NotImplemented


def _is_named(function: Any) -> bool:
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(home, getattr(function, "__qualname__", ""), None) is function


def _replace(old: Any, new: Any) -> None:
    """Apply a change that the program made in place to an argument."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif getattr(old, "shape", None) == getattr(new, "shape", ()):
        old[...] = new


class Remote:
    """An object in the program's process. Equal only to itself; supports little but attributes."""

    __slots__ = ("_name", "_number", "_proxy")

    def __init__(self, proxy: ProgramProxy, number: int, name: str) -> None:
        object.__setattr__(self, "_proxy", proxy)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name in _PROBED:
            self._proxy.refuse(f"`{name}` of the program's {self._name}")
        if name.startswith("__") and name not in _KNOWN:
            raise AttributeError(name)
        return self._proxy.request("get", self, name)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        self._proxy.request("set", self, name, value)

    def __dir__(self) -> list[str]:
        return list(self._proxy.request("dir", self)[0])

    def __repr__(self) -> str:
        return f"<the program's {self._name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        remote = self._proxy.request("iter", self)[0]
        while True:
            try:
                value = self._proxy.request("next", remote)[0]
            except StopIteration:
                return
            yield value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._proxy.request("await", self)[0]

    def __del__(self) -> None:
        self._proxy.dead.append(self._number)


class RemoteCallable(Remote):
    """A function or a class in the program's process."""

    __slots__ = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._proxy.call(self._number, args, options)


class RemoteIterator(Remote):
    """A generator or other iterator in the program's process. It has no length."""

    __slots__ = ()
    __len__ = None

    def __next__(self) -> Any:
        return self._proxy.request("next", self)[0]


class RemoteModule(ModuleType):
    """The program's module; each access reads the present value in the program's process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(vars(self)["__remote__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(vars(self)["__remote__"], name, value)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["__remote__"])


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: Remote, *_: object) -> NoReturn:
        proxy: ProgramProxy = self._proxy
        proxy.refuse(f"`{name}` of the program's {self._name}")

    return refused


_KINDS = {"": Remote, "call": RemoteCallable, "iterate": RemoteIterator}
_REFUSED = (
    *("len", "getitem", "setitem", "delitem", "contains", "enter", "exit", "reduce_ex", "delattr"),
    *("float", "int", "index", "complex", "neg", "abs", "lt", "le", "gt", "ge", "pow", "matmul"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "copy"),
)
for _name in _REFUSED:
    setattr(Remote, f"__{_name}__", _refuse(f"__{_name}__"))
