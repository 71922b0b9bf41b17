"""Answers of the token route wait in vLLM's scheduler until they are whole; all others do not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import zmq

from rookery.fleet.vllm_plugin.whole_answers import WHOLE, HeldAnswers, send_copies


class Lists(NamedTuple):
    """As vLLM's `LogprobsLists`."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


def output(request: str, token: int, *, reason: str | None = None, **fields: Any) -> Any:
    """What vLLM's scheduler makes of one token."""
    given = {
        "request_id": request,
        "new_token_ids": [token],
        "new_logprobs": Lists(np.array([[token]]), np.array([[-token / 10]]), np.array([1])),
        "new_prompt_logprobs_tensors": None,
        "prefill_stats": None,
        "events": None,
        "finish_reason": reason,
    }
    return SimpleNamespace(**{**given, **fields})


def begin(answers: HeldAnswers, *names: str, kind: str = "FINAL_ONLY", stop: str = "") -> None:
    """Add requests as vLLM's scheduler gets them."""
    params = SimpleNamespace(output_kind=SimpleNamespace(name=kind), stop=[stop] if stop else [])
    for name in names:
        answers.add(SimpleNamespace(request_id=name, sampling_params=params))


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def answers(request: pytest.FixtureRequest) -> HeldAnswers:
    return HeldAnswers(has_versions=request.param)


def read(answers: HeldAnswers, steps: list[list[Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of every request as vLLM's API process puts them together."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for step in steps:
        for one in answers.ready(step):
            tokens, logprobs = found.setdefault(one.request_id, ([], []))
            tokens += one.new_token_ids
            if one.new_logprobs is not None:
                logprobs += one.new_logprobs.logprobs[:, 0].tolist()
    return found


def test_the_api_process_reads_what_it_would_read(answers: HeldAnswers) -> None:
    one, other = f"0_{WHOLE}a-0", f"1_{WHOLE}a-0"
    begin(answers, one, other)
    steps = [
        [output(one, 1), output(other, 5)],
        [output(one, 2), output(other, 6, reason="stop")],
        [output(one, 3, reason="length")],
    ]
    assert read(answers, steps) == {
        one: ([1, 2, 3], [-0.1, -0.2, -0.3]),
        other: ([5, 6], [-0.5, -0.6]),
    }


def test_an_answer_without_versions_is_sent_once() -> None:
    answers = HeldAnswers(has_versions=False)
    name = f"{WHOLE}a-0"
    begin(answers, name)
    assert answers.ready([output(name, 1, prefill_stats="prompt")]) == []
    assert answers.ready([output(name, 2, events=["preempted"])]) == []
    [last] = answers.ready([output(name, 3, reason="stop", events=["stopped"])])
    assert last.new_token_ids == [1, 2, 3]
    assert last.prefill_stats == "prompt" and last.events == ["preempted", "stopped"]
    assert last.new_logprobs.sampled_token_ranks.tolist() == [1, 1, 1]


def test_tokens_that_weights_are_noted_for_come_at_once() -> None:
    answers = HeldAnswers(has_versions=True)
    name = f"{WHOLE}a-0"
    begin(answers, name)
    for token in (1, 2):
        [drawn] = answers.ready([output(name, token)])
        assert drawn.new_token_ids == [token] and drawn.new_logprobs is None
    [last] = answers.ready([output(name, 3, reason="stop")])
    assert last.new_token_ids == [3]
    assert last.new_logprobs.logprobs[:, 0].tolist() == [-0.1, -0.2, -0.3]


def test_requests_of_others_are_left_alone(answers: HeldAnswers) -> None:
    begin(answers, "cmpl-a-0")
    drawn = output("cmpl-a-0", 1)
    assert answers.ready([drawn]) == [drawn]
    assert drawn.new_logprobs is not None


def test_steps_have_the_columns_of_whoever_wants_most(answers: HeldAnswers) -> None:
    """Each step of vLLM has a table for all requests in it."""
    name = f"{WHOLE}a-0"
    begin(answers, name)

    def drawn(token: int, width: int, **fields: Any) -> Any:
        likely = np.arange(width) + token
        lists = Lists(likely[None], -likely[None] / 10, np.array([1]))
        return output(name, token, new_logprobs=lists, **fields)

    answers.ready([drawn(1, 2)])
    answers.ready([drawn(5, 21)])
    [last] = answers.ready([drawn(7, 3, reason="stop")])
    assert last.new_logprobs.logprob_token_ids.tolist() == [[1, 2], [5, 6], [7, 8]]
    assert last.new_logprobs.logprobs.tolist() == [[-0.1, -0.2], [-0.5, -0.6], [-0.7, -0.8]]
    assert last.new_logprobs.sampled_token_ranks.tolist() == [1, 1, 1]


@pytest.mark.parametrize("read", [{"kind": "DELTA"}, {"stop": "."}])
def test_a_name_alone_holds_nothing_back(answers: HeldAnswers, read: dict[str, str]) -> None:
    """What a client calls its request is a part of the id."""
    name = f"cmpl-{WHOLE}mine-0"
    begin(answers, name, **read)
    drawn = output(name, 1)
    assert answers.ready([drawn]) == [drawn]
    assert drawn.new_logprobs is not None


def test_an_answer_without_log_probabilities_has_none(answers: HeldAnswers) -> None:
    name = f"{WHOLE}a-0"
    begin(answers, name)
    answers.ready([output(name, 1, new_logprobs=None)])
    [last] = answers.ready([output(name, 2, reason="stop", new_logprobs=None)])
    assert last.new_logprobs is None


def test_a_stopped_request_leaves_nothing_behind(answers: HeldAnswers) -> None:
    name = f"{WHOLE}a-0"
    begin(answers, name)
    answers.ready([output(name, 1)])
    answers.keep(["another"])
    [last] = answers.ready([output(name, 2, reason="stop")])
    assert last.new_token_ids == [2] and len(last.new_logprobs.logprobs) == 1


def test_what_is_not_joined_is_not_held(answers: HeldAnswers) -> None:
    name = f"{WHOLE}a-0"
    begin(answers, name)
    answers.ready([output(name, 1)])
    [more] = answers.ready([output(name, 2, routed_experts=np.zeros(3))])
    assert more.new_token_ids[-1] == 2 and len(more.new_logprobs.logprobs) == 2
    [last] = answers.ready([output(name, 3, reason="stop")])
    assert last.new_token_ids == [3] and len(last.new_logprobs.logprobs) == 1


def test_a_message_is_not_overwritten_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's output thread: one buffer, used again when the tracker of the last part is done."""
    monkeypatch.setattr(zmq, "COPY_THRESHOLD", zmq.COPY_THRESHOLD)
    send_copies()
    place, numbers, buffer = f"ipc://{tmp_path}/outputs", range(40), bytearray()
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as end:
        out.bind(place)
        end.connect(place)
        for number in numbers:
            buffer[:] = bytes([number]) * 10**6
            tracker = out.send_multipart([buffer, b"a small array"], copy=False, track=True)
            assert tracker is not None and tracker.done
        received = [end.recv_multipart()[0] for _ in numbers]
    assert received == [bytes([number]) * 10**6 for number in numbers]
