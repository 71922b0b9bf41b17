"""HTTP: one file per group of paths, each a function from the request context to a router.

request_context.py  who is asking, and the body of a request
json_route.py       large bodies and large answers beside the event loop
sessions.py         config, health, capabilities, sessions, telemetry, numbers of refused requests
training.py         models, gradients, steps, saving and loading
sampling.py         sampling sessions, samples, results
checkpoints.py      training runs, checkpoints, downloads; stored turns of chats, as training data
plain.py            /api/v1/sample and /api/v1/adapters, for clients without the SDK
"""

__all__: list[str] = []
