"""The program in a process of its own: what evaluators can do with it, and what it cannot do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hostile_programs import EVALUATOR, FAST, HONEST, PROGRAMS

from rookery.sandbox import EvaluationOutcome, EvaluatorConfig, Sandbox, SandboxConfig

CONFIG = SandboxConfig(backend="unsafe", memory_bytes=2**29)


@asynccontextmanager
async def opened(folder: Path, text: str) -> AsyncIterator[Sandbox]:
    (folder / "evaluator.py").write_text(text)
    config = EvaluatorConfig(file=folder / "evaluator.py", timeout_s=20.0)
    async with Sandbox(CONFIG, config) as sandbox:
        yield sandbox


async def score(folder: Path, evaluator: str, program: str) -> EvaluationOutcome:
    async with opened(folder, evaluator) as sandbox:
        return await sandbox.evaluate(program)


async def test_a_program_cannot_forge_its_score(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("low = min")
    (tmp_path / "late.py").write_text("FACTOR = 1.0")
    async with opened(tmp_path, EVALUATOR) as sandbox:
        for name in FAST:
            outcome = await sandbox.evaluate(PROGRAMS[name])
            is_failed = outcome.failure is not None
            assert is_failed or outcome.metrics["combined_score"] == 0.5, (name, outcome)
            assert (await sandbox.evaluate(HONEST)).metrics["combined_score"] == 0.5, name


async def test_without_isolation_the_outcome_says_so(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("low = min")
    (tmp_path / "late.py").write_text("FACTOR = 1.0")
    async with opened(tmp_path, EVALUATOR) as sandbox:
        forged = await sandbox.evaluate(PROGRAMS["evaluator_globals"], isolate=False)
        assert forged.is_forgeable and forged.metrics["combined_score"] == 1e9
        assert not (await sandbox.evaluate(HONEST)).is_forgeable


LOADERS = {
    "spec": """
import importlib.util
def load(path):
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program
""",
    "import": """
import os, sys
from importlib import __import__
def load(path):
    sys.path.insert(0, os.path.dirname(path))
    return __import__("program")
""",
    "runpy": """
import runpy, types
def load(path): return types.SimpleNamespace(**runpy.run_path(path))
""",
    "exec": """
import types
def load(path):
    names = {"GIVEN": 5}
    exec(open(path).read(), names)
    return types.SimpleNamespace(**names)
""",
    "compile": """
import types
def load(path):
    names = {}
    exec(compile(open(path).read(), path, "exec"), names)
    return types.SimpleNamespace(**names)
""",
}
PROGRAM = """
import os
import numpy as np
PID = os.getpid()
LIMIT = 3
class Odd(ValueError): pass
class Model:
    def __init__(self, scale): self.scale = scale
    def predict(self, x): return np.asarray(x) * self.scale
def pid(): return os.getpid()
def plain(*args, **options): return [args, options]
def double(array): return array * 2
def sort(values): values.sort()
def fill(array): array[:] = 7
def minimise(function): return min(function(x) for x in range(-3, 4))
def stop(function): return function(100)
def fail(): raise Odd("too odd")
def squares(n):
    for x in range(n): yield x * x
def shout(): print("loud")
async def slow(): return 4
def calls(problem): return problem.cost(problem.size)
"""
USES = """
import asyncio, contextlib, io, os
from concurrent.futures import ThreadPoolExecutor
import numpy as np

class Problem:
    size = 4
    def cost(self, n): return n * 10

class OverBudget(Exception): pass

def evaluate(path):
    program = load(path)
    data, array, calls = [3, 1, 2], np.zeros(3), []
    def counted(x):
        calls.append(x)
        if x > 50: raise OverBudget("at " + str(x))
        return (x - 1) ** 2
    done = {}
    done["apart"] = program.pid() not in (os.getpid(), os.getppid()) and program.PID != os.getpid()
    done["plain"] = program.plain(1, "a", k=(2.5, None)) == [(1, "a"), {"k": (2.5, None)}]
    done["array"] = bool((program.double(np.eye(2)) == 2 * np.eye(2)).all())
    program.sort(data); program.fill(array)
    done["in place"] = data == [1, 2, 3] and array.tolist() == [7, 7, 7]
    done["callback"] = program.minimise(counted) == 0 and len(calls) == 7
    try:
        program.stop(counted)
    except OverBudget as error:
        done["own error"] = str(error) == "at 100"
    try:
        program.fail()
    except ValueError as error:
        done["their error"] = (type(error).__name__, str(error)) == ("Odd", "too odd")
    done["object"] = program.Model(3).predict([1, 2]).tolist() == [3, 6]
    done["generator"] = list(program.squares(4)) == [0, 1, 4, 9]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        program.shout()
    done["printed"] = text.getvalue() == "loud\\n"
    done["coroutine"] = asyncio.run(run(program)) == 4
    done["problem"] = program.calls(Problem()) == 40
    with ThreadPoolExecutor(2) as pool:
        done["threads"] = list(pool.map(program.double, [1, 2, 3])) == [2, 4, 6]
    done["names"] = hasattr(program, "plain") and not hasattr(program, "missing")
    return done

async def run(program): return await program.slow()
"""


@pytest.mark.parametrize("loader", LOADERS)
async def test_evaluators_use_a_program_as_if_it_were_theirs(tmp_path: Path, loader: str) -> None:
    outcome = await score(tmp_path, LOADERS[loader] + USES, PROGRAM)
    assert outcome.failure is None and not outcome.unsupported, outcome
    assert len(outcome.metrics) == 14 and all(outcome.metrics.values()), outcome.metrics


async def test_names_of_the_module_are_live(tmp_path: Path) -> None:
    use = """
def evaluate(path):
    program = load(path)
    program.LIMIT = 9
    return {"seen": program.read(), "new": program.raise_limit() or program.LIMIT}
"""
    text = "LIMIT = 3\ndef read(): return LIMIT\ndef raise_limit():\n global LIMIT; LIMIT = 11"
    assert (await score(tmp_path, LOADERS["spec"] + use, text)).metrics == {"seen": 9, "new": 11}


async def test_what_needs_one_process_is_refused_and_said(tmp_path: Path) -> None:
    """Also if the evaluator takes every exception for a bad program."""
    evaluator = f"""
import copy, pickle
import numpy as np
{LOADERS["spec"]}
USES = (
    lambda program: program.Thing() + 1,
    lambda program: float(program.Thing()),
    lambda program: np.asarray(program.Thing()),
    lambda program: copy.deepcopy(program.Thing()),
    lambda program: pickle.loads(open("forged.pickle", "rb").read()),
)
def evaluate(path):
    try:
        program = load(path)
        USES[program.USE](program)
        return {{"s": 1.0}}
    except Exception:
        return {{"s": 0.0}}
"""
    text = """
import os, pickle
class Thing: pass
class Forged:
    def __reduce__(self): return os.getpid, ()
pickle.dump(Forged(), open("forged.pickle", "wb"))
"""
    async with opened(tmp_path, evaluator) as sandbox:
        for use in range(5):
            outcome = await sandbox.evaluate(f"USE = {use}\n{text}")
            assert outcome.metrics == {"s": 0.0} and outcome.unsupported, (use, outcome)


async def test_what_a_subprocess_pickled_is_read(tmp_path: Path) -> None:
    evaluator = """
import pickle, subprocess, sys
def evaluate(path):
    subprocess.run([sys.executable, path], check=True)
    found = pickle.load(open("found.pickle", "rb"))
    return {"s": float(found["x"].sum()), "n": found["y"]}
"""
    text = """
import pickle
import numpy as np
pickle.dump({"x": np.arange(4.0), "y": np.int64(3)}, open("found.pickle", "wb"))
"""
    outcome = await score(tmp_path, evaluator, text)
    assert outcome.metrics == {"s": 6.0, "n": 3} and not outcome.unsupported, outcome


async def test_an_alarm_of_the_evaluators_ends_a_call(tmp_path: Path) -> None:
    evaluator = (
        LOADERS["spec"]
        + """
import signal
def late(*_): raise TimeoutError
def evaluate(path):
    program = load(path)
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        program.loop()
    except TimeoutError:
        return {"after": program.answer()}
"""
    )
    text = "def loop():\n while True: pass\ndef answer(): return 5"
    assert (await score(tmp_path, evaluator, text)).metrics == {"after": 5}


DRAW = """
import random
import numpy as np
def solve(): return [random.random(), np.random.rand(), np.random.default_rng().random()]
"""


async def test_random_numbers_are_those_of_the_seed(tmp_path: Path) -> None:
    """In both processes, whatever was drawn when the evaluator was imported."""
    evaluator = """
import random
random.random()
def evaluate(path):
    found = [*load(path).solve(), random.random()]
    return {str(number): value for number, value in enumerate(found)}
"""
    metrics = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        async with opened(folder, LOADERS["spec"] + evaluator) as sandbox:
            seeds = (3, 3, 4) if folder.name == "a" else (3,)
            outcomes = [await sandbox.evaluate(DRAW, seed=seed) for seed in seeds]
            metrics += [tuple(outcome.metrics.values()) for outcome in outcomes]
    assert metrics[0] == metrics[1] == metrics[3]
    assert not set(metrics[2]) & set(metrics[0]) and len(metrics[0]) == 4


async def test_a_seed_that_the_evaluator_sets_holds_for_the_program(tmp_path: Path) -> None:
    evaluator = """
import random
import numpy as np
def evaluate(path):
    program = load(path)
    first = [random.seed(1), np.random.seed(2), program.solve()[:2]][-1]
    again = [random.seed(1), np.random.seed(2), program.solve()[:2]][-1]
    return {"same": first == again}
"""
    outcome = await score(tmp_path, LOADERS["spec"] + evaluator, DRAW)
    assert outcome.metrics == {"same": True}, outcome
