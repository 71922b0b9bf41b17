"""Stands in for vLLM's server process in the tests: serves /health, or fails as told."""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import rookery_vllm_plugin.extension  # the launcher must have put both there
import rookery_vllm_plugin.token_route

MODE = os.environ.get("FAKE_VLLM", "")
KEY = os.environ.get("VLLM_API_KEY", "")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        told = {"argv": sys.argv[1:], "pid": os.getpid(), "child": child}
        told["env"] = {k: v for k, v in os.environ.items() if "VLLM" in k or "CUDA" in k}
        content = json.dumps(told).encode()
        is_let_in = not KEY or self.headers["Authorization"] == f"Bearer {KEY}"
        self.send_response(200 if is_let_in or not self.path.startswith("/v1") else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def use_up_failure() -> bool:
    """Whether this start is one of those that fail: a file per port counts them."""
    port = sys.argv[sys.argv.index("--port") + 1]
    counter = Path(os.environ.get("FAKE_VLLM_FAILURES", "/nowhere"), port)
    left = int(counter.read_text()) if counter.exists() else 0
    if left:
        counter.write_text(str(left - 1))
    return left > 0


child = 0
assert rookery_vllm_plugin.extension.WorkerExtension and rookery_vllm_plugin.token_route.TokenRoute
sys.stdout.write("loading the model\n")
sys.stdout.flush()
if MODE == "memory" or use_up_failure():
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if MODE == "hang":
    time.sleep(600)
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
host, port = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--host", "--port"))
ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
