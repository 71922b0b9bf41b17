"""HTTP: one file per group of paths, each a function from the request context to a router.

gate.py         who is asking, and the body of a request
sessions.py     config, health, capabilities, sessions, telemetry
training.py     models, gradients, steps, saving and loading
sampling.py     sampling sessions and samples
gaps.py         numbers of refused requests
futures.py      results
checkpoints.py  training runs, checkpoints, downloads
plain.py        /api/v1/sample and /api/v1/adapters, for clients without the SDK
openai.py       /v1 for OpenAI clients
sequences.py    stored turns of chats, as training data
vllm.py         what clients of vLLM ask for besides
"""

__all__: list[str] = []
