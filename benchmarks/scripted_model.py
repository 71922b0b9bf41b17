"""A scripted model with OpenAI's chat API: it waits, then changes one number of the program.

    python benchmarks/scripted_model.py --latency 5 --hostile 0.2     # prints its URL

The answer depends only on the prompt, so a repeated request gets the same answer. With `--hostile`,
a share of the answers are programs that exit, loop, fork, take memory or open files. With
`--answers FILE`, the prompt selects an answer from that JSON list of texts. Embeddings count
letters. `GET /stats` has the number of calls, the most in flight, and the times of the first call
and the last answer. The server uses only the standard library, so that its own cost stays small.
"""

import argparse
import asyncio
import hashlib
import json
import re
import string
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__: list[str] = []

PROGRAM = re.compile(r"# Current Program\n+```\w*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"^ *return .*$", re.MULTILINE)
HOSTILE = (
    "import os; os._exit(139)",
    "while True: pass",
    "import os; [os.fork() for _ in range(200)]",
    "x = bytearray(1 << 40)",
    "open('/etc/rookery-was-here', 'w')",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "return float('nan')",
    "raise SystemExit('no')",
)


@dataclass(frozen=True)
class Stats:
    """Counts and times of the server's calls."""

    calls: int = 0
    in_flight: int = 0
    peak: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class ScriptedModel:
    """One HTTP server; connections are kept open."""

    def __init__(self, *, latency_s: float, hostile: float, answers: list[str]) -> None:
        self._latency_s = latency_s
        self._hostile = hostile
        self._answers = answers
        self.stats = Stats()

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._connect, "127.0.0.1", port, backlog=1024)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
        async with server:
            await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                content = json.dumps(await self._answer(head.split(" ", 2)[1], body)).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
                )
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: bytes) -> dict[str, object]:
        if path == "/stats":
            return asdict(self.stats)
        if path.endswith("/models"):
            return {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
        if path.endswith("/embeddings"):
            return {"object": "list", "data": [_embed(text) for text in json.loads(body)["input"]]}
        now = time.monotonic()
        seen = self.stats
        in_flight = seen.in_flight + 1
        self.stats = replace(
            seen,
            calls=seen.calls + 1,
            in_flight=in_flight,
            peak=max(seen.peak, in_flight),
            first_s=seen.first_s or now,
        )
        try:
            await asyncio.sleep(self._latency_s)
            return self._reply(json.loads(body))
        finally:
            left = self.stats.in_flight - 1
            self.stats = replace(self.stats, in_flight=left, last_s=time.monotonic())

    def _reply(self, request: dict[str, object]) -> dict[str, object]:
        prompt = json.dumps([request.get("messages"), request.get("seed")])
        messages = request["messages"]
        assert isinstance(messages, list)
        text = self._write(str(messages[-1]["content"]), prompt)
        message = {"role": "assistant", "content": text}
        return {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        }

    def _write(self, asked: str, key: str) -> str:
        """Return a diff if the prompt asks for diffs, else the whole program."""
        draw = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        if self._answers:
            return self._answers[draw % len(self._answers)]
        program = PROGRAM.search(asked)
        line = NUMBER.search(program[1]) if program else None
        if program is None or line is None:
            return "There is no program to change."
        is_hostile = (draw % 1000) / 1000 < self._hostile
        new = f"    return {(draw >> 16) % 10**6 / 10**6}"
        if is_hostile:
            new = f"    {HOSTILE[(draw >> 16) % len(HOSTILE)]}\n{new}"
        if "SEARCH/REPLACE" not in asked:
            return f"```python\n{program[1].replace(line[0], new)}```"
        return f"<<<<<<< SEARCH\n{line[0]}\n=======\n{new}\n>>>>>>> REPLACE"


def _embed(text: str) -> dict[str, object]:
    """Count each letter and digit of the text, so that similar programs have close embeddings."""
    counts = [
        float(text.lower().count(letter)) for letter in string.ascii_lowercase + string.digits
    ]
    return {"object": "embedding", "index": 0, "embedding": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=5.0, help="seconds for one answer")
    parser.add_argument("--hostile", type=float, default=0.0, help="share of hostile programs")
    parser.add_argument("--answers", type=Path, help="a JSON list of answers")
    parser.add_argument("--port", type=int, default=0)
    flags = parser.parse_args()
    answers = json.loads(flags.answers.read_text()) if flags.answers else []
    model = ScriptedModel(latency_s=flags.latency, hostile=flags.hostile, answers=answers)
    with suppress(KeyboardInterrupt):
        asyncio.run(model.serve(flags.port))


if __name__ == "__main__":
    main()
