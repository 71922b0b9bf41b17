"""What processes use, read from /proc."""

import subprocess
import sys

from rookery.sandbox.process_tree import measure

NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, b"\\xff) \\x80", 0, 0, 0)
print("named", flush=True)
input()
"""


def test_a_process_may_have_any_bytes_as_its_name() -> None:
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        usage = measure(process.pid)
        process.stdin.write(b"\n")
    assert usage.num_threads == 1 and usage.rss_bytes > 2**20
