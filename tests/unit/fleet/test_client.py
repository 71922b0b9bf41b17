"""The client of one server, over real loopback HTTP."""

import asyncio
import logging
import math
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fleet.stub import VOCABULARY, Stub, logprobs_after, requests, serve

from rookery.errors import FleetError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.client import (
    WANTED,
    Client,
    ClientConfig,
    ServerLost,
    ServerRefusal,
    connection_limit,
    open_session,
)
from rookery.fleet.http.probe import parse_metrics, probe
from rookery.fleet.http.scoring import assemble_score, plan_score
from rookery.fleet.http.wire import (
    encode_body,
    read_choices,
    read_completion,
    read_completions,
    read_kept,
    read_reading,
    sample_fields,
)
from rookery.types import ModelRef, SampleRequest, SamplingParams, Score, ScoreRequest

BASE = ModelRef(name="base", version="tiny")


@asynccontextmanager
async def connect(stub: Stub, **limits: float) -> AsyncIterator[Client]:
    async with serve(stub), open_session() as session:
        yield Client(stub.url + "/v1/", session=session, config=ClientConfig(**limits))


async def score_with(client: Client, capabilities: Capabilities, request: ScoreRequest) -> Score:
    plan = plan_score(request, capabilities=capabilities)
    readings = []
    for part in plan.parts:
        answer = await client.complete(encode_body("tiny", part.fields, [part.prompt]))
        [[choice]] = read_choices(answer, num_prompts=1, n=1)
        readings.append(read_reading(choice))
    return assemble_score(plan, readings)


async def test_probing_reads_what_the_server_can_do() -> None:
    async with connect(Stub()) as client:
        found = await probe(client)
    assert (found.model, found.max_model_len, found.max_num_seqs) == ("tiny", 128, 64)
    assert found.has_token_ids and found.has_label_logprobs and found.has_prompt_logprobs
    assert found.has_processed_logprobs and found.has_prefix_cache and found.block_tokens == 16
    assert (found.max_loras, found.max_lora_rank, found.lora_dtype) == (8, 16, "float32")
    assert found.has_lora_loading and not found.has_worker_calls


async def test_scores_are_exact_by_every_method() -> None:
    stub = Stub(max_model_len=None, block=1)
    tokens = tuple(i % VOCABULARY for i in range(3, 43))

    def expected(start: int) -> list[float]:
        return [logprobs_after("tiny", tokens[:i])[tokens[i]] for i in range(start, len(tokens))]

    after = logprobs_after("tiny", tokens)
    async with connect(stub) as client:
        found = await probe(client)
        for start, labels, top, method in [
            (40, (7, 8), 0, "steps"),
            (38, (7, 8), 0, "steps"),
            (38, (), 0, "steps"),
            (5, (7, 8), 0, "prompt"),
            (5, (), 0, "prompt"),
            (38, (7,), 3, "prompt"),
            (40, (), 3, "steps"),
        ]:
            request = ScoreRequest(
                model=BASE, tokens=tokens, start=start, labels=labels, top_logprobs=top
            )
            assert plan_score(request, capabilities=found).method == method
            stepped = plan_score(request, capabilities=found, has_head=True)
            assert stepped.method == "steps", "prompts are read without adapted output layers"
            score = await score_with(client, found, request)
            assert score.logprobs == pytest.approx(expected(start))
            assert score.label_logprobs == pytest.approx([after[label] for label in labels])
            if top:
                assert len(score.top_logprobs) == len(tokens) - start + 1
                best = sorted(range(VOCABULARY), key=lambda t: -after[t])[:top]
                assert [t for t, _ in score.top_logprobs[-1]] == best


async def test_servers_that_cannot_report_prompts_are_asked_step_by_step() -> None:
    tokens = tuple((7 * i) % VOCABULARY for i in range(30))
    after = logprobs_after("tiny", tokens)
    for fields in (("logprobs", "logprob_token_ids"), ("logprobs",)):
        stub = Stub(fields=fields)
        async with connect(stub) as client:
            found = await probe(client)
            best = sorted(range(VOCABULARY), key=lambda t: -after[t])
            request = ScoreRequest(
                model=BASE, tokens=tokens, start=25, labels=(best[1],), top_logprobs=2
            )
            if "logprob_token_ids" in fields:
                score = await score_with(client, found, request)
                row = [logprobs_after("tiny", tokens[:i])[tokens[i]] for i in range(25, 30)]
                assert score.logprobs == pytest.approx(row)
                assert score.label_logprobs == pytest.approx([after[best[1]]])
                assert [t for t, _ in score.top_logprobs[-1]] == best[:2]
                assert len(score.top_logprobs) == 6
            else:
                with pytest.raises(FleetError, match="--max-logprobs"):
                    await score_with(client, found, request)
        assert not any("prompt_logprobs" in body for body in stub.bodies)


async def test_more_labels_than_a_call_may_carry_are_split() -> None:
    labels = tuple(i % VOCABULARY for i in range(300))
    wide = tuple(range(300))
    async with connect(Stub()) as client:
        found = await probe(client)
        request = ScoreRequest(model=BASE, tokens=(1, 2), start=2, labels=labels)
        score = await score_with(client, found, request)
        plan = plan_score(
            ScoreRequest(model=BASE, tokens=(1, 2), start=2, labels=wide), capabilities=found
        )
    row = logprobs_after("tiny", (1, 2))
    assert score.label_logprobs == pytest.approx([row[label] for label in labels])
    assert [len(part.fields.ids) for part in plan.parts] == [128, 128, 44]


async def test_without_label_logprobs_a_missing_label_is_an_error_not_a_number() -> None:
    stub = Stub(fields=("model", "prompt", "logprobs", "prompt_logprobs"))
    row = logprobs_after("tiny", (1, 2))
    order = sorted(range(VOCABULARY), key=lambda t: -row[t])
    async with connect(stub) as client:
        found = await probe(client)
        near = ScoreRequest(model=BASE, tokens=(1, 2), start=2, labels=(order[3], order[0]))
        score = await score_with(client, found, near)
        assert score.label_logprobs == (row[order[3]], row[order[0]])
        far = ScoreRequest(model=BASE, tokens=(1, 2), start=2, labels=(order[40],))
        with pytest.raises(FleetError, match=rf"\[{order[40]}\].*--max-logprobs"):
            await score_with(client, found, far)


async def test_raw_logprobs_are_refused_where_they_would_be_wrong() -> None:
    async with connect(Stub(processed=False)) as client:
        found = await probe(client)
    for params in (SamplingParams(temperature=0.7), SamplingParams(top_p=0.9)):
        with pytest.raises(FleetError, match="processed_logprobs"):
            sample_fields(SampleRequest(model=BASE, prompt=(1,), params=params), capabilities=found)
    for params in (SamplingParams(temperature=0, top_p=0.5), SamplingParams()):
        sample_fields(SampleRequest(model=BASE, prompt=(1,), params=params), capabilities=found)


async def test_bad_requests_get_a_sentence_before_anything_is_sent() -> None:
    async with connect(Stub()) as client:
        found = await probe(client)

    def fields(prompt: tuple[int, ...], **params: Any) -> object:
        request = SampleRequest(model=BASE, prompt=prompt, params=SamplingParams(**params))
        return sample_fields(request, capabilities=found)

    cases: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
        ((), {}, "at least one"),
        ((1,) * 128, {}, "128 tokens.*at most 127"),
        ((1,), {"max_tokens": 0}, "max_tokens is 0"),
        ((1,), {"temperature": -1.0}, "temperature is -1"),
        ((1,), {"top_p": 0.0}, "top_p is 0"),
        ((1,), {"top_logprobs": 21}, "at most 20"),
        ((1,), {"n": 0}, "n is 0"),
        ((1,), {"seed": -1}, "seed is -1; it must be 0 to 9223372036854775807"),
        ((1,), {"seed": 2**63}, "seed is 9223372036854775808"),
    ]
    for prompt, params, said in cases:
        with pytest.raises(FleetError, match=said):
            fields(prompt, **params)
    cut = sample_fields(
        SampleRequest(model=BASE, prompt=(1,) * 120, params=SamplingParams(max_tokens=50)),
        capabilities=found,
    )
    assert cut.max_tokens == 8


async def test_samples_of_neighbouring_seeds_are_drawn_apart() -> None:
    """vLLM adds the index of a sample to the seed of its request."""
    async with connect(Stub()) as client:
        found = await probe(client)

    def seeds(seed: int, n: int) -> set[int]:
        params = SamplingParams(n=n, seed=seed)
        request = SampleRequest(model=BASE, prompt=(1,), params=params)
        first = sample_fields(request, capabilities=found).seed
        assert first is not None and 0 <= first < 2**63
        return {first + index for index in range(n)}

    assert len(set().union(*(seeds(seed, 4) for seed in range(8)))) == 32
    assert seeds(3, 1) == {3} and not seeds(3, 1) & seeds(2, 2) and seeds(2, 2) == seeds(2, 2)


async def test_a_busy_server_is_asked_again_and_others_are_not() -> None:
    stub = Stub()
    async with connect(stub) as client:
        found = await probe(client)
        body = encode_body("tiny", sample_fields(
            SampleRequest(model=BASE, prompt=(1,), params=SamplingParams(max_tokens=1)),
            capabilities=found,
        ), [(1,)])  # fmt: skip
        stub.failures = [503, 429]
        before = len(stub.bodies)
        await client.complete(body)
        assert len(stub.bodies) == before + 3
        stub.failures = [500]
        with pytest.raises(ServerLost, match=r"failed .500.: as asked") as lost:
            await client.complete(body)
        assert lost.value.status == 500 and not lost.value.is_broken
        stub.failures = [400]
        with pytest.raises(ServerRefusal, match=r"refused .400.: as asked"):
            await client.complete(body)
        stub.failures = [401]
        with pytest.raises(ServerRefusal, match="API key"):
            await client.complete(body)
        assert len(stub.bodies) == before + 6


async def test_a_server_that_hangs_or_dies_is_lost_in_time() -> None:
    stub = Stub(hang=True)
    async with connect(stub, request_s=0.1) as client, open_session() as session:
        with pytest.raises(ServerLost, match=r"within 0.1 s") as late:
            await client.complete(b'{"model":"tiny","prompt":[[1]],"max_tokens":1}')
        assert not late.value.is_broken
        patient = Client(stub.url, session=session)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(_loss(patient))
            await stub.wait_in_flight(1)
            await stub.stop()
        assert call.result().is_broken
        assert not await client.is_healthy()
        with pytest.raises(ServerLost, match=f"can't be reached at {stub.url}") as gone:
            await client.get("/v1/models")
        assert gone.value.is_broken
        await stub.start()


async def _loss(client: Client) -> ServerLost:
    with pytest.raises(ServerLost) as lost:
        await client.complete(b'{"model":"tiny","prompt":[[1]],"max_tokens":1}')
    return lost.value


async def test_answers_that_are_not_whole_are_errors() -> None:
    choice = {
        "index": 0, "text": "x", "finish_reason": "length",
        "logprobs": {"tokens": ["token_id:3"], "token_logprobs": [-9999.0], "top_logprobs": []},
    }  # fmt: skip
    assert read_completion(choice, model=BASE, num_top=0).logprobs == (-math.inf,)
    for wrong, said in [
        ({**choice, "finish_reason": "abort"}, "abort"),
        ({**choice, "logprobs": None}, "without log-probabilities"),
        ({**choice, "logprobs": None, "finish_reason": "abort"}, "ended with .abort., incomplete"),
        ({**choice, "logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}}, "token_id:17"),
        ({**choice, "logprobs": {"tokens": ["token_id:1"], "token_logprobs": [None]}}, "None"),
        ({**choice, "logprobs": {"tokens": ["token_id:1"], "token_logprobs": [math.nan]}}, "nan"),
    ]:
        with pytest.raises(FleetError, match=said):
            read_completion(wrong, model=BASE, num_top=0)
    answers: list[Any] = [{}, [], {"choices": [choice]}, {"choices": [choice, choice]}]
    for answer in answers:
        with pytest.raises(FleetError):
            read_choices(answer, num_prompts=2, n=1)


def test_a_retry_prints_no_bare_word() -> None:
    """Programs that set up no logging see nothing of the library that counts the attempts."""
    handlers = logging.getLogger("stamina").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)


# What tokens were drawn from, read from a server's likeliest tokens, or refused.


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
    with pytest.raises(FleetError, match="Set top_k to 1 to 20, start the servers with a higher"):
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


# Connections within the file descriptors that a process may have.


async def test_more_requests_in_flight_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are in the same process: every connection takes two."""
    allowed = len(os.listdir("/dev/fd")) + 64
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    stubs = [Stub(latency_s=0.01) for _ in range(2)]
    async with serve(*stubs):
        config = FleetConfig(urls=tuple(stub.url for stub in stubs), max_in_flight=8192)
        async with open_fleet(config) as fleet:
            answers = await fleet.sample(requests(fleet.base, 200))
            assert len(answers) == 200 and fleet.pool.num_resent == 0
            assert 2 < sum(stub.num_connections for stub in stubs) <= 32


def test_the_limit_is_raised_as_far_as_allowed_and_half_of_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [1024, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    assert WANTED // 2 - 1000 < connection_limit() < WANTED // 2
    assert limits[0] == WANTED
    limits[:] = [256, 1024]
    assert 256 < connection_limit() < 512 and limits == [1024, 1024]
    limits[:] = [10 * WANTED, 10 * WANTED]
    assert connection_limit() > WANTED and limits[0] == 10 * WANTED


# Reading a server's Prometheus page.


PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/m,{x}\\"y"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prefix_cache_queries_total{engine="0"} 1e+03
vllm:prefix_cache_queries_created{engine="0"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0"} 250.0
vllm:generation_tokens_total{engine="0"} 77.0
vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_engines_are_summed_and_other_lines_skipped() -> None:
    found = parse_metrics(PAGE)
    assert (found.num_running, found.num_waiting) == (7, 2)
    assert (found.prefix_queries, found.prefix_hits, found.hit_rate) == (1000, 250, 0.25)
    assert (found.cache_usage, found.block_tokens, found.has_prefix_cache) == (0.5, 128, True)


def test_values_that_are_no_numbers_are_not_told() -> None:
    page = "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:prefix x\n"
    found = parse_metrics(page + "vllm:kv_cache_usage_perc NaN\n")
    assert (found.num_running, found.num_waiting, found.cache_usage) == (0, 0, 0.0)
    assert found.hit_rate is None and found.block_tokens is None and found.has_prefix_cache is None
