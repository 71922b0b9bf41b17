"""Requests that are refused, with the HTTP status that the clients understand.

| status | when                                       | the `tinker` SDK                   |
|--------|--------------------------------------------|------------------------------------|
| 400    | it can never be done as it is written      | raises at once                     |
| 401    | no key, or an unknown one                  | raises at once                     |
| 404    | no such thing, or another tenant's         | raises at once                     |
| 410    | it existed and is over                     | ends its heartbeat                 |
| 413    | too large                                  | raises at once                     |
| 422    | a field is missing or of a wrong type      | raises at once                     |
| 429    | too many now                               | waits and sends it again           |

Never 409 and never 5xx for a wrong request: the SDK repeats those silently for five minutes.
"""

from rookery.errors import EngineDownError, FleetDownError, RunError, ServiceError

__all__ = ["Refusal", "bad", "missing", "status_of"]


class Refusal(ServiceError):
    """A request that is refused."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def status_of(error: Exception) -> int:
    """What an error of ours is answered with."""
    if isinstance(error, Refusal):
        return error.status
    return 503 if isinstance(error, EngineDownError | FleetDownError | RunError) else 400


def bad(sentence: str) -> Refusal:
    """It can never be done as it is written."""
    return Refusal(400, sentence)


def missing(what: str, name: str) -> Refusal:
    """There is no such thing, or it belongs to another tenant: both look alike."""
    return Refusal(404, f"There is no {what} {name!r:.200}.")
