"""A run goes on under its own config; what the loop names may change."""

from pathlib import Path
from typing import Any

import pytest

from rookery.errors import RunError
from rookery.runs import Run
from rookery.runs.run_folder import find_changes

CONFIG = {"steps": 100, "seed": 1, "stages": [{"type": "ga", "generations": 3}], "engine": {"a": 1}}


def finished(root: Path) -> Path:
    with Run.create(root, kind="grpo", name="poet", config=CONFIG) as run:
        run.append_blocking("step", {}, key="99")
        run.finish()
    return run.path


def test_a_finished_run_is_extended_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = finished(tmp_path)
    longer = {**CONFIG, "steps": 200, "stages": [{"type": "ga", "generations": 9}]}
    with Run.open(path) as run:
        changes = run.extend(longer, may_change=("steps", "stages.*.generations"))
        assert changes == {"steps": (100, 200), "stages.0.generations": (3, 9)}
        assert run.config == longer and run.status == "running"
        assert run.extend(longer, may_change=()) == {}, "no change needs no leave"
    with Run.open(path) as run:
        assert run.config == longer and run.get("step", "99") is not None
        [event] = run.events("run/extended")
        assert event.payload["changes"]["steps"] == {"from": 100, "to": 200}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, r"seed is 1 there, 2 here\. Only steps may change"),
        ({"steps": 200, "engine": {"a": 2}}, r"engine\.a is 1 there, 2 here"),
        ({"stages": []}, r"stages is \[\{.*there, \[\] here"),
        ({"seed": True}, r"seed is 1 there, true here"),
        ({"floors": {"math": 0.9}}, r"floors is null there, .*0\.9.* here"),
        ({"engine": {"a": 1, "b": 2}}, r"engine\.b is null there, 2 here"),
    ],
)
def test_another_config_is_refused_and_nothing_changes(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with Run.open(finished(tmp_path)) as run:
        with pytest.raises(RunError, match=words):
            run.extend({**CONFIG, **change}, may_change=("steps",))
        assert run.config == CONFIG and not list(run.events("run/extended"))


def test_a_loop_that_names_nothing_cannot_be_extended(tmp_path: Path) -> None:
    with Run.open(finished(tmp_path)) as run, pytest.raises(RunError, match="None of it may"):
        run.extend({**CONFIG, "steps": 200}, may_change=())


def test_a_new_key_and_a_lost_one_are_changes() -> None:
    assert find_changes({"a": 1}, {"a": 1, "b": 2}) == {"b": (None, 2)}
    assert find_changes({"a": {}}, {"a": {"b": 2}}) == {"a.b": (None, 2)}
    assert find_changes({"a": 1}, {"a": 1, "b": None}) == {}
    assert find_changes({"a": 1, "b": 2}, {"a": 1}) == {"b": (2, None)}
    assert find_changes({"a": [1, [2, 3]]}, {"a": [1, [2, 4]]}) == {"a.1.1": (3, 4)}
