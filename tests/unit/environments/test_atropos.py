"""The gateway without HTTP: what is refused, what makes a batch, what survives a restart."""

import asyncio
import itertools
import math
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from environments.groups import make_document, make_group
from fleet.stub import until
from pydantic import ValidationError
from service.tenants import WordCodec

from rookery.compat.atropos import engine_side
from rookery.compat.atropos import feed as feed_module
from rookery.compat.atropos import programs as programs_module
from rookery.compat.atropos.app import make_atropos_app
from rookery.compat.atropos.engine_side import Drawn, EngineSide, SampleIndex, ServingEngine
from rookery.compat.atropos.feed import ClientFeed, GatewayClient, GatewayFeed
from rookery.compat.atropos.gateway import Delivery, Gateway, trained_groups
from rookery.compat.atropos.group_queue import (
    SILENT_S,
    Registration,
    Registry,
    TrainerRegistration,
)
from rookery.compat.atropos.programs import Programs, check_commands, running
from rookery.compat.atropos.scored_group import (
    ScoredGroup,
    check_group,
    complete_groups,
    drawn_sequences,
    pick_batch,
)
from rookery.environments.atropos import EnvironmentCommand
from rookery.errors import ConfigError, RunError, TaskError
from rookery.runs import Run
from rookery.runtime.guard import process_start
from rookery.runtime.retry import Backoff
from rookery.testing import FakeSampler
from rookery.types import (
    Completion,
    KeptTokens,
    ModelRef,
    SampleRequest,
    SamplingParams,
)

TRAINER = TrainerRegistration(batch_size=4, max_token_len=8, num_steps=10)
NAN = float("nan")


def environment(name: str = "gsm8k", **changes: Any) -> Registration:
    values = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": 2}
    return Registration.model_validate({**values, **changes})


def new_run(folder: Path) -> Run:
    return Run.create(folder, kind="gateway", name="gateway", config={})


async def open_gateway(run: Run) -> Gateway:
    """As it is started, with what the run has trained on."""
    return await Gateway.open(run, trainer=TRAINER, vocab_size=97, trained=trained_groups(run))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"masks": [[-100, -100, 7]] * 2}, r"masks have the lengths \[3, 3\] and the tokens"),
        ({"inference_logprobs": None}, "no inference_logprobs"),
        ({"inference_logprobs": [[1, 1, -1]] * 2}, "inference_logprobs have the lengths"),
        ({"inference_logprobs": [[1, 1, 1.0, -1]] * 2}, "is 1.0 at 2, a token that was drawn"),
        ({"inference_logprobs": [[1, 1, NAN, -1]] * 2}, "is nan at 2"),
        ({"inference_logprobs": [[1, 1, -1e30, -1]] * 2}, r"is -1e\+30 at 2.*from -80 to 0"),
        ({"scores": [1.0]}, "2 sequences, 2 masks and 1 scores"),
        ({"scores": [1.0, NAN]}, "score, advantage or ref_logprob is NaN"),
        ({"advantages": [[0.0] * 4, [0.0, 0.0, 0.0, NAN]]}, "NaN or infinite"),
        ({"advantages": [[0.0] * 3] * 2}, "advantages have the lengths"),
        ({"ref_logprobs": [[0.0] * 5] * 2}, "ref_logprobs have the lengths"),
        ({"inference_logprobs": [[1, 1, -95.0, -1]] * 2}, "is -95.0 at 2"),
        ({"ref_logprobs": [[1, 1, 500.0, -1]] * 2}, "ref_logprobs of sequence 0 is 500.0 at 2"),
        ({"ref_logprobs": [[1, 1, NAN, -1]] * 2}, "ref_logprobs of sequence 0 is nan at 2"),
        ({"scores": [1e308, 0.0]}, r"is 1e\+308: send numbers of at most 1e\+12"),
        ({"advantages": [[0.0] * 4, [0.0, 0.0, 0.0, -1e300]]}, r"is -1e\+300"),
        ({"overrides": [{}]}, "2 sequences and 1 overrides"),
        ({"overrides": [{}, {"temperature": "hot"}]}, "the temperature 'hot': send a number"),
        ({"generation_params": {"temperature": -1.0}}, "the temperature -1.0"),
        ({"group_overrides": {"temperature": NAN}}, "the temperature nan"),
        ({"group_overrides": {"temperature": 10**400}}, "the temperature 10000"),
        ({"group_overrides": {"temperature": 1e-300}}, "the temperature 1e-300"),
        ({"messages": [[{"role": "user"}]]}, "2 sequences and 1 lists of messages"),
        ({"tokens": [[5, 6, 7, 97]] * 2}, "token 97, and the model knows 0 to 96"),
        ({"tokens": [[5, 6, 7, -1]] * 2}, "token -1"),
        ({"masks": [[-100] * 4] * 2}, "has no token drawn by the model"),
        ({"masks": [[5, 6, 7, 8]] * 2}, "has its first token drawn"),
        ({"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}, "no sequences"),
    ],
)
def test_what_was_not_drawn_like_this_is_refused(changes: dict[str, Any], said: str) -> None:
    group = ScoredGroup.model_validate(make_document(**changes))
    with pytest.raises(TaskError, match=said):
        check_group(group, vocab_size=97, max_tokens=8)


def test_drawn_tokens_are_those_without_a_mask() -> None:
    [first, _] = drawn_sequences(make_group())
    assert first.tokens == (5, 6, 7, 10)
    assert first.drawn == (2, 3) and first.logprobs == (-0.5, -1.0)


def test_batches_are_whole_packs_in_the_order_they_came() -> None:
    assert pick_batch([(0, 4), (0, 2), (0, 4), (0, 2)], num_sequences=8) == [0, 2]
    assert pick_batch([(0, 4), (0, 2), (0, 2), (0, 4)], num_sequences=8) == [0, 1, 2]
    assert pick_batch([(0, 4), (0, 2)], num_sequences=8) == []
    assert pick_batch([], num_sequences=8) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7, 4, 4, 4, 4], [1, 2, 3, 4]),
        ([6, 4, 6, 4], [0, 2, 1]),
        ([3, 4, 4, 3, 3, 3, 4], [0, 1, 3, 4, 5]),
        ([7, 4, 4], []),
    ],
)
def test_sizes_that_make_no_packs_hold_up_no_batch(sizes: list[int], expected: list[int]) -> None:
    places = pick_batch([(None, size) for size in sizes], num_sequences=16)
    assert sorted(places) == sorted(expected)


def test_an_environment_gets_at_least_its_part() -> None:
    queue = [(0, 2), (0, 2), (0, 2), (1, 2)]
    assert pick_batch(queue, num_sequences=4) == [0, 1]
    assert pick_batch(queue, num_sequences=4, minimums={1: 0.5}) == [3, 0]
    assert pick_batch(queue[:3], num_sequences=4, minimums={1: 0.5}) == [], "it waits for it"


def test_groups_of_other_sizes_make_up_the_size_that_was_said() -> None:
    assert complete_groups([3, 2, 1], 4) == [0, 2]
    assert complete_groups([3, 3], 4) == []
    assert complete_groups([3, 2, 2], 4) == [1, 2]


def test_some_of_many_groups_are_found_that_make_up_a_batch() -> None:
    """By trying each choice, or by keeping each that was tried, this takes minutes."""
    assert complete_groups([7, 5] * 4000, 47_999) == []
    assert len(complete_groups([7, 5] * 4000, 47_988)) == 7_998, "all but a 7 and a 5"
    odd = complete_groups([7] * 1000 + [2] * 1000, 8_001)
    assert sum([7, 2][place >= 1000] for place in odd) == 8_001 and len(set(odd)) == len(odd)
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        target = rng.randint(1, 20)
        found = complete_groups(sizes, target)
        choices = itertools.product((0, 1), repeat=len(sizes))
        is_there = any(sum(itertools.compress(sizes, own)) == target for own in choices)
        assert bool(found) == is_there and found == sorted(set(found))
        assert not found or sum(sizes[place] for place in found) == target


def test_an_environment_that_is_silent_no_longer_holds_up_batches() -> None:
    now = [0.0]
    registry = Registry(TRAINER, clock=lambda: now[0])
    registry.add(environment(min_batch_allocation=0.5))
    assert registry.minimums == {0: 0.5}
    now[0] = SILENT_S
    assert registry.minimums == {}
    registry.note_seen(0)
    assert registry.minimums == {0: 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_token_length": 10**400},
        {"max_token_length": -5},
        {"weight": 1e308},
        {"group_size": 10**400},
        {"desired_name": "a" * 2000},
    ],
)
def test_who_registers_cannot_break_the_parts_of_others(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        environment(**changes)


def test_the_status_counts_in_groups_of_the_environment() -> None:
    registry = Registry(TRAINER)
    registry.add(environment("a", weight=3.0))
    registry.add(environment("a"))
    assert [e.name for e in registry.environments] == ["a_0", "a_1"]
    queue = [make_group(2, env_id=0), make_group(4, env_id=1)]
    status = registry.status(0, queue, step=7)
    assert status["current_step"] == 7 and status["env_weight"] == 0.75
    assert status["self_queue_size"] == 1 and status["max_group_size"] == 4
    assert status["queue_size"] == (2 + 4) // 2
    with pytest.raises(TaskError, match=r"no environment 5; there are: 0 \(a_0\), 1 \(a_1\)"):
        registry.status(5, queue, step=0)


async def test_what_was_accepted_survives_and_is_given_once(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        assert await gateway.register_env(environment()) is None, "the trainer has not started"
        gateway.is_started = True
        await gateway.register_env(environment())
        for scores in ([0.0, 1.0], [0.0, 2.0], [0.0, 3.0]):
            assert await gateway.accept(make_group(env_id=0, scores=scores)) is None
        batch = await gateway.queue.take(4)
        assert [queued.seq for queued in batch] == [1, 2]
    with Run.open(run.path) as run:  # killed before the batch was durable
        gateway = await open_gateway(run)
        assert [e.name for e in gateway.registry.environments] == ["gsm8k_0"]
        batch = await gateway.queue.take(4)
        assert [queued.group.scores[1] for queued in batch] == [1.0, 2.0]
        await run.append("batch", {"groups": [queued.seq for queued in batch]}, key="0")
    with Run.open(run.path) as run:  # killed before it was acknowledged
        gateway = await open_gateway(run)
        assert [group.scores[1] for group in gateway.queue.groups] == [3.0]
        await gateway.queue.acknowledge(batch)
        await gateway.accept(make_group(env_id=0, scores=[0.0, 4.0]))
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        assert [group.scores[1] for group in gateway.queue.groups] == [3.0, 4.0]


async def test_groups_of_other_sizes_wait_for_one_another(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        gateway.is_started = True
        await gateway.register_env(environment(group_size=4))
        assert await gateway.accept(make_group(3, env_id=0)) == 3
        assert not gateway.queue.groups
        assert await gateway.accept(make_group(1, env_id=0)) == 0
        assert [group.size for group in gateway.queue.groups] == [3, 1]


async def test_a_group_that_waits_for_ever_keeps_none_of_the_others_on_disk(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        gateway.is_started = True
        await gateway.register_env(environment(group_size=4))
        assert await gateway.accept(make_group(3, env_id=0)) == 3, "nothing makes it up"
        for step in range(3):
            scores = [float(step), 1.0, 2.0, 3.0]
            await gateway.accept(make_group(4, env_id=0, scores=scores))
            batch = await gateway.queue.take(4)
            await run.append("batch", {"groups": [q.seq for q in batch]}, key=str(step))
            await gateway.queue.acknowledge(batch)
        kept = [bool(entry.data) for entry in run.open_journal().entries(after=0)]
        assert kept == [True, False, False, False]
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        assert not gateway.queue.groups and gateway.queue.buffered_sizes == [3]


async def test_how_a_sequence_was_drawn_is_found_again(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        gateway.samples.note((5, 6, 7, 10), Drawn(step=3, temperature=0.7, is_cut=False))
        await gateway.accept(make_group())
        [queued] = gateway.queue.take_now(2)
        assert queued.draws == (Drawn(step=3, temperature=0.7, is_cut=False), None)
        gateway.samples.note((5, 6, 7, 11), Drawn(step=3, temperature=0.7, is_cut=True))
        with pytest.raises(TaskError, match="drawn with top_p, top_k or min_p"):
            await gateway.accept(make_group())


def test_what_tokens_were_drawn_from_is_found_over_several_answers() -> None:
    samples, none = SampleIndex(), KeptTokens.of(())
    first = Drawn(step=2, temperature=1.0, is_cut=True, kept=KeptTokens.of([(7, 8), (9,)]))
    second = Drawn(step=3, temperature=1.0, is_cut=True, kept=KeptTokens.of([(4, 5, 6)]))
    samples.note((1, 7, 9), first)
    samples.note((1, 7, 9, 2, 5), second)
    found = samples.find((1, 7, 9, 2, 5), drawn=(1, 2, 4))
    assert found is not None and found.step == 2, "its oldest tokens are of that policy"
    assert list(found.kept) == [(7, 8), (9,), (4, 5, 6)]
    found = samples.find((1, 7, 9, 2, 5), drawn=(2, 4))
    assert found is not None and list(found.kept) == [(9,), (4, 5, 6)], "a part of an answer"
    found = samples.find((1, 7, 9, 2, 5, 3), drawn=(1, 2, 4))
    assert found is not None and list(found.kept)[2] == (4, 5, 6), "text after the last answer"
    samples.note((1, 7, 9), Drawn(step=2, temperature=1.0, is_cut=False))
    found = samples.find((1, 7, 9, 2, 5), drawn=(1, 2, 4))
    assert found is not None and list(found.kept) == [(), (), (4, 5, 6)]
    samples.note((1, 7, 9), Drawn(step=2, temperature=1.0, is_cut=True))
    found = samples.find((1, 7, 9, 2, 5), drawn=(1, 2, 4))
    assert found is not None and found.is_cut and found.kept == none, "one of them is not known"
    assert samples.find((1, 7, 9, 2, 6), drawn=(1, 2, 4)) is None
    found = samples.find((1, 7, 9, 2, 5), drawn=(0, 4))
    assert found is not None and found.step == 2, "an answer that is not known is older"


def test_equal_tokens_that_were_drawn_in_several_ways_are_told_apart() -> None:
    """A training draws them with temperature 0.7, then evaluations with top_p and greedily."""
    samples, tokens = SampleIndex(), (1, 7, 9)
    cut = KeptTokens.of([(7, 8), (9,)])
    samples.note(tokens, Drawn(step=3, temperature=0.7, is_cut=False), (-0.5, -1.0))
    samples.note(tokens, Drawn(step=3, temperature=1.0, is_cut=True, kept=cut), (-0.75, 0.0))
    samples.note(tokens, Drawn(step=4, temperature=0.0, is_cut=False), (-0.5, -1.0))
    samples.note(tokens, Drawn(step=4, temperature=0.7, is_cut=False), (-0.625, -1.0))

    def find(*logprobs: float) -> Drawn | None:
        return samples.find(tokens, drawn=(1, 2), logprobs=logprobs)

    assert find(-0.5, -1.0) == Drawn(step=3, temperature=0.7, is_cut=False)
    assert find(-0.75, 0.0) == Drawn(step=3, temperature=1.0, is_cut=True, kept=cut)
    assert find(-0.625, -1.0) == Drawn(step=4, temperature=0.7, is_cut=False)
    assert find() == Drawn(step=4, temperature=0.7, is_cut=False), "the newest"
    only_last = samples.find(tokens, drawn=(2,), logprobs=(0.0,))
    assert only_last is not None and list(only_last.kept) == [(9,)]


def test_answers_of_a_sequence_have_one_temperature() -> None:
    samples = SampleIndex()
    samples.note((1, 7), Drawn(step=0, temperature=0.5, is_cut=False))
    samples.note((1, 7, 2, 5), Drawn(step=0, temperature=1.0, is_cut=False))
    found = samples.find((1, 7, 2, 5), drawn=(3,))
    assert found is not None and found.temperature == 1.0, "the first is not trained on"
    with pytest.raises(TaskError, match=r"with the temperatures 0\.5 and 1: draw all"):
        samples.find((1, 7, 2, 5), drawn=(1, 3))


async def test_what_tokens_were_drawn_from_survives_with_their_group(tmp_path: Path) -> None:
    kept = KeptTokens.of([(7, 9), (10, 11)])
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        drawn = Drawn(step=3, temperature=0.7, is_cut=True, kept=kept)
        gateway.samples.note((5, 6, 7, 10), drawn)
        await gateway.accept(make_group())
    with Run.open(run.path) as run:
        again = await open_gateway(run)
        [queued] = again.queue.take_now(2)
        assert queued.draws == (drawn, None)


class AskedEngine(FakeSampler):
    """Keeps how it was asked."""

    base = ModelRef(name="base", version="m")
    loaded: tuple[ModelRef, ...] = ()

    def __init__(self) -> None:
        super().__init__(reply=lambda request, index: (request.prompt[-1] + index,))
        self.asked: list[SamplingParams] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        self.asked += [request.params for request in requests]
        return await super().sample(requests)


@pytest.mark.parametrize(
    ("num_kept", "given", "asked"),
    [
        (None, {"top_p": 0.9}, {"top_k": 0, "return_kept": True}),
        (20, {"top_p": 0.9}, {"top_k": 10, "return_kept": True}),
        (20, {"top_k": 15}, {"top_k": 15, "return_kept": True}),
        (20, {"top_k": 50}, {"top_k": 50, "return_kept": False}),
        (1, {"top_p": 0.9}, {"top_k": 0, "return_kept": False}),
        (0, {"top_p": 0.9}, {"top_k": 0, "return_kept": False}),
        (20, {}, {"top_k": 0, "return_kept": False}),
        (20, {"top_p": 0.9, "temperature": 0.0}, {"top_k": 0, "return_kept": False}),
    ],
)
async def test_an_engine_is_asked_for_what_tokens_are_drawn_from_as_far_as_it_tells(
    num_kept: int | None, given: dict[str, Any], asked: dict[str, Any]
) -> None:
    engine, samples = AskedEngine(), SampleIndex()
    serving = cast(ServingEngine, engine)  # what else engines do is not asked for
    side = EngineSide(serving, codec=WordCodec(), samples=samples, num_kept=num_kept)
    [answer] = await side.draw((5, 6), SamplingParams(max_tokens=1, **given))
    [params] = engine.asked
    assert {name: getattr(params, name) for name in asked} == asked
    found = samples.find((5, 6, *answer.tokens), drawn=(2,))
    assert found is not None and bool(found.kept) == asked["return_kept"]


async def test_a_trainer_elsewhere_is_given_a_batch_until_it_asks_for_the_next(
    tmp_path: Path,
) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        delivery = Delivery(gateway)
        assert await delivery.next(0) == (1, [])
        for score in range(1, 5):
            await gateway.accept(make_group(scores=[0.0, float(score)]))
        first = await delivery.next(0)
        assert first[0] == 1 and await delivery.next(0) == first, "it may not have arrived"
        number, second = await delivery.next(1)
        assert number == 2 and [queued.seq for queued in second] == [3, 4]
        assert await delivery.next(None) == (3, []), "a trainer that names none has the last one"
        assert trained_groups(run) == {1, 2, 3, 4}
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        assert await Delivery(gateway).next(2) == (3, [])


async def test_a_batch_that_arrived_is_not_given_again_by_the_next_process(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        for score in range(1, 7):
            await gateway.accept(make_group(scores=[0.0, float(score)]))
        number, first = await Delivery(gateway).next(0)
        assert number == 1 and [queued.seq for queued in first] == [1, 2]
    with Run.open(run.path) as run:  # killed before the trainer asked for the next one
        gateway = await open_gateway(run)
        number, second = await Delivery(gateway).next(1)
        assert number == 2 and [queued.seq for queued in second] == [3, 4]
        assert trained_groups(run) == {1, 2}
    with Run.open(run.path) as run:  # and the second one never arrived
        gateway = await open_gateway(run)
        number, again = await Delivery(gateway).next(1)
        assert number == 2 and [queued.seq for queued in again] == [3, 4]


async def test_who_leaves_no_longer_holds_up_who_waits_for_a_batch(tmp_path: Path) -> None:
    """No group comes meanwhile: the others have sent as many as they send ahead."""
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        gateway.is_started = True
        await gateway.register_env(environment("rare", min_batch_allocation=0.5))
        await gateway.register_env(environment("often"))
        waiting = asyncio.create_task(gateway.queue.take(4))
        for _ in range(4):
            await gateway.accept(make_group(env_id=1))
        assert not waiting.done()
        await gateway.disconnect_env(0)
        async with asyncio.timeout(10):
            assert [queued.seq for queued in await waiting] == [1, 2]


async def test_a_run_goes_on_while_programs_of_others_play(tmp_path: Path) -> None:
    """Its own have ended; when the others leave, it says so."""
    command = EnvironmentCommand(command=("true",))
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        side = EngineSide(
            cast(ServingEngine, AskedEngine()), codec=WordCodec(), samples=gateway.samples
        )
        gateway.is_started = True
        await gateway.register_env(environment())
        async with running([command], words={}, logs=tmp_path) as programs, asyncio.timeout(30):
            feed = GatewayFeed(gateway, side, programs=programs, limit_s=30)
            await programs.ended()
            taking = asyncio.create_task(feed.take(0, after=0))
            for _ in range(2):
                await gateway.accept(make_group(env_id=0))
            assert [group.number for group in (await taking).groups] == [1, 2]
            await gateway.disconnect_env(0)
            with pytest.raises(TaskError, match="No environment is left: environment 0 ended"):
                await feed.take(1, after=1)


async def test_a_run_that_waits_says_how_far_its_batch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "TELL_S", 0.02)
    told: asyncio.Queue[str] = asyncio.Queue()

    async def until_told(words: str) -> None:
        while not re.search(words, await told.get()):
            pass

    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        side = EngineSide(
            cast(ServingEngine, AskedEngine()), codec=WordCodec(), samples=gateway.samples
        )
        gateway.is_started = True
        await gateway.register_env(environment())
        programs = Programs([], words={}, logs=tmp_path)
        feed = GatewayFeed(gateway, side, programs=programs, limit_s=30, say=told.put_nowait)
        async with asyncio.timeout(20):
            taking = asyncio.create_task(feed.take(0, after=0))
            await until_told("waiting for a batch: 0 of 4 sequences .* of 0 answers")
            side.num_answers, side.num_tokens = 16, 640
            await until_told(r"of 16 answers .*tokens/s\); .* answers are all worth the same")
            await gateway.accept(make_group(env_id=0))
            await until_told(r"2 of 4 sequences have come in .*; the rest takes about \d+ s")
            await gateway.accept(make_group(env_id=0))
            assert len((await taking).groups) == 2
        late = GatewayFeed(gateway, side, programs=programs, limit_s=0.01)
        with pytest.raises(TaskError, match=r"0 of 4 sequences have come in 0 s, of 0 answers"):
            await late.take(1, after=1)


async def test_a_program_that_cannot_be_started_any_more_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script = tmp_path / "fails.sh"
    script.write_text("#!/bin/sh\nrmdir $PWD\nexit 1\n")
    script.chmod(0o755)
    command = EnvironmentCommand(command=(str(script),), folder=folder, restarts=1)
    async with running([command], words={}, logs=tmp_path) as programs, asyncio.timeout(30):
        assert "environment 0 cannot be started" in await programs.ended()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inference_logprobs": [[NAN, 1.0, -0.5, -1.0], [1.0, 1.0, -0.5, -2.0]]}, "NaN or inf"),
        ({"distill_logprobs": [[[-math.inf]]]}, "NaN or infinite"),
        ({"env_id": 3}, "There is no environment 3"),
        ({"size": 17}, "17 sequences, and a batch of the trainer has 16"),
    ],
)
async def test_of_a_list_with_one_bad_group_none_is_kept(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Who is refused sends all of it again."""
    trainer = TrainerRegistration(batch_size=16, max_token_len=8)
    with new_run(tmp_path / "run") as run:
        gateway = await Gateway.open(run, trainer=trainer, vocab_size=97)
        with pytest.raises(TaskError, match=said):
            await gateway.accept_all([make_group(), make_group(**changes)])
        assert not gateway.queue.groups and gateway.num_accepted == 0
        assert await gateway.accept_all([make_group(), make_group(3)]) == [None, None]
        assert [group.size for group in gateway.queue.groups] == [2, 3]
    with Run.open(run.path) as run:
        again = await Gateway.open(run, trainer=trainer, vocab_size=97)
        assert [group.size for group in again.queue.groups] == [2, 3]


def test_an_environment_without_its_folder_is_refused(tmp_path: Path) -> None:
    command = EnvironmentCommand(command=("true",), folder=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"environments\.0\.folder is .*none, and there is none"):
        check_commands([command])


async def test_what_a_trainer_lost_is_given_to_the_next_one(tmp_path: Path) -> None:
    """It registers, names no number, and the one before was killed while it trained."""
    with new_run(tmp_path / "run") as run:
        gateway = await open_gateway(run)
        delivery = Delivery(gateway)
        for _ in range(4):
            await gateway.accept(make_group())
        delivery.begin()
        number, first = await delivery.next(None)
        delivery.begin()
        assert await delivery.next(None) == (number, first)
        following = await delivery.next(None)
        assert following[0] == number + 1 and following[1] != first


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Events of these kinds cannot be written."""
    kinds: set[str] = set()
    append = Run.append

    async def append_others(self: Run, kind: str, payload: Any, *, key: str = "") -> Any:
        if kind in kinds:
            raise RunError("The disk is full.")
        return await append(self, kind, payload, key=key)

    monkeypatch.setattr(Run, "append", append_others)
    return kinds


@pytest.mark.parametrize("kind", ["given", "batch"])
async def test_a_batch_that_cannot_be_written_is_neither_lost_nor_given_twice(
    kind: str, unwritable: set[str], tmp_path: Path
) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        delivery = Delivery(gateway)
        for score in range(6):
            await gateway.accept(make_group(scores=[0.0, float(score)]))
        given: list[tuple[int, list[int]]] = []
        for _ in range(3):
            number = given[-1][0] if given else 0
            unwritable.add(kind)
            if kind == "given" or given:
                with pytest.raises(RunError):
                    await delivery.next(number)
            unwritable.clear()
            number, batch = await delivery.next(number)
            given.append((number, [queued.seq for queued in batch]))
        assert given == [(1, [1, 2]), (2, [3, 4]), (3, [5, 6])]


async def test_an_environment_that_could_not_be_written_has_no_number(
    unwritable: set[str], tmp_path: Path
) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        gateway.is_started = True
        unwritable.add("environment")
        with pytest.raises(RunError):
            await gateway.register_env(environment("first"))
        unwritable.clear()
        names = ("a", "b", "c")
        found = await asyncio.gather(*(gateway.register_env(environment(name)) for name in names))
        assert [own.id for own in found if own is not None] == [0, 1, 2]
        await gateway.accept(make_group(env_id=2))
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        assert [own.name for own in gateway.registry.environments] == ["a_0", "b_0", "c_0"]
        assert [group.env_id for group in gateway.queue.groups] == [2]


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


async def test_a_program_is_ended_also_when_its_end_is_cancelled(tmp_path: Path) -> None:
    """A second Ctrl-C while programs are asked to end must not leave one that does not listen."""
    command = EnvironmentCommand(command=(sys.executable, "-c", DEAF), folder=tmp_path)
    pids: list[int] = []

    async def play() -> None:
        async with running([command], words={}, logs=tmp_path) as programs:
            log = tmp_path / "environment-0.log"
            await until(lambda: log.exists() and "deaf" in log.read_text())
            pids.extend(programs.pids.values())
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    await until(lambda: pids)
    playing.cancel()
    await asyncio.sleep(0.1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: not process_start(pids[0]))
    await asyncio.sleep(0.1)  # asyncio closes what it had of it


async def test_a_sequence_that_a_run_api_passed_on_is_not_too_long_for_the_trainer() -> None:
    class RunApi:
        async def batch(self, *, after: int) -> tuple[int, Sequence[ScoredGroup]]:
            return after + 1, [make_group()]

    client = cast(GatewayClient, RunApi())
    feed = ClientFeed(client, vocab_size=97, max_tokens=3, limit_s=5)
    batch = await feed.take(0, after=0)
    assert ["takes 3 at most" in group.error for group in batch.groups] == [True]


async def test_half_a_group_of_who_has_gone_is_not_refused(tmp_path: Path) -> None:
    """A run says what was refused when no batch comes: this was nothing wrong."""
    scope = {
        "type": "http", "method": "POST", "path": "/scored_data", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    received: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"tokens": [[5,', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return received.pop(0) if len(received) > 1 else received[0]

    async def send(_: Any) -> None: ...

    with new_run(tmp_path / "run") as run:
        gateway = await open_gateway(run)
        app = make_atropos_app(gateway, delivery=None, side=None, key="", limit_bytes=10**6)
        await app(scope, receive, send)
    assert gateway.num_refused == 0


async def test_a_number_that_was_never_given_acknowledges_nothing(tmp_path: Path) -> None:
    """A trainer that goes on from another gateway's batches."""
    with new_run(tmp_path / "run") as run:
        gateway = await open_gateway(run)
        delivery = Delivery(gateway)
        for _ in range(4):
            await gateway.accept(make_group())
        first = await delivery.next(50)
        assert await delivery.next(50) == first, "the answer was lost on its way"
        assert (await delivery.next(first[0]))[0] == first[0] + 1


async def test_a_program_that_fails_often_is_started_again_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_module, "RESTARTS", Backoff(first_s=1e-6, longest_s=1e-6))
    command = EnvironmentCommand(command=("/nowhere",), folder=tmp_path, restarts=2000)
    programs = Programs([command], words={}, logs=tmp_path / "nowhere")
    async with asyncio.timeout(30):
        await programs.keep(0)
        assert "cannot be started" in await programs.ended()


def test_sizes_that_make_no_packs_do_not_take_the_room_of_a_minimum() -> None:
    """The group of 5 is older than those of 8 that make the batch with the other's part."""
    queue = [(0, 5), (0, 8), (1, 8)]
    assert pick_batch(queue, num_sequences=16, minimums={0: 0.25, 1: 0.5}) == [1, 2]


@pytest.mark.parametrize("words", ["NaN", "minus Infinity"])
async def test_words_are_no_numbers(words: str, tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        messages = [[{"role": "user", "content": words}]] * 2
        await gateway.accept(make_group(messages=messages))
        assert gateway.queue.groups[0].messages == messages
        with pytest.raises(TaskError, match="has a NaN or infinite number"):
            await gateway.accept(make_group(group_overrides={"x": NAN}))


def test_what_tokens_were_drawn_from_is_forgotten_before_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_side, "MAX_KEPT_BYTES", 8)
    samples = SampleIndex()
    for token in (5, 6, 7):
        kept = KeptTokens.of([(token,)])
        samples.note((1, token), Drawn(step=0, temperature=1.0, is_cut=True, kept=kept))
    found = [samples.find((1, token), drawn=(1,)) for token in (5, 6, 7)]
    assert [len(own.kept) for own in found if own is not None] == [0, 1, 1]
    assert all(own is not None and own.is_cut for own in found), (
        "it is refused, not trained wrongly"
    )
