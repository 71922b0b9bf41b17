"""Code for vLLM's own processes: `extension` runs in workers, `token_route` in API processes.

`launch.py` copies this folder to where the servers' Python finds it. Nothing here imports Rookery,
torch and vLLM are imported only when needed, and files import one another relatively.
"""

__all__: list[str] = []
