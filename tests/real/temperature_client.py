"""Run by a Python that has the tinker SDK: are log-probabilities those of the temperature?

python temperature_client.py MODEL      # with TINKER_BASE_URL and TINKER_API_KEY

For tokens i and j drawn at temperature t: log p_t(i) - log p_t(j) = (log p_1(i) - log p_1(j)) / t.
"""

import itertools
import json
import sys
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 9, 14, 20]
TEMPERATURES = (0.5, 0.7, 1.0, 1.5)
NUM_DRAWS = 24


def draw(sampler: Any, temperature: float, *, num: int, max_tokens: int) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    drawn = sampler.sample(prompt=prompt, num_samples=num, sampling_params=params).result()
    return drawn.sequences


def scored(sampler: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities at temperature 1 of tokens behind the prompt."""
    whole = types.ModelInput.from_ints([*PROMPT, *tokens])
    return list(sampler.compute_logprobs(whole).result())[len(PROMPT) :]


def largest_gap(sampler: Any, temperature: float) -> tuple[int, float]:
    """The number of pairs, and how far the worst is from what the temperature makes of it."""
    sequences = draw(sampler, temperature, num=NUM_DRAWS, max_tokens=1)
    hot = {sequence.tokens[0]: sequence.logprobs[0] for sequence in sequences}
    plain = {token: scored(sampler, [token])[0] for token in hot}
    gaps = [
        abs((hot[i] - hot[j]) - (plain[i] - plain[j]) / temperature)
        for i, j in itertools.combinations(hot, 2)
    ]
    return len(gaps), max(gaps, default=0.0)


def main(model: str) -> dict[str, Any]:
    sampler = tinker.ServiceClient().create_sampling_client(base_model=model)
    [sequence] = draw(sampler, 1.0, num=1, max_tokens=8)
    return {
        "temperatures": [largest_gap(sampler, temperature) for temperature in TEMPERATURES],
        "drawn": list(sequence.logprobs),
        "scored": scored(sampler, list(sequence.tokens)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)  # noqa: T201
