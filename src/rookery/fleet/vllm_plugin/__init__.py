"""Runs inside vLLM's own processes: `extension` in its workers, `token_route` in its API processes.

`launch.py` copies this folder to where the servers' Python finds it. So nothing here imports
anything of Rookery, and torch and vLLM only when called; the files import one another relatively.
"""

__all__: list[str] = []
