"""Formats and protocols of other programs: a folder for each peer.

atropos/       the gateway that Atropos environments send groups to, and the flags of its trainer
openai/        the routes of the service for clients of OpenAI and of vLLM
openevolve/    OpenEvolve's config files, checkpoints and evolution traces
tinker/        the protocol of the tinker SDK: format and routes of the service, and its client
vllm_backend/  the functions of `import vllm_backend`
serving.py     the service with the formats and routes of its peers
"""

__all__: list[str] = []
