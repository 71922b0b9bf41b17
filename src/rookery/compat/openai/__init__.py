"""For clients of OpenAI and of vLLM: `/v1`, and what vLLM has besides. The service
knows none of it.

routes.py   completions and chats: what they ask for, and their answers
stream.py   the same as server-sent events, with tool calls read on the way
vllm.py     health, tokens, adapters by name
"""

__all__: list[str] = []
