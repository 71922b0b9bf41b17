"""Answers of OpenAI routes as server-sent events, sent while they are drawn.

    engine --deltas--> DrawStream --chunks--> EventStream --> client

| stage         | consumes             | produces             | waits for                         |
|---------------|----------------------|----------------------|-----------------------------------|
| the drawing   | a request            | deltas, completions  | its turn, then the engine         |
| `events`      | deltas, completions  | chunks               | a delta, or the drawing's end     |
| `EventStream` | chunks               | bytes on a socket    | the client                        |

The drawing never waits for the client: unread parts are kept here, at most one whole answer. If the
client disconnects, or is dropped because it reads nothing, the drawing ends.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rookery.errors import RookeryError
from rookery.ports import Codec
from rookery.service.service import new_id
from rookery.service.work import status_of
from rookery.types import Completion, CompletionDelta, TokenIds, TopLogprobs

__all__ = [
    "Answers",
    "CallReader",
    "ChunkForm",
    "DrawStream",
    "EventStream",
    "NamedTool",
    "Tell",
    "Tool",
    "ToolChoice",
    "chat_logprobs",
    "forced_schema",
    "read_object",
    "text_logprobs",
    "usage_of",
]

# Tools of a chat: their definitions in a request, and the calls that a model wrote.
#
# Two notations of calls are read:
#
#     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen
#     {"name": "add", "parameters": {"a": 1}}                            Llama 3, the whole answer
#
# If a request forces calls (`tool_choice`), the answer must match a JSON schema: the arguments of
# the named tool, or a list of calls.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Function(BaseModel):
    """Definition of a function for the model."""

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the model may call; the chat template gets it unchanged."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class ToolName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: ToolName


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None
"""None means auto."""


def forced_schema(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """Return the schema of an answer that must be calls; None if the model decides."""
    parameters = {one.function.name: one.function.parameters or {"type": "object"} for one in tools}
    if isinstance(choice, NamedTool):
        return parameters[choice.function.name]
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in parameters.items()
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


class CallReader:
    """Reads one answer as it grows: text outside calls is content, spaces around calls are not."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice) -> None:
        self._names = {one.function.name for one in tools}
        self._choice = choice
        self._is_whole = choice == "required" or isinstance(choice, NamedTool)
        """True if the answer is read as a whole at its end."""
        self._text = ""
        """Unread text. `_more` comes after it, and is not searched inside a call."""
        self._more: list[str] = []
        self._is_open = False
        self._spaces = ""
        """Trailing spaces: content, unless a call follows."""
        self._is_bare = True
        """True if there was no content yet, or none since the last call."""
        self.num_calls = 0

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return the content and calls that are certain by now."""
        self._more.append(text)
        if self._is_whole or (self._is_open and CLOSE[-1] not in text):
            return "", []
        self._take_more()
        if self._is_bare and not self.num_calls and self._text.lstrip().startswith("{"):
            self._is_whole = True
        if self._is_whole:
            return "", []
        content, calls = "", []
        while (start := self._text.find(OPEN)) >= 0:
            end = self._text.find(CLOSE, start)
            if end < 0:
                break
            call = _call(read_object(self._text[start + len(OPEN) : end]))
            after = end + len(CLOSE)
            content += self._content(self._text[: start if call else after])
            self._text = self._text[after:]
            if call:
                self._spaces, self._is_bare = "", True
                self.num_calls += 1
                calls.append(call)
        self._is_open = start >= 0
        if not self._is_open:
            sizes = range(min(len(self._text), len(OPEN) - 1), 0, -1)
            held = next((n for n in sizes if OPEN.startswith(self._text[-n:])), 0)
            start = len(self._text) - held
        content += self._content(self._text[:start])
        self._text = self._text[start:]
        return content, calls

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the remaining content and calls."""
        self._take_more()
        calls = self._read_whole() if self._is_whole else []
        self.num_calls += len(calls)
        if calls:
            return "", calls
        # An unfinished call is text, and so are spaces without a call after them.
        rest, self._text = self._text, ""
        return self._content(rest) + ("" if self.num_calls else self._spaces), []

    def _take_more(self) -> None:
        self._text, self._more = "".join([self._text, *self._more]), []

    def _content(self, text: str) -> str:
        text = self._spaces + text
        if self.num_calls and self._is_bare:
            text = text.lstrip()
        content = text.rstrip()
        self._spaces = text[len(content) :]
        self._is_bare = self._is_bare and not content
        return content

    def _read_whole(self) -> list[dict[str, Any]]:
        if isinstance(self._choice, NamedTool):
            name = self._choice.function.name
            written = [{"name": name, "arguments": read_object(self._text)}]
        else:
            written = read_object(self._text)
            written = written if self._choice == "required" else [written]
        if not isinstance(written, list):
            return []
        calls = [_call(one) for one in written if isinstance(one, dict)]
        known = [call for call in calls if call and call["function"]["name"] in self._names]
        return known if len(known) == len(written) else []


def read_object(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(document: Any) -> dict[str, Any] | None:
    """Return a call in OpenAI's form; None if this is no call."""
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters"))
    arguments = read_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    function = {"name": document["name"], "arguments": written}
    return {"id": new_id("call"), "type": "function", "function": function}


SLICE, LONG = 64, 1024
"""Choices written at a time, and the number of tokens too slow for the event loop."""
FLOOR = -9999.0
"""Written for minus infinity, as by OpenAI and vLLM: JSON has no infinity."""
Tell = Callable[[int, CompletionDelta], None]
"""Called with the index of a prompt and the new tokens of its completions."""
Answers = list[tuple[Completion, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForm:
    """Format of the chunks of one request."""

    kind: Literal["text_completion", "chat.completion.chunk"]
    model: str
    codec: Codec
    prompts: Sequence[TokenIds]
    n: int
    has_logprobs: bool
    has_usage: bool
    read_calls: Callable[[], CallReader | None] = lambda: None
    """Makes a reader of tool calls for an answer; returns None without tools."""
    store: Callable[[Completion], Awaitable[str]] | None = None
    """Stores an answer and returns its id."""

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completion.chunk"


class DrawStream:
    """One request while it is drawn."""

    def __init__(
        self,
        draw: Callable[[Tell], Awaitable[Answers]],
        *,
        form: ChunkForm,
        sentence: Callable[[Exception], str],
    ) -> None:
        self._form = form
        self._sentence = sentence
        self._choices = [ChoiceChunks(form, i) for i in range(len(form.prompts) * form.n)]
        # Filled by the engine, drained as the client reads; never more than the request's answer.
        self._deltas: list[tuple[int, CompletionDelta]] = []
        self._changed = asyncio.Event()
        self._drawing = asyncio.ensure_future(draw(self._tell))
        self._drawing.add_done_callback(lambda _: self._changed.set())
        self._head = {
            "id": new_id("cmpl"),
            "object": form.kind,
            "created": int(time.time()),
            "model": form.model,
        }

    async def begin(self) -> None:
        """Wait for the first token: an earlier error gets a normal error answer."""
        try:
            await self._changed.wait()
            if self._drawing.done():
                self._drawing.result()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel the drawing if it still runs."""
        self._drawing.cancel()
        await asyncio.gather(self._drawing, return_exceptions=True)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream. An error ends it with an event of its own."""
        try:
            while not self._drawing.done() or self._deltas:
                await self._changed.wait()
                self._changed.clear()
                deltas, self._deltas = self._deltas, []
                async for part in self._chunks(deltas):
                    yield part
            answers = [one for drawn in await self._drawing for one in drawn]
            for choice, completion in zip(self._choices, answers, strict=True):
                stored = await self._form.store(completion) if self._form.store else ""
                async for part in self._chunks([(choice.index, choice.rest(completion))], stored):
                    yield part
            if self._form.has_usage:
                num_drawn = sum(len(one.tokens) for one in answers)
                usage = usage_of(self._form.prompts, num_drawn)
                yield _event({**self._head, "choices": [], "usage": usage})
        except RookeryError as error:
            status = status_of(error)
            kind = "server_error" if status >= 500 else "invalid_request_error"
            details = {
                "message": self._sentence(error),
                "type": kind,
                "param": None,
                "code": status,
            }
            yield _event({"error": details})
        yield b"data: [DONE]\n\n"

    def _tell(self, prompt: int, delta: CompletionDelta) -> None:
        if self._form.store is not None:
            delta = replace(delta, finish_reason=None)  # comes with the id of the stored answer
        self._deltas.append((prompt * self._form.n + delta.sample, delta))
        self._changed.set()

    async def _chunks(
        self, deltas: Sequence[tuple[int, CompletionDelta]], stored: str = ""
    ) -> AsyncIterator[bytes]:
        """Join the unread deltas of a choice into one chunk. Chunks of many choices are written
        while they are read, as each may repeat a long prompt."""
        by_choice: dict[int, list[CompletionDelta]] = {}
        for index, delta in deltas:
            by_choice.setdefault(index, []).append(delta)
        choices = list(by_choice.items())
        size = sum(self._choices[i].size(deltas) for i, deltas in choices)
        for start in range(0, len(choices), SLICE):
            write = partial(self._write, choices[start : start + SLICE], stored)
            # Long ones take time: outside the event loop.
            if part := write() if size < LONG else await asyncio.to_thread(write):
                yield part

    def _write(self, choices: Sequence[tuple[int, list[CompletionDelta]]], stored: str) -> bytes:
        joined = ((self._choices[i], _joined(deltas)) for i, deltas in choices)
        rows = [row for choice, delta in joined for row in choice.add(delta)]
        if stored:
            rows[-1]["sequence_id"] = stored
        usage = {"usage": None} if self._form.has_usage else {}
        return b"".join(_event({**self._head, "choices": [row], **usage}) for row in rows)


class ChoiceChunks:
    """One choice of a stream: converts deltas to entries of `choices`."""

    def __init__(self, form: ChunkForm, index: int) -> None:
        self.index = index
        self._form = form
        self._prompt = form.prompts[index // form.n]
        self._reader = form.read_calls()
        self._num_tokens = self._num_text = self._offset = 0
        self._has_begun = self._has_ended = False
        self._held: list[CompletionDelta] = []
        """Tokens whose text is not certain yet."""

    def rest(self, completion: Completion) -> CompletionDelta:
        """Return what the deltas left out: everything if the engine does not stream."""
        return CompletionDelta(
            sample=0,
            tokens=completion.tokens[self._num_tokens :],
            logprobs=completion.logprobs[self._num_tokens :],
            text=completion.text[self._num_text :],
            finish_reason=completion.finish_reason,
            top_logprobs=completion.top_logprobs[self._num_tokens :],
        )

    def size(self, deltas: Sequence[CompletionDelta]) -> int:
        """Return about how many tokens these deltas write."""
        num = sum(
            map(len, chain.from_iterable((delta.tokens, *delta.top_logprobs) for delta in deltas))
        )
        return num if self._has_begun else num + len(self._prompt)

    def add(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        if self._has_ended:
            return []
        self._num_tokens += len(delta.tokens)
        self._num_text += len(delta.text)
        content, calls = self._read(delta)
        self._held.append(delta)
        if not (content or calls or delta.finish_reason):
            return []
        held, self._held = _joined(self._held), []
        rows = [] if self._has_begun else self._first()
        if content or calls:
            rows.append(self._row(content, calls, held))
        if delta.finish_reason:
            self._has_ended = True
            has_calls = self._reader is not None and self._reader.num_calls > 0
            row = self._row("", [], None if content or calls else held)
            is_call = has_calls and delta.finish_reason == "stop"
            rows.append({**row, "finish_reason": "tool_calls" if is_call else delta.finish_reason})
        return rows

    def _read(self, delta: CompletionDelta) -> tuple[str, list[dict[str, Any]]]:
        if self._reader is None:
            return delta.text, []
        content, calls = self._reader.add(delta.text)
        if delta.finish_reason is not None:
            more, others = self._reader.end()
            content, calls = content + more, calls + others
        first = self._reader.num_calls - len(calls)
        return content, [{"index": first + i, **call} for i, call in enumerate(calls)]

    def _first(self) -> list[dict[str, Any]]:
        """Return the first row, with the prompt, and for chats the role."""
        self._has_begun = True
        row = self._row("", [], None)
        if self._form.is_chat:
            row["delta"] = {"role": "assistant", "content": ""}
        return [{**row, "prompt_token_ids": list(self._prompt)}]

    def _row(
        self, content: str, calls: list[dict[str, Any]], drawn: CompletionDelta | None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"index": self.index, "logprobs": None, "finish_reason": None}
        row["token_ids"] = [] if drawn is None else list(drawn.tokens)
        if self._form.is_chat:
            said = {"content": content} if content else {}
            row["delta"] = {**said, "tool_calls": calls} if calls else said
        else:
            row["text"] = content
        if drawn is not None and self._form.has_logprobs:
            row["logprobs"] = self._logprobs(drawn)
        return row

    def _logprobs(self, drawn: CompletionDelta) -> dict[str, Any]:
        if self._form.is_chat:
            return chat_logprobs(drawn, self._form.codec)
        logprobs = text_logprobs(drawn, self._form.codec, offset=self._offset)
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs


class EventStream(StreamingResponse):
    """Streamed answer of a route, which owns the drawing."""

    media_type = "text/event-stream"

    def __init__(self, stream: DrawStream) -> None:
        # Proxies would buffer the events otherwise.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(stream.events(), headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()


def usage_of(prompts: Sequence[TokenIds], num_drawn: int) -> dict[str, int]:
    num_prompt = sum(map(len, prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
    }


def text_logprobs(
    one: Completion | CompletionDelta, codec: Codec, *, offset: int = 0
) -> dict[str, Any]:
    """Format log-probabilities as `/v1/completions` does; the first token begins at `offset`."""
    texts = [codec.decode((token,)) for token in one.tokens]
    tops = [{codec.decode((t,)): max(lp, FLOOR) for t, lp in row} for row in one.top_logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(one.logprobs),
        "top_logprobs": tops or None,
        "text_offset": offsets,
    }


def chat_logprobs(one: Completion | CompletionDelta, codec: Codec) -> dict[str, Any]:
    """Format log-probabilities as `/v1/chat/completions` does."""
    rows: list[TopLogprobs] = list(one.top_logprobs) or [()] * len(one.tokens)
    return {
        "content": [
            {**_token(codec, token, lp), "top_logprobs": [_token(codec, *pair) for pair in row]}
            for token, lp, row in zip(one.tokens, one.logprobs, rows, strict=True)
        ]
    }


def _token(codec: Codec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.decode((token,))
    return {"token": text, "logprob": max(logprob, FLOOR), "bytes": list(text.encode())}


def _joined(deltas: Sequence[CompletionDelta]) -> CompletionDelta:
    return replace(
        deltas[-1],
        tokens=tuple(chain.from_iterable(one.tokens for one in deltas)),
        logprobs=tuple(chain.from_iterable(one.logprobs for one in deltas)),
        text="".join(one.text for one in deltas),
        top_logprobs=tuple(chain.from_iterable(one.top_logprobs for one in deltas)),
    )


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()
