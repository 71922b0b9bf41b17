"""A stand-in for a language model that writes programs: it changes one number in the program.

    with serve_number_changer() as url:    # http://127.0.0.1:PORT/v1, OpenAI's chat API
        rookery.run_evolve(..., llm={"primary_model": NAME, "api_base": url})

`rookery demo evolve` uses it, because the other demos' model is too small to write programs. An
answer depends only on the prompt and its seed, so that a run can resume.
"""

import json
import math
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["NAME", "change_number", "serve_number_changer"]

NAME = "number-changer"
"""The model's name in requests and reports."""
_PROGRAM = re.compile(r"# Current Program\n+```\w*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"^([A-Z_]+ = )(-?\d+\.?\d*(?:e-?\d+)?)", re.MULTILINE)


def change_number(prompt: str, *, seed: str) -> str:
    """Return the prompt's program in a code block, with the number of one random `NAME = number`
    line multiplied by a random factor."""
    program = _PROGRAM.search(prompt)
    numbers = [] if program is None else list(_NUMBER.finditer(program[1]))
    if program is None or not numbers:
        return "The program has no line NAME = number: there is nothing to change."
    rng = random.Random(seed)
    line = rng.choice(numbers)
    factor = math.exp(rng.gauss(0.0, 10 ** rng.uniform(-2.0, 0.0)))
    head, tail = program[1][: line.start()], program[1][line.end() :]
    return f"```python\n{head}{line[1]}{float(line[2]) * factor:.4g}{tail}```"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = str(body["messages"][-1]["content"])
        text = change_number(prompt, seed=f"{body.get('seed')}/{prompt}")
        self._send(
            {
                "id": NAME,
                "object": "chat.completion",
                "created": 0,
                "model": NAME,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the run has its own log."""

    def _send(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve_number_changer() -> Iterator[str]:
    """Serve on a free loopback port inside the block; yields the base URL, up to /v1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="number-changer")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
