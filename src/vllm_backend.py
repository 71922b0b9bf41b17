"""`import vllm_backend`: the functions for one vLLM server, under the name their document uses."""

from rookery.compat.vllm_backend import *  # noqa: F403 - the same names
from rookery.compat.vllm_backend import __all__ as __all__
