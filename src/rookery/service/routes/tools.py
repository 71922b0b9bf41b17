"""Tools of a chat: what a request says of them, and the calls that a model wrote.

Two ways of writing calls are read:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Hermes, Qwen
    {"name": "add", "parameters": {"a": 1}}                            Llama 3, as the whole answer

Where a request forces calls (`tool_choice`), the answer is held to a JSON schema: the arguments of
the named tool, or a list of calls.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rookery.service.service import new_id

__all__ = ["CallReader", "NamedTool", "Tool", "ToolChoice", "forced_schema", "read_object"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Function(BaseModel):
    """What a model is told of a function."""

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the model may call; the chat template gets it as it was sent."""

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
"""None is auto."""


def forced_schema(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """What an answer must match to be calls; None when the model decides."""
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
    """Reads one answer as it grows. Text outside of calls is content, as it was written; spaces
    around calls are left out."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice) -> None:
        self._names = {one.function.name for one in tools}
        self._choice = choice
        self._is_whole = choice == "required" or isinstance(choice, NamedTool)
        """The answer is read at its end, as one."""
        self._text = ""
        """What was not read yet; `_more` comes after it, and is not looked at inside of a call."""
        self._more: list[str] = []
        self._is_open = False
        self._spaces = ""
        """Content, unless a call follows."""
        self._is_bare = True
        """There is no content yet, or none since the last call."""
        self.num_calls = 0

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that are certain by now."""
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
        """The rest of them."""
        self._take_more()
        calls = self._read_whole() if self._is_whole else []
        self.num_calls += len(calls)
        if calls:
            return "", calls
        # An unfinished call is text, and so are spaces that no call follows.
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
            found = [{"name": name, "arguments": read_object(self._text)}]
        else:
            found = read_object(self._text)
            found = found if self._choice == "required" else [found]
        if not isinstance(found, list):
            return []
        calls = [_call(one) for one in found if isinstance(one, dict)]
        known = [call for call in calls if call and call["function"]["name"] in self._names]
        return known if len(known) == len(found) else []


def read_object(text: str) -> Any:
    """JSON; None when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(found: Any) -> dict[str, Any] | None:
    """A call as OpenAI writes it; None when this is no call."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    arguments = read_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    function = {"name": found["name"], "arguments": written}
    return {"id": new_id("call"), "type": "function", "function": function}
