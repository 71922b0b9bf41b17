"""One server over HTTP: the client, its request bodies, and the server's capabilities."""

__all__: list[str] = []
