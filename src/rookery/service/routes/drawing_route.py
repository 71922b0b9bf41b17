"""Routes that draw while their client waits: what nobody waits for is not drawn to its end."""

import asyncio

from fastapi import Request, Response

from rookery.service.routes.json_route import Handler, JsonRoute

__all__ = ["DrawingRoute"]

CLIENT_CLOSED = 499


class DrawingRoute(JsonRoute):
    """Ends what it computes when nobody waits for it: a client that was killed, or lost patience
    and asks again, would leave answers as long as the context to be drawn."""

    def answering(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            await request.body()  # kept for the handler: what is received after it is the end
            answering = asyncio.create_task(handler(request))
            leaving = asyncio.create_task(_left(request))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return await answering if answering.done() else Response(status_code=CLIENT_CLOSED)
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)

        return handle


async def _left(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
