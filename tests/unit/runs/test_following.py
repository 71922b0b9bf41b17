"""Trackers get the metrics of a run, also of one that was interrupted and goes on."""

from pathlib import Path

import pytest

from rookery.errors import ConfigError
from rookery.runs import MetricsRow, Run
from rookery.runs import trackers as following
from rookery.runs.trackers import TrackedRun, follow_metrics, require_trackers


class Recorder:
    """A tracker that keeps what it is told, over all sessions."""

    rows: list[tuple[int, dict[str, float]]]
    runs: list[TrackedRun]
    num_closed: int

    def __init__(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def log(self, row: MetricsRow) -> None:
        self.rows.append((row.step, dict(row.values)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        type(self).num_closed += 1


class Failing(Recorder):
    def log(self, row: MetricsRow) -> None:
        raise ConnectionError(f"no network at step {row.step}")


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Recorder, Failing):
        monkeypatch.setattr(kind, "rows", [], raising=False)
        monkeypatch.setattr(kind, "runs", [], raising=False)
        monkeypatch.setattr(kind, "num_closed", 0, raising=False)
    monkeypatch.setattr(following, "TRACKERS", {"wandb": Recorder, "trackio": Failing})


@pytest.mark.usefixtures("trackers")
def test_a_resumed_run_goes_on_in_the_same_tracker_run(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="grpo", name="poet", config={"steps": 3}) as run:
        with follow_metrics(run, ("wandb",)):
            run.log_metrics(0, {"reward/mean": 0.25})
            run.log_metrics(1, {"reward/mean": 0.5, "train/loss": 2.0})
        run.log_metrics(2, {"reward/mean": 0.75})  # the tracker had gone: killed, say
    with Run.open(tmp_path / "poet") as run, follow_metrics(run, ("wandb",)):
        run.log_metrics(1, {"reward/mean": 0.5, "train/loss": 2.0})  # trained again
        run.log_metrics(2, {"reward/mean": 0.75})
        run.log_metrics(3, {"reward/mean": float("inf")})
    first, second = Recorder.runs
    assert first == second
    assert first.config == {"steps": 3} and first.id.startswith("poet-")
    seen = [(step, name) for step, values in Recorder.rows for name in values]
    assert seen[:4] == [
        (0, "reward/mean"),
        (1, "reward/mean"),
        (1, "train/loss"),
        (2, "reward/mean"),
    ]
    assert seen[-1] == (3, "reward/mean")
    assert (1, "reward/mean") not in seen[4:]
    assert Recorder.num_closed == 2


@pytest.mark.usefixtures("trackers")
def test_a_tracker_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Run.create(tmp_path, kind="grpo", name="poet", config={}) as run,
        follow_metrics(run, ("trackio", "wandb")),
    ):
        run.log_metrics(0, {"reward/mean": 0.25})
    assert Recorder.rows == [(0, {"reward/mean": 0.25})]
    assert "trackio failed and is left out" in caplog.text
    assert "no network at step 0" in caplog.text


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[track\]"):
        require_trackers(("wandb",))


def test_tensorboard_shows_both_parts_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (0, 2):
        make = Run.open if first else None
        opened = (
            make(tmp_path / "poet")
            if make
            else Run.create(tmp_path, kind="grpo", name="poet", config={})
        )
        with opened as run, follow_metrics(run, ("tensorboard",)):
            for step in range(first, first + 2):
                run.log_metrics(step, {"reward/mean": step / 4})
    events = EventAccumulator(str(tmp_path / "poet" / "tensorboard"))
    events.Reload()
    found = [
        (event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("reward/mean")
    ]
    assert found == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
