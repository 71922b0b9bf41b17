"""What exists because of a peer's formats: a folder for each peer.

atropos/     the gateway that Atropos environments send groups to, and the flags of its trainer
openevolve/  OpenEvolve's config files, checkpoints and evolution traces
"""

__all__: list[str] = []
