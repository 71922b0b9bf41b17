"""`import vllm_backend`: the same as `rookery.vllm_backend`, under the name its document uses."""

from rookery.vllm_backend import *  # noqa: F403 - the same names
from rookery.vllm_backend import __all__ as __all__
