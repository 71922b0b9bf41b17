"""What tokens were drawn from, read from a server's likeliest tokens, or refused."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rookery.errors import FleetError
from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.wire import read_completions, read_kept, sample_fields
from rookery.types import ModelRef, SampleRequest, SamplingParams

BASE = ModelRef(name="base", version="tiny")
SERVER = Capabilities(
    model="tiny", root="tiny", version="0", max_model_len=128, max_num_seqs=None, max_logprobs=20,
    has_token_ids=True, has_label_logprobs=True, has_prompt_logprobs=True,
    has_processed_logprobs=True, has_prefix_cache=False, block_tokens=16, routes=frozenset(),
    max_loras=None, max_cpu_loras=None, max_lora_rank=None, lora_dtype=None,
)  # fmt: skip
HALF = math.log(0.5)


def request(**params: Any) -> SampleRequest:
    return SampleRequest(model=BASE, prompt=(1,), params=SamplingParams(**params))


def test_as_many_tokens_are_asked_for_as_show_all_that_are_kept() -> None:
    def top(**params: Any) -> int:
        return sample_fields(request(**params), capabilities=SERVER).top

    assert top(return_kept=True, top_k=3, top_p=0.8) == 6
    assert top(return_kept=True, top_k=20) == 20
    assert top(return_kept=True, top_k=3, top_logprobs=9) == 9
    assert top(top_k=3) == 0
    assert top(return_kept=True) == 0
    assert top(return_kept=True, top_k=3, temperature=0.0) == 0


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 21}])
def test_a_server_that_cannot_show_them_all_is_refused(cut: dict[str, Any]) -> None:
    with pytest.raises(FleetError, match="set top_k to 1 to 20, start the servers with a higher"):
        sample_fields(request(return_kept=True, **cut), capabilities=SERVER)
    wide = replace(SERVER, max_logprobs=50)
    assert sample_fields(request(return_kept=True, top_k=21), capabilities=wide).top == 42


@pytest.mark.parametrize("is_own_route", [True, False])
def test_tokens_without_a_probability_are_not_kept(is_own_route: bool) -> None:
    """vLLM writes -9999 for minus infinity."""
    choice: dict[str, Any] = {"finish_reason": "length", "text": "x"}
    if is_own_route:
        choice |= {
            "token_ids": [9, 4],
            "token_logprobs": [HALF, 0.0],
            "top": [[[9, 7, 3], [HALF, HALF, -9999.0]], [[4, 1, 2], [0.0, -9999.0, -9999.0]]],
        }
    else:
        tops: list[dict[str, float]] = [
            {"token_id:9": HALF, "token_id:7": HALF, "token_id:3": -9999.0},
            {"token_id:4": 0.0, "token_id:1": -9999.0},
        ]
        logprobs = [HALF, 0.0]
        choice["logprobs"] = {
            "tokens": ["token_id:9", "token_id:4"],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
        }
    asked = request(return_kept=True, top_k=2, max_tokens=2)
    [completion] = read_completions(asked, [choice])
    assert list(completion.kept) == [(7, 9), (4,)]
    assert completion.tokens == (9, 4) and completion.top_logprobs == ()
    [silent] = read_completions(request(top_k=2, max_tokens=2), [choice])
    assert silent.kept == ()


def test_tokens_that_were_not_reported_are_missed() -> None:
    with pytest.raises(FleetError, match=r"0\.500 of the probability is missing"):
        read_kept([{9: HALF}])
    assert list(read_kept([{9: HALF, 2: math.log(0.4999)}])) == [(2, 9)]
