"""The trace of parents and children."""

import gzip
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rookery.compat.openevolve.traces import TraceWriter, trace_entry, trace_path
from rookery.errors import ConfigError, RunError
from rookery.loops.evolve.config import TraceConfig
from rookery.loops.evolve.outputs import ChildStep
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.prompts import Prompt

OpenEvolve = Callable[[str, Any], Any]
PARENT = ProgramRecord(id="a", code="x = 1", metrics={"combined_score": 0.25, "ok": "no", "t": 1})
CHILD = ProgramRecord(
    id="b",
    code="x = 2",
    parent_id="a",
    generation=1,
    iteration=4,
    timestamp=9.0,
    island=2,
    metrics={"combined_score": 0.75, "ok": "yes", "new": 3},
    artifacts={"out": "words"},
    changes="c",
)
PROMPT = Prompt(system="s", user="u", template="diff_user")
STEP = ChildStep(parent=PARENT, child=CHILD, prompt=PROMPT, answer="r")


def _step(name: str) -> ChildStep:
    return replace(STEP, child=replace(CHILD, id=name))


def _fill(output: Path, config: TraceConfig, names: str) -> Path:
    with TraceWriter(output, config=config) as trace:
        for name in names:
            trace.append(_step(name))
    return trace.path


def test_an_entry_is_that_of_openevolve(openevolve: OpenEvolve, tmp_path: Path) -> None:
    theirs = openevolve(
        """
from openevolve.database import Program
from openevolve.evolution_trace import EvolutionTracer
parent = Program(id="a", code="x = 1", metrics=DATA["parent"])
child = Program(id="b", code="x = 2", parent_id="a", generation=1, metrics=DATA["child"])
with EvolutionTracer(DATA["path"], include_code=True) as tracer:
    tracer.log_trace(4, parent, child, prompt={"system": "s", "user": "u"}, llm_response="r",
                     artifacts={"out": "words"}, island_id=2, metadata={"changes": "c"})
answer(json.load(open(DATA["path"])))
""",
        {
            "parent": dict(PARENT.metrics),
            "child": dict(CHILD.metrics),
            "path": str(tmp_path / "t.jsonl"),
        },
    )
    ours = trace_entry(STEP, config=TraceConfig(include_code=True))
    assert ours.pop("code_diff").endswith("-x = 1\n+x = 2")
    assert {**ours, "timestamp": 0} == {**theirs, "timestamp": 0}


def test_what_is_not_asked_for_is_left_out() -> None:
    entry = trace_entry(STEP, config=TraceConfig(include_prompts=False))
    assert not {"prompt", "llm_response", "child_code", "code_diff"} & set(entry)


@pytest.mark.parametrize("compress", [False, True])
def test_lines_are_appended_once_and_survive_a_torn_end(tmp_path: Path, compress: bool) -> None:
    config = TraceConfig(compress=compress, buffer_size=1)
    path = _fill(tmp_path, config, "bcd")
    assert path.name == ("evolution_trace.jsonl.gz" if compress else "evolution_trace.jsonl")
    path.write_bytes(path.read_bytes()[:-12])
    assert _fill(tmp_path, config, "bcde") == path
    with gzip.open(path, "rt") if compress else path.open() as file:
        assert [json.loads(line)["child_id"] for line in file] == list("bcde")


def test_a_last_line_without_its_end_is_kept_apart_from_the_next(tmp_path: Path) -> None:
    config = TraceConfig()
    path = _fill(tmp_path, config, "b")
    path.write_text(path.read_text().rstrip("\n"))
    _fill(tmp_path, config, "bc")
    assert [json.loads(line)["child_id"] for line in path.read_text().splitlines()] == ["b", "c"]


def test_a_damaged_line_in_the_middle_is_not_dropped_silently(tmp_path: Path) -> None:
    path = _fill(tmp_path, TraceConfig(), "bcd")
    first, _, last = path.read_text().splitlines(keepends=True)
    path.write_text(first + "{broken\n" + last)
    with pytest.raises(RunError, match="line 2 is damaged"):
        TraceWriter(tmp_path, config=TraceConfig())
    assert path.read_text().count("\n") == 3


def test_entries_are_written_by_buffers(tmp_path: Path) -> None:
    config = TraceConfig(buffer_size=2)
    trace = TraceWriter(tmp_path, config=config)
    trace.append(_step("b"))
    assert not trace.path.exists()
    trace.append(_step("c"))
    assert len(trace.path.read_text().splitlines()) == 2


def test_json_is_one_document(tmp_path: Path) -> None:
    config = TraceConfig(format="json")
    _fill(tmp_path, config, "b")
    path = _fill(tmp_path, config, "c")
    document = json.loads(path.read_text())
    assert document["metadata"]["total_traces"] == 2
    assert [trace["child_id"] for trace in document["traces"]] == ["b", "c"]


def test_hdf5_needs_its_library(tmp_path: Path) -> None:
    config = TraceConfig(format="hdf5")
    if importlib.util.find_spec("h5py") is None:
        with pytest.raises(
            ConfigError, match="needs h5py: pip install h5py, or write format: jsonl"
        ):
            TraceWriter(tmp_path, config=config)
        return
    import h5py

    with h5py.File(_fill(tmp_path, config, "bc")) as file:
        traces = file["traces"]
        assert [traces[name].attrs["child_id"] for name in traces] == ["b", "c"]


def test_the_path_of_the_config_goes_first(tmp_path: Path) -> None:
    config = TraceConfig(output_path=str(tmp_path / "mine" / "t.jsonl"))
    assert trace_path(Path("out"), config=config) == tmp_path / "mine" / "t.jsonl"
    assert _fill(Path("out"), config, "b").read_text().count("\n") == 1
