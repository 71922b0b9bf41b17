"""The Atropos API over HTTP, for environments and trainers of Atropos.

app.py            the application: keys, limits, compression, the thirteen routes of `run-api`
engine.py         the routes that environments ask the engine by
"""

from rookery.service.atropos.app import make_atropos_app

__all__ = ["make_atropos_app"]
