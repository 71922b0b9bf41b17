"""The HTTP server that the service and the gateway share."""

import socket

from rookery.compose.http_server import listen_all


def test_an_answer_does_not_wait_for_acknowledgements() -> None:
    """Connections get the option from the port they came to."""
    with (
        listen_all("127.0.0.1", [0], remedy="") as [listener],
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
