"""Programs that forge scores, take memory, damage files or read what is not theirs.

Each is scored by EVALUATOR, which gives `solve()` of an honest program 0.5 and believes none above
1. Placeholders: VICTIM is a file of the user's outside, SECRET what it holds.
"""

import textwrap

__all__ = ["EVALUATOR", "FAST", "HONEST", "PROGRAMS"]

EVALUATOR = """
import importlib.util
import json
import os
import random

import helper

TARGET = 0.5


def check(value):
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError("not a score")
    return float(value)


def load(path):
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def evaluate(path):
    program = load(path)
    best = 1 - abs(TARGET - check(program.solve()) - 0.5)
    again = 1 - abs(TARGET - check(load(path).solve()) - 0.5)
    import late
    return {"combined_score": helper.low(best, again) * late.FACTOR, "said": program.SAID}
"""
"""Of an honest program: `1 - abs(0.5 - 0.5 - 0.5)`, so 0.5."""

HONEST = "SAID = ''\ndef solve(): return 0.5\n"

_FORGE_LINES = """
import json, os
LINES = [{"begin": "cascade_setup"},
         {"stage": "cascade_setup", "metrics": {"combined_score": 1e9}, "artifacts": {}},
         {"done": True}]
DATA = "".join(json.dumps(line) + chr(10) for line in LINES).encode()
"""

_BODIES = {
    # Forging: what the evaluator calls.
    "builtins": """
        import builtins
        builtins.abs = builtins.float = lambda *_: 1e9
        builtins.isinstance = lambda *_: True
        """,
    "json_dumps": """
        import json
        dumps = json.dumps
        json.dumps = lambda record, **_: dumps(record).replace("0.5", "1e9")
        """,
    "os_write": """
        import os
        write = os.write
        os.write = lambda to, data: write(to, bytes(data).replace(b"0.5", b"1e9"))
        """,
    "evaluator_globals": """
        import evaluation_module
        evaluation_module.check = lambda _: 1e9
        evaluation_module.TARGET = -1e9
        evaluation_module.helper.low = lambda *_: 1e9
        """,
    "gc_walk": """
        import gc
        for each in gc.get_objects():
            if isinstance(each, dict) and "TARGET" in each:
                each["TARGET"] = -1e9
                each["check"] = lambda _: 1e9
        """,
    "frame_walk": """
        import sys
        frame = sys._getframe()
        while frame:
            if "TARGET" in frame.f_globals:
                frame.f_globals["TARGET"] = -1e9
            frame = frame.f_back
        """,
    "traceback_walk": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            frame = error.__traceback__.tb_frame
            while frame:
                frame.f_globals["TARGET"] = -1e9
                frame.f_builtins["abs"] = lambda _: -1e9
                frame = frame.f_back
        """,
    "sys_modules": """
        import sys, types
        fake = types.ModuleType("helper")
        fake.low = lambda *_: 1e9
        sys.modules["helper"] = fake
        late = types.ModuleType("late")
        late.FACTOR = 1e9
        sys.modules["late"] = late
        """,
    "shadow_file": """
        import os
        open("late.py", "w").write("FACTOR = 1e9")
        os.makedirs("late", exist_ok=True)
        open("late/__init__.py", "w").write("FACTOR = 1e9")
        import sys
        sys.path.insert(0, os.getcwd())
        """,
    "numpy": """
        import numpy, math
        numpy.isfinite = math.isfinite = lambda *_: True
        numpy.ndarray.__eq__ = None
        """,
    "atexit": _FORGE_LINES
    + """
        import atexit
        @atexit.register
        def forge():
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, DATA)
                except OSError:
                    pass
        """,
    "every_descriptor": _FORGE_LINES
    + """
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, DATA)
            except OSError:
                pass
        """,
    "proc_self_fd": _FORGE_LINES
    + """
        import glob
        for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/self/fd/*"):
            try:
                with open(path, "wb", buffering=0) as file:
                    file.write(DATA)
            except OSError:
                pass
        """,
    "exit_after_forging": _FORGE_LINES
    + """
        for descriptor in range(1, 256):
            try:
                os.write(descriptor, DATA)
            except OSError:
                pass
        os._exit(0)
        """,
    "thread": """
        import threading, time, sys
        def forge():
            while True:
                for module in list(sys.modules.values()):
                    if hasattr(module, "TARGET"):
                        module.TARGET = -1e9
                time.sleep(0.001)
        threading.Thread(target=forge, daemon=True).start()
        """,
    "signal_handler": """
        import os, signal, evaluation_module
        def forge(*_):
            evaluation_module.TARGET = -1e9
        signal.signal(signal.SIGALRM, forge)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for pid in (os.getppid(), *range(1, 10)):
            try:
                os.kill(pid, signal.SIGUSR1)
            except OSError:
                pass
        """,
    "evaluator_file": """
        import os, evaluation_module
        for path in (evaluation_module.__file__, evaluation_module.helper.__file__):
            try:
                os.chmod(os.path.dirname(path), 0o777)
                os.chmod(path, 0o777)
            except OSError:
                pass
            for act in (lambda: open(path, "w").write("def evaluate(_): return {'s': 1e9}"),
                        lambda: os.rename(path, path + "x"), lambda: os.unlink(path)):
                try:
                    act()
                except OSError:
                    pass
        """,
    "compiled_file": """
        import importlib.util, marshal, os, py_compile
        bad = compile("import evaluation_module; evaluation_module.TARGET = -1e9; SAID = '';"
                      "solve = lambda: 0.5", "/usr/lib/python3/innocent.py", "exec")
        data = importlib.util.MAGIC_NUMBER + bytes(4) + bytes(8) + marshal.dumps(bad)
        try:
            size = os.stat(__file__)
            head = int(size.st_mtime).to_bytes(4, "little") + size.st_size.to_bytes(4, "little")
            data = importlib.util.MAGIC_NUMBER + bytes(4) + head + marshal.dumps(bad)
            os.makedirs(os.path.dirname(importlib.util.cache_from_source(__file__)), exist_ok=True)
            open(importlib.util.cache_from_source(__file__), "wb").write(data)
        except OSError:
            pass
        """,
    "own_file": """
        open(__file__, "w").write("import evaluation_module\\nevaluation_module.TARGET = -1e9\\n"
                                  "SAID = ''\\ndef solve(): return 0.5\\n")
        """,
    "ptrace": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        pids = {os.getppid(), *range(1, 64), *range(os.getpid() - 30, os.getpid() + 30)}
        reached = [pid for pid in pids - {os.getpid()} if libc.ptrace(16, pid, 0, 0) == 0]
        SAID = "SECRET" if reached else ""
        """,
    "memory_of_others": """
        import os
        seen = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if int(pid) == os.getpid():
                continue
            try:
                with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b") as memory:
                    for line in maps:
                        if "rw-p" in line:
                            start, end = (int(x, 16) for x in line.split()[0].split("-"))
                            memory.seek(start)
                            seen.append(memory.read(16))
            except (OSError, ValueError):
                pass
        SAID = "SECRET" if seen else ""
        """,
    "process_vm": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(b"x" * 16)
        vector = Vector(ctypes.addressof(buffer), 16)
        pids = {os.getppid(), *range(1, 64), *range(os.getpid() - 30, os.getpid() + 30)}
        calls = (libc.process_vm_readv, libc.process_vm_writev)
        reached = [
            pid for pid in pids - {os.getpid()} for call in calls
            if call(pid, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0) > 0
        ]
        SAID = "SECRET" if reached else ""
        """,
    # Forging: hostile values.
    "odd_number": """
        class Score(float):
            def __sub__(self, other): return 1e9
            def __rsub__(self, other): return 1e9
            def __le__(self, other): return True
            def __ge__(self, other): return True
            def __float__(self): return Score(1e9)
        def solve(): return Score(0.5)
        """,
    "odd_object": """
        class Score:
            def __sub__(self, other): return 1e9
            __rsub__ = __le__ = __ge__ = __lt__ = __gt__ = __sub__
            def __float__(self): return 1e9
            def __instancecheck__(self, other): return True
            __class__ = float
        def solve(): return Score()
        """,
    "not_a_number": "def solve(): return float('nan')",
    "infinite": "def solve(): return float('inf')",
    "raises_a_class": """
        class Forged(BaseException):
            def __str__(self):
                return "1e9"
        def solve(): raise Forged
        """,
    "bad_message": """
        import rookery_inside.program as own
        def solve():
            own.encode = lambda *_: b"x" * 100
            return 0.5
        """,
    "huge_message": """
        import rookery_inside.program as own
        def solve():
            own.send = lambda to, data: to.sendall((2**62).to_bytes(8, "big"))
            return 0.5
        """,
    "pickle_as_message": """
        import rookery_inside.program as own, pickle
        class Forged:
            def __reduce__(self):
                return exec, ("import evaluation_module; evaluation_module.TARGET = -1e9",)
        def solve():
            own.encode = lambda *_: pickle.dumps(Forged())
            return 0.5
        """,
    # Memory.
    "memfd": """
        import os
        blocks = [os.memfd_create("x") for _ in range(64)]
        for block in blocks:
            os.write(block, bytes(2**24))
            os.write(block, bytes(2**24))
        SAID = "SECRET"
        """,
    "shared_mapping": """
        import mmap
        blocks = [mmap.mmap(-1, 2**26) for _ in range(32)]
        for block in blocks:
            block.write(bytes(2**26))
            block.madvise(mmap.MADV_DONTNEED)
        SAID = "SECRET"
        """,
    "zero_mapping": """
        import mmap, os
        zero = os.open("/dev/zero", os.O_RDWR)
        blocks = [mmap.mmap(zero, 2**26) for _ in range(8)]
        for block in blocks:
            block.write(bytes(2**26))
            block.madvise(mmap.MADV_DONTNEED)
        SAID = "SECRET"
        """,
    "system_v": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        made = [libc.shmget(0, 2**26, 0o1600) for _ in range(32)] + [libc.msgget(0, 0o1600)]
        SAID = "SECRET" if max(made) >= 0 else ""
        """,
    "processes_together": """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                block = bytearray(os.urandom(1) * 100_000_000)
                time.sleep(60)
        time.sleep(60)
        """,
    "fork_bomb": """
        import os, time
        end = time.monotonic() + 2
        while time.monotonic() < end:
            try:
                os.fork()
            except OSError:
                pass
        """,
    "scratch_files": """
        for number in range(64):
            open(f"block{number}", "wb").write(bytes(2**20) * 32)
        SAID = "SECRET"
        """,
    # Damage.
    "chmod": """
        import os, evaluation_module
        done = []
        for path in (VICTIM, os.path.dirname(VICTIM), evaluation_module.__file__,
                     os.path.dirname(evaluation_module.__file__), os.__file__):
            try:
                os.chmod(path, 0)
                done.append(path)
            except OSError:
                pass
        try:
            os.fchmod(os.open(evaluation_module.__file__, os.O_RDONLY), 0)
            done.append("open")
        except OSError:
            pass
        SAID = "SECRET" if done else ""
        """,
    "utime": """
        import os, evaluation_module
        done = []
        for path in (VICTIM, evaluation_module.__file__, os.__file__):
            try:
                os.utime(path, (0, 0))
                done.append(path)
            except OSError:
                pass
        SAID = "SECRET" if done else ""
        """,
    "attributes": """
        import os, fcntl, struct, evaluation_module
        done = []
        for path in (VICTIM, evaluation_module.__file__):
            for act in (lambda: os.setxattr(path, "user.x", b"1"), lambda: os.chown(path, 0, 0),
                        lambda: fcntl.ioctl(open(path), 0x40086602, struct.pack("l", 0x40))):
                try:
                    act()
                    done.append(path)
                except OSError:
                    pass
        SAID = "SECRET" if done else ""
        """,
    "links": """
        import os
        done = []
        for make in (os.link, os.symlink):
            try:
                make(VICTIM, "way" + make.__name__)
                open("way" + make.__name__, "a").write("damage")
                done.append(make)
            except OSError:
                pass
        SAID = "SECRET" if done else ""
        """,
    "locked_folders": """
        import os
        os.makedirs("a/b/c")
        os.mkdir("locked", 0o300)
        open("locked/file", "w").close()
        os.mkdir("none", 0)
        """,
    # Leaks.
    "environ": """
        import glob, os
        text = str(os.environ).encode()
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                text += open(path, "rb").read()
            except OSError:
                pass
        SAID = text.decode(errors="replace")
        """,
    "victims_text": """
        try:
            SAID = open(VICTIM).read()
        except OSError:
            SAID = ""
        """,
    "network": """
        import socket
        SAID = ""
        for place in (("127.0.0.1", PORT), "\\0rookery-victim-PORT"):
            family = socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX
            try:
                with socket.socket(family) as client:
                    client.settimeout(2)
                    client.connect(place)
                    SAID = "SECRET"
            except OSError:
                pass
        """,
    "kill_all": """
        import os, signal
        for pid in (-1, *range(2, 200), os.getppid()):
            if pid not in (os.getpid(), 0):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        """,
}
PROGRAMS = {name: HONEST + textwrap.dedent(body) for name, body in _BODIES.items()}
for _name in ("atexit", "every_descriptor", "proc_self_fd", "exit_after_forging"):
    _body = _BODIES[_name].removeprefix(_FORGE_LINES)
    PROGRAMS[_name] = HONEST + _FORGE_LINES + textwrap.dedent(_body)
FAST = (
    *("builtins", "evaluator_globals", "gc_walk", "every_descriptor", "exit_after_forging"),
    *("sys_modules", "shadow_file", "compiled_file", "own_file", "odd_number", "odd_object"),
    *("pickle_as_message", "huge_message"),
)
"""Those that need no jail to be harmless."""
