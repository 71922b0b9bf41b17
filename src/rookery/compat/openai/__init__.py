"""Routes for clients of OpenAI and of vLLM. The service itself does not depend on them.

routes.py   completions and chats: requests and answers
stream.py   the same as server-sent events, with tool calls read on the way
vllm.py     health, tokens, adapters by name
"""

__all__: list[str] = []
