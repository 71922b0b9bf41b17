"""What tokens were drawn from, read from the likeliest tokens that a server reports.

A server with processed log-probabilities reports minus infinity for what top_k, top_p and min_p
cut off. So with top_k no larger than what it reports, all that is left is among the likeliest.
vLLM's own `--return-sampling-mask` would report more, but a server with it refuses every greedy
request and every one without top_k, those of evaluations and scores too.
"""

import math
from collections.abc import Mapping, Sequence

from rookery.errors import FleetError
from rookery.fleet.http.capabilities import Capabilities
from rookery.types import KeptTokens, SamplingParams

__all__ = ["num_shown_for_kept", "read_kept"]

_TIES = 2
"""Times top_k that are asked for: vLLM keeps all tokens that are as likely as the last of top_k,
and in half precision many are."""
_MISSING = 1e-3
"""More probability than this is not lost by rounding: a kept token was not reported."""


def num_shown_for_kept(params: SamplingParams, capabilities: Capabilities) -> int:
    """How many of the likeliest tokens show all that are kept; 0 when that is not asked."""
    if not (params.return_kept and params.is_cut):
        return 0
    most = capabilities.max_logprobs
    if not 0 < params.top_k <= most:
        raise FleetError(
            f"top_k is {params.top_k}; {capabilities.model} reports at most {most} tokens of each "
            "position, and training with top_p, top_k or min_p needs all that an answer was drawn "
            f"from: set top_k to 1 to {most}, start the servers with a higher --max-logprobs "
            "(launch.max_logprobs), or draw with top_p 1, top_k 0 and min_p 0."
        )
    return min(most, _TIES * params.top_k)


def read_kept(tops: Sequence[Mapping[int, float]]) -> KeptTokens:
    """The tokens of each position that have a probability; FleetError when some are missing."""
    for top in tops:
        missing = 1.0 - math.fsum(map(math.exp, top.values()))
        if missing > _MISSING:
            raise FleetError(
                f"A server reported {len(top)} of the tokens that one was drawn from, and "
                f"{missing:.3f} of the probability is missing: many tokens were as likely as the "
                "last of top_k. Start the servers with a higher --max-logprobs "
                "(launch.max_logprobs), or lower top_k."
            )
    return KeptTokens.of(sorted(t for t, value in top.items() if value > -math.inf) for top in tops)
