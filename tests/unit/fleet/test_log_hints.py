"""What is said of a server that does not start: its first error, and what to do."""

from pathlib import Path

import pytest

from rookery.fleet.servers.log_hints import explain_failure, first_error, last_lines

ENGINE = """\
(APIServer pid=1) INFO 11-16 02:04:41 [utils.py:278] non-default args: max_lora_rank 16
(APIServer pid=1) WARNING 11-16 02:05:00 [vllm.py:725] using the V1 model runner instead.
{first}
Process EngineCore:
Traceback (most recent call last):
  File "process.py", line 314, in _bootstrap
    self.run()
Exception: something later
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
CACHE = """\
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]   File "core.py", line 326, in _initialize
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]     configs = get_kv_cache_configs(
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]               ^^^^^^^^^^^^^^^^^^^^^
(Worker pid=3) INFO 11-16 02:05:30 [worker.py:1] in between
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]   File "cache.py", line 1030, in _check
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510]     raise ValueError(
(EngineCore pid=2) ERROR 11-16 02:05:30 [core.py:1510] ValueError: To serve at least one request, (0.02 GiB KV cache is needed, which is larger than 0.01 GiB).
(EngineCore pid=2) ERROR 11-16 02:05:33 [multiproc_executor.py:315] Worker proc died unexpectedly.
"""  # noqa: E501
WORKER = """\
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] WorkerProc failed to start.
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] Traceback (most recent call last):
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953]   File "weight_utils.py", line 12, in load
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953]     with safe_open(file) as f:
(Worker_TP0 pid=3) ERROR 11-16 02:06:21 [exec.py:953] SafetensorError: incomplete metadata
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510]   File "exec.py", line 1, in wait
(EngineCore pid=2) ERROR 11-16 02:06:22 [core.py:1510] Exception: WorkerProc initialization failed
"""


@pytest.mark.parametrize(
    ("first", "shown", "remedy"),
    [
        (CACHE, "ValueError: To serve at least one request", "lower launch.max_model_len"),
        (WORKER, "SafetensorError: incomplete metadata", "fetch or convert the model again"),
    ],
)
def test_the_first_error_of_the_engine_is_shown(
    first: str, shown: str, remedy: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(ENGINE.format(first=first))
    lines = first_error(log)
    assert lines[-1].startswith(shown), lines
    assert lines[-2].startswith("    ") and not any("pid=" in line for line in lines)
    assert remedy in explain_failure(log)


def test_errors_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(WORKER)
    assert first_error(log, since=len(WORKER)) == []


def test_what_is_only_reported_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("(APIServer pid=1) INFO 11-16 02:04:41 [a.py:1] args: {'max_lora_rank': 16}\n")
    assert explain_failure(log) == ""


def test_the_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == [] and explain_failure(log) == "" and first_error(log) == []
    log.write_text("\n".join(f"line {i}" for i in range(50_000)) + "\n\n50 %\r100 %\n")
    assert last_lines(log, num=3) == ["line 49999", "50 %", "100 %"]
    for text, said in [
        ("error: unrecognized arguments: --nope", "launch.args"),
        ("ValueError: No available memory for the cache blocks.", "max_model_len"),
        ("[Errno 98] error while attempting to bind", "launch.port"),
    ]:
        log.write_text(text)
        assert said in explain_failure(log)


REQUEST = """\
(APIServer pid=1) ERROR:    Exception in ASGI application
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "token_route.py", line 70, in _generate
(APIServer pid=1)     await work
(APIServer pid=1) ValueError: max_lora_rank of a request
"""


def test_errors_of_requests_are_not_what_a_ready_server_died_of(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(REQUEST)
    assert first_error(log)[-1].startswith("ValueError: max_lora_rank of a request")
    assert first_error(log, was_ready=True) == []
    assert explain_failure(log) and explain_failure(log, was_ready=True) == ""
    log.write_text(REQUEST + "Killed\n")
    assert "out of memory" in explain_failure(log, was_ready=True)
    log.write_text(REQUEST + WORKER)
    assert first_error(log, was_ready=True)[-1].startswith("SafetensorError: incomplete")
