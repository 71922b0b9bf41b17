"""One server over HTTP: the client, the bodies of its requests, and what it can do."""

__all__: list[str] = []
