"""What exists because of a peer's formats: a folder for each peer.

openevolve/  OpenEvolve's config files, checkpoints and evolution traces
"""

__all__: list[str] = []
