"""Clients of OpenAI's API as they are: `openai`, `langchain-openai` and `litellm`. Run by
`test_openai.py` in an environment of their own; prints what they saw as JSON.

    python openai_client.py streams http://127.0.0.1:8000/v1 MODEL
"""

import json
import sys
from typing import Any

import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

KEY = "tml-any"
MESSAGES: list[Any] = [{"role": "user", "content": "w5 w6"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CITY = {
    "title": "city",
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


class Clients:
    """All three of one model."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.openai = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        self.langchain = ChatOpenAI(
            model=model, base_url=url, api_key=KEY, seed=3, max_retries=0, stream_usage=True,
            max_completion_tokens=12,
        )  # fmt: skip
        self.litellm = {"model": f"openai/{model}", "api_base": url, "api_key": KEY}

    def chat(self, **more: Any) -> Any:
        return self.openai.chat.completions.create(
            model=self.model, messages=MESSAGES, **{"seed": 3, "max_tokens": 12, **more}
        )


def streams(clients: Clients) -> dict[str, Any]:
    """What each client gets as a whole, and in pieces."""
    found: dict[str, Any] = {}
    whole = clients.chat(n=2)
    pieces, usage, num = ["", ""], None, 0
    for chunk in clients.chat(n=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            num += 1
    found["openai"] = {
        "whole": [choice.message.content for choice in whole.choices],
        "pieces": pieces,
        "num": num,
        "usage": [whole.usage.model_dump()["total_tokens"], usage.total_tokens if usage else 0],
    }
    ask = {"model": clients.model, "prompt": "w5 w6", "seed": 3, "max_tokens": 12}
    text = clients.openai.completions.create(**ask).choices[0].text
    parts = [
        chunk.choices[0].text for chunk in clients.openai.completions.create(**ask, stream=True)
    ]
    found["completions"] = {"whole": text, "pieces": "".join(parts), "num": len(parts)}
    message = clients.langchain.invoke("w5 w6")
    chunks = list(clients.langchain.stream("w5 w6"))
    found["langchain"] = {
        "whole": message.content,
        "pieces": "".join(str(chunk.content) for chunk in chunks),
        "num": len(chunks),
        "usage": [message.usage_metadata, chunks[-1].usage_metadata or chunks[-2].usage_metadata],
    }
    options = {**clients.litellm, "messages": MESSAGES, "seed": 3, "max_tokens": 12}
    answer = litellm.completion(**options)
    deltas = [part.choices[0].delta.content for part in litellm.completion(**options, stream=True)]
    found["litellm"] = {
        "whole": answer.choices[0].message.content,
        "pieces": "".join(delta or "" for delta in deltas),
        "num": len(deltas),
    }
    try:
        clients.chat(logit_bias={"5": 1})
    except openai.UnprocessableEntityError as error:
        found["refusal"] = str(error)
    with clients.chat(stream=True, max_tokens=2000) as left:
        next(iter(left))  # and away
    return found


def tools(clients: Clients) -> dict[str, Any]:
    """The calls that each client reads, in one piece and streamed."""
    found: dict[str, Any] = {}
    choice = clients.chat(tools=[ADD], max_tokens=200).choices[0]
    calls = [call.model_dump() for call in choice.message.tool_calls]
    found["openai"] = {"calls": calls, "reason": choice.finish_reason}
    back = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
    back.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "w7"})
    found["back"] = clients.openai.chat.completions.create(
        model=clients.model, messages=back, tools=[ADD]
    ).object
    with clients.openai.chat.completions.stream(
        model=clients.model, messages=MESSAGES, tools=[ADD]
    ) as events:
        last = events.get_final_completion().choices[0]
    found["streamed"] = [call.function.arguments for call in last.message.tool_calls or []]
    bound = clients.langchain.bind_tools([ADD])
    message = bound.invoke("w5 w6")
    found["langchain"] = [[call["name"], call["args"]] for call in message.tool_calls]
    whole: Any = None
    for chunk in bound.stream("w5 w6"):
        whole = chunk if whole is None else whole + chunk
    found["langchain_streamed"] = [[call["name"], call["args"]] for call in whole.tool_calls]
    told = ToolMessage("w7", tool_call_id=message.tool_calls[0]["id"])
    found["langchain_back"] = bound.invoke([HumanMessage("w5"), message, told]).type
    answer = litellm.completion(**clients.litellm, messages=MESSAGES, tools=[ADD])
    found["litellm"] = [call.function.arguments for call in answer.choices[0].message.tool_calls]
    parts = litellm.completion(**clients.litellm, messages=MESSAGES, tools=[ADD], stream=True)
    deltas = [part.choices[0].delta for part in parts]
    found["litellm_streamed"] = [
        call.function.arguments for delta in deltas for call in delta.tool_calls or ()
    ]
    return found


def schemas(clients: Clients) -> dict[str, Any]:
    """Answers that must match a schema."""
    more: dict[str, Any] = {"response_format": FORM, "max_tokens": 60}
    whole = clients.chat(**more).choices[0].message.content
    parts = [chunk.choices[0].delta.content for chunk in clients.chat(**more, stream=True)]
    named = {"type": "function", "function": {"name": "add"}}
    forced = clients.chat(tools=[ADD], tool_choice=named, max_tokens=60).choices[0].message
    plain = clients.chat(response_format={"type": "json_object"}, max_tokens=200).choices[0]
    structured = clients.langchain.with_structured_output(CITY, method="json_schema")
    answer = litellm.completion(
        **clients.litellm, messages=MESSAGES, max_tokens=60, response_format=FORM
    )
    return {
        "openai": whole,
        "streamed": "".join(part or "" for part in parts),
        "forced": [call.function.arguments for call in forced.tool_calls or []],
        "object": [plain.message.content, plain.finish_reason],
        "langchain": structured.invoke("w5 w6", max_completion_tokens=60),
        "litellm": answer.choices[0].message.content,
    }


if __name__ == "__main__":
    what, url, model = sys.argv[1:]
    run = {"streams": streams, "tools": tools, "schemas": schemas}[what]
    sys.stdout.write(json.dumps(run(Clients(url, model))))
