"""The parts of the grpo loop by themselves: advantages, order of tasks, batches, data, config."""

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments.groups import make_group
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import binom

from rookery.compat.atropos.feed import AtroposSource, FedBatch, FedGroup
from rookery.embedded import EngineConfig
from rookery.errors import TaskError, TrainError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.batch import (
    ADVANTAGES,
    Batch,
    BatchCounts,
    DrawnGroup,
    DrawnRollout,
    decode_batch,
    encode_batch,
    is_equal,
)
from rookery.loops.grpo.checkpoints import Selection
from rookery.loops.grpo.group_source import BatchDrawer, GroupSource, Policy, TaskOrder, num_for
from rookery.loops.grpo.policy_trainer import make_data, mean_gap
from rookery.loops.grpo.sweep import JointTrainer
from rookery.runs import Run
from rookery.seeding import stream
from rookery.tasks.scorers import ExactConfig
from rookery.tasks.splits import SplitsConfig
from rookery.tasks.taskset import Taskset
from rookery.types import (
    Completion,
    Draw,
    Evaluation,
    Group,
    KeptTokens,
    ModelRef,
    Rollout,
    Task,
    TokenSequence,
)

TASKSET = {"type": "generated", "generator": "arithmetic"}
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=9)


def make_config(**values: object) -> GrpoConfig:
    return GrpoConfig.model_validate({"tasksets": [TASKSET], **values})


def rng() -> np.random.Generator:
    return stream(0, "test")


def make_batch() -> Batch:
    def rollout(tokens: tuple[int, ...], reward: float) -> DrawnRollout:
        sequence = TokenSequence(
            tokens=(5, 6, *tokens),
            drawn=tuple(range(2, 2 + len(tokens))),
            logprobs=tuple(-1 / (3 + token) for token in tokens),
            kept=KeptTokens.of([(token, 11) for token in tokens]),
        )
        return DrawnRollout(sequences=(sequence,), text="tëxt", reward=reward)

    group = DrawnGroup(position=7, task="t/7", rollouts=(rollout((7, 8), 1.0), rollout((9,), 0.0)))
    counts = BatchCounts(num_rollouts=4, num_failed=0, num_equal=1, num_tokens=5, mean_reward=1 / 3)
    return Batch(
        step=3,
        model=ModelRef(name="policy", version="ab"),
        model_step=2,
        groups=(group,),
        next_position=9,
        counts=counts,
    )


@given(REWARDS.filter(lambda rewards: not is_equal(rewards)))
def test_advantages_of_a_group_sum_to_zero_and_rank_as_the_rewards(rewards: list[float]) -> None:
    for name in ("group_relative", "leave_one_out", "no_std"):
        own = ADVANTAGES[name](rewards, rng=rng())
        assert math.isclose(math.fsum(own), 0.0, abs_tol=1e-6)
        for (a, x), (b, y) in itertools.combinations(zip(own, rewards, strict=True), 2):
            assert a >= b if x > y else a <= b if x < y else math.isclose(a, b)


def test_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    third = math.sqrt(3)
    assert ADVANTAGES["group_relative"](rewards, rng=rng()) == pytest.approx(
        (third, -1 / third, -1 / third, -1 / third)
    )
    assert ADVANTAGES["leave_one_out"](rewards, rng=rng()) == pytest.approx(
        (1.0, -1 / 3, -1 / 3, -1 / 3)
    )
    assert ADVANTAGES["no_std"](rewards, rng=rng()) == (0.75, -0.25, -0.25, -0.25)


def test_shuffled_advantages_are_those_of_the_group_in_another_order() -> None:
    rewards = [float(i) for i in range(8)]
    own = ADVANTAGES["group_relative"](rewards, rng=rng())
    shuffled = ADVANTAGES["shuffled"](rewards, rng=rng())
    assert shuffled != own and sorted(shuffled) == sorted(own)
    assert shuffled == ADVANTAGES["shuffled"](rewards, rng=rng())


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    assert is_equal([0.1 + 0.2, 0.3]) and is_equal([1e9, 1e9 + 1e-3])
    assert not is_equal([0.0, 1e-3])


def test_every_epoch_has_every_task_once_in_an_order_of_its_own() -> None:
    tasks = [Task(id=str(i), prompt="", reference=None) for i in range(10)]
    order = TaskOrder(tasks, seed=3)
    epochs = [[order[10 * epoch + i].id for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert TaskOrder(tasks, seed=3)[25].id == epochs[2][5]


def test_a_batch_is_read_back_bit_for_bit() -> None:
    assert decode_batch(encode_batch(make_batch())) == make_batch()


def test_each_rollout_is_a_row_with_its_advantage_on_every_token() -> None:
    config = make_config(drawing={"temperature": 0.7}, loss={"type": "grpo"})
    first, second = make_data(make_batch(), config)
    assert first.tokens == (5, 6, 7) and first.positions == (1, 2) and first.targets == (7, 8)
    assert first.weights == (0.25, 0.25) and second.weights == (0.5,)
    assert first.advantages == (1.0, 1.0) and second.advantages == (-1.0,)
    assert first.temperature == 0.7
    assert second.tokens == (5, 6) and second.positions == (1,)
    assert first.sampled_logprobs == (-1 / 10, -1 / 11)
    assert list(first.kept) == [(7, 11), (8, 11)]


def test_advantages_count_by_the_weight_of_their_task() -> None:
    batch = make_batch()
    [group] = batch.groups
    batch = replace(batch, groups=(replace(group, weight=0.25),))
    assert decode_batch(encode_batch(batch)) == batch
    first, second = make_data(batch, make_config(loss={"type": "grpo"}))
    assert first.advantages == (0.25, 0.25) and second.advantages == (-0.25,)


def test_a_rollout_of_several_turns_counts_once_however_many_rows_it_has() -> None:
    """Three tokens drawn in two turns of one sequence, and one in a second sequence."""
    turns = TokenSequence(tokens=(5, 6, 7, 8, 9, 4), drawn=(2, 3, 5), logprobs=(-0.1, -0.2, -0.3))
    rewritten = TokenSequence(tokens=(5, 8), drawn=(1,), logprobs=(-0.4,))
    batch = make_batch()
    [group] = batch.groups
    game = DrawnRollout(sequences=(turns, rewritten), text="", reward=1.0)
    batch = replace(batch, groups=(replace(group, rollouts=(game, group.rollouts[1])),))
    first, second, third = make_data(batch, make_config(loss={"type": "grpo"}))
    assert first.tokens == (5, 6, 7, 8, 9) and first.positions == (1, 2, 4)
    assert first.targets == (7, 8, 4) and first.weights == (1 / 8,) * 3
    assert second.tokens == (5,) and second.targets == (8,) and second.weights == (1 / 8,)
    assert third.weights == (1 / 2,)
    assert first.advantages == (1.0,) * 3 and second.advantages == (1.0,)


def test_answers_without_what_they_were_drawn_from_are_refused() -> None:
    batch = make_batch()
    [group] = batch.groups
    bare = [replace(s, kept=()) for rollout in group.rollouts for s in rollout.sequences]
    rollouts = tuple(
        replace(rollout, sequences=(sequence,))
        for rollout, sequence in zip(group.rollouts, bare, strict=True)
    )
    batch = replace(batch, groups=(replace(group, rollouts=rollouts),))
    make_data(batch, make_config())
    with pytest.raises(TrainError, match="must report them for every token"):
        make_data(batch, make_config(drawing={"top_p": 0.9}))


def test_the_mean_gap_is_over_tokens() -> None:
    data = make_data(make_batch(), make_config())
    logprobs = [tuple(x - 0.5 for x in data[0].sampled_logprobs), data[1].sampled_logprobs]
    assert mean_gap(data, logprobs) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("values", "drawn_at"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"staleness": 1}, [0, 0, 1, 2, 3, 4]),
        ({"publish_every": 2}, [0, 0, 2, 2, 4, 4]),
        ({"staleness": 1, "publish_every": 2}, [0, 0, 0, 2, 2, 4]),
    ],
)
def test_the_weights_that_draw_a_step_are_a_schedule(
    values: dict[str, int], drawn_at: list[int]
) -> None:
    config = make_config(**values)
    assert [config.drawn_at(step) for step in range(6)] == drawn_at


def test_dr_grpo_alone_is_dr_grpo() -> None:
    config = make_config(loss={"type": "dr_grpo"})
    assert (config.advantage_name, config.loss.average) == ("no_std", "constant")
    assert make_config().advantage_name == "group_relative"


def test_options_of_the_loss_alone_are_those_of_grpo() -> None:
    """As the sentence about a reference without a KL term tells one to write."""
    loss = make_config(loss={"kl": {"weight": 0.1}}).loss
    assert loss.type == "grpo" and loss.kl is not None and loss.kl.weight == 0.1


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"group_size": 1}, "write 2 or more"),
        ({"save_every": 5, "publish_every": 2}, "write a multiple of publish_every, 6"),
        ({"engine": {"weights": "int4"}}, "trained in float32"),
        ({"share": True, "engine": {"type": "fleet", "urls": ["http://a"]}}, "write share: false"),
        ({"loss": {"type": "cross_entropy"}}, "loss"),
        ({"loss": {"type": "grpo", "clip": 0.2}}, "clip"),
        ({"staleness": 2}, "staleness"),
        ({"advantages": "gae"}, "advantages"),
    ],
)
def test_configs_that_cannot_work_are_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        make_config(**values)


def test_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = make_config(init_from="winner", engine={"model": "model"}).from_folder(tmp_path)
    assert config.init_from == tmp_path / "winner"
    assert config.engine == EngineConfig(model=str(tmp_path / "model"))
    assert make_config().from_folder(tmp_path).engine == EngineConfig()


class RunApi:
    """A feed of one batch, of which some groups cannot be trained on."""

    def __init__(self, errors: Sequence[str]) -> None:
        groups = [
            FedGroup(number=i, environment="", group=make_group(), draws=(None, None), error=error)
            for i, error in enumerate(errors)
        ]
        self._batch = FedBatch(number=1, groups=tuple(groups))

    def use(self, ref: ModelRef, *, step: int) -> None: ...

    async def take(self, step: int, *, after: int) -> FedBatch:
        return self._batch

    async def acknowledge(self, batch: FedBatch) -> None: ...


async def test_groups_of_environments_that_cannot_be_trained_on_stop_the_run(
    tmp_path: Path,
) -> None:
    """An environment with another tokenizer: all steps would pass, and nothing be trained."""
    config = GrpoConfig.model_validate({"environment": {"type": "atropos"}})
    policy = Policy(ModelRef(name="policy", version="0"), step=0)
    with Run.create(tmp_path, kind="grpo", name="fed", config={}) as run:
        bad = AtroposSource(RunApi(["", "token 99", "token 98"]), config=config, run=run)
        with pytest.raises(TaskError, match=r"4 of 6 rollouts failed.*The first error: token 99"):
            await bad.batch(0, policy=policy)
        good = AtroposSource(RunApi(["", "", "", "", "token 99"]), config=config, run=run)
        batch = await good.batch(0, policy=policy)
    assert len(batch.groups) == 4 and batch.counts.num_failed == 2


class ScriptedDrawer:
    """Groups that end in an order of their own; those at `teaching` positions have two rewards."""

    def __init__(self, teaching: Sequence[bool], delays: Sequence[int]) -> None:
        self.calls: list[int] = []
        """How many groups each call asked for."""
        self.num_stopped = 0
        self._teaching, self._delays = teaching, delays

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        self.calls.append(len(draws))
        first = sum(self.calls[:-1])
        places = range(first, first + len(draws))
        try:
            for _ in range(max(self._delays[place] for place in places)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_stopped += len(draws)
            raise
        return [
            self._group(model, draw, self._teaching[place])
            for draw, place in zip(draws, places, strict=True)
        ]

    def _group(self, model: ModelRef, draw: Draw, is_teaching: bool) -> Group:
        answer = Completion(
            text="a", tokens=(1,), logprobs=(-0.5,), finish_reason="stop", model=model
        )
        rewards = (1.0, 0.0 if is_teaching else 1.0)
        rollouts = [Rollout(task=draw.task, completion=answer, reward=one) for one in rewards]
        return Group(task=draw.task, model=model, rollouts=tuple(rollouts))


@given(st.data(), st.floats(0.05, 1.0))
async def test_a_batch_does_not_depend_on_when_its_groups_end(
    data: st.DataObject, useful_share: float
) -> None:
    config = make_config(groups_per_step=4, group_size=2, max_extra_groups=5)
    teaching = data.draw(st.lists(st.booleans(), min_size=9, max_size=9).filter(any))
    delays = data.draw(st.lists(st.integers(0, 20), min_size=9, max_size=9))
    tasks = [Task(id=str(i), prompt="?", reference="") for i in range(20)]
    policy = Policy(ModelRef(name="policy", version="a"), step=1)

    async def draw(drawer: ScriptedDrawer, *, is_remote: bool) -> Batch:
        own = BatchDrawer(drawer, tasks=tasks, config=config, is_remote=is_remote)
        return await own.draw(1, start=0, policy=policy, useful_share=useful_share)

    waves, singly = ScriptedDrawer(teaching, delays), ScriptedDrawer(teaching, delays)
    batch = await draw(waves, is_remote=False)
    assert await draw(singly, is_remote=True) == batch
    assert waves.calls[0] == 4 and set(singly.calls) == {1} and len(singly.calls) <= 9
    too_many = len(singly.calls) - batch.next_position
    assert singly.num_stopped <= too_many and (useful_share < 1 or too_many == 0)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95])
@pytest.mark.parametrize("wanted", [4, 8, 32, 256])
def test_nine_times_in_ten_one_wave_has_groups_enough(wanted: int, share: float) -> None:
    num = num_for(wanted, share=share)
    assert 0.84 < binom.sf(wanted - 1, num, share) < 0.99
    assert num_for(wanted, share=1.0) == wanted and num_for(0, share=share) == 0


async def test_what_is_begun_at_once_follows_the_last_steps(tmp_path: Path) -> None:
    """Every second group teaches: as many more are begun as that takes, and none drawn twice."""
    config = make_config(groups_per_step=8, group_size=2, steps=3, max_extra_groups=32)
    drawer = ScriptedDrawer([place % 2 == 0 for place in range(200)], delays=[0] * 200)
    tasks = [Task(id=str(i), prompt="?", reference="") for i in range(20)]
    policy = Policy(ModelRef(name="policy", version="a"), step=0)
    with Run.create(tmp_path / "run", kind="grpo", config={}) as run:
        source = GroupSource(drawer, tasks=tasks, config=config, run=run, is_remote=True)
        first = await source.batch(0, policy=policy)
        asked = len(drawer.calls)
        second = await source.batch(1, policy=replace(policy, step=1))
    assert first.next_position == asked == 15, "nothing was known"
    assert len(drawer.calls) - asked == num_for(8, share=8 / 15) == 21
    assert [group.position for group in second.groups] == list(range(16, 31, 2)), "and no more"


async def test_every_position_has_random_numbers_of_its_own_by_the_seed() -> None:
    """A task that comes again in the next epoch is answered with other random numbers."""
    asked: list[list[Draw]] = []

    class Recorder(ScriptedDrawer):
        async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
            asked.append(list(draws))
            return await super().draw(model, draws)

    task, model = Task(id="0", prompt="?", reference=""), ModelRef(name="p", version="a")
    for seed in (1, 1, 2):
        config = make_config(groups_per_step=2, group_size=2, seed=seed)
        recorder = Recorder([True] * 4, delays=[0] * 4)
        await BatchDrawer(recorder, tasks=[task], config=config).draw_from(5, 4, model)
    first, again, other = ([draw.seed for draw in draws] for draws in asked)
    assert first == again and len({*first, *other}) == 8


async def test_an_equal_group_is_replaced_while_others_are_drawn() -> None:
    config = make_config(groups_per_step=2, group_size=2)
    drawer = ScriptedDrawer([False, True, True], delays=[0, 50, 0])
    tasks = [Task(id=str(i), prompt="?", reference="") for i in range(5)]
    own = BatchDrawer(drawer, tasks=tasks, config=config, is_remote=True)
    drawing = asyncio.create_task(
        own.draw(1, start=0, policy=Policy(ModelRef(name="p", version="a"), step=1))
    )
    while len(drawer.calls) < 3:
        assert not drawing.done()
        await asyncio.sleep(0)
    batch = await drawing
    assert [group.position for group in batch.groups] == [1, 2]


class HeldTrainer:
    """Answers with what it was asked, when it may."""

    def __init__(self) -> None:
        self.begun, self.may_answer = asyncio.Event(), asyncio.Event()
        self.asked: list[list[str]] = []

    async def forward(self, asked: Sequence[str]) -> list[str]:
        self.asked.append(list(asked))
        self.begun.set()
        await self.may_answer.wait()
        return list(asked)

    forward_backward = optim_step = forward


async def ended(task: "asyncio.Task[list[str]]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_adapter_that_stops_while_it_computes_for_all_answers_the_others() -> None:
    trainer = HeldTrainer()
    joint = JointTrainer(trainer, num_adapters=2)  # type: ignore[arg-type]
    waits = asyncio.create_task(joint.call("forward", ["a"]))
    await asyncio.sleep(0)
    computes = asyncio.create_task(joint.call("forward", ["b"]))
    await trainer.begun.wait()
    computes.cancel()
    trainer.may_answer.set()
    await ended(computes)
    assert await asyncio.wait_for(waits, 60) == ["a"]


async def test_an_adapter_that_stops_while_it_waits_asks_for_nothing() -> None:
    trainer = HeldTrainer()
    trainer.may_answer.set()
    joint = JointTrainer(trainer, num_adapters=3)  # type: ignore[arg-type]
    stops, waits = (asyncio.create_task(joint.call("forward", [own])) for own in ("a", "b"))
    await asyncio.sleep(0)
    await ended(stops)
    await joint.leave()
    assert trainer.asked == []
    assert await asyncio.wait_for(joint.call("forward", ["c"]), 2) == ["c"]
    assert await asyncio.wait_for(waits, 60) == ["b"]
    assert trainer.asked == [["b", "c"]]


# Which checkpoint is chosen, also where some of the select tasks have no reward.


UNUSED: Any = None
"""Selection needs the weights for the report alone."""


class Table:
    """An Evaluator: rewards by the version of the model, in the order of the tasks; None failed."""

    def __init__(self, rewards: Mapping[str, Sequence[float | None]]) -> None:
        self._rewards = rewards

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        return [self._evaluate(model, tasks) for model in models]

    def _evaluate(self, model: ModelRef, tasks: Sequence[Task]) -> Evaluation:
        pairs = list(zip(tasks, self._rewards[model.version], strict=True))
        return Evaluation(
            model=model,
            rewards={task.id: reward for task, reward in pairs if reward is not None},
            errors={task.id: "no judge today" for task, reward in pairs if reward is None},
            num_tokens=0,
            seconds=0.0,
        )


def make_taskset(num: int) -> Taskset:
    tasks = [Task(id=f"t/{i}", prompt="p", reference="r", source="t") for i in range(num)]
    splits = SplitsConfig(search=0.0, select=1.0, report=0.0)
    return Taskset(name="t", tasks=tuple(tasks), scorer=ExactConfig(), splits=splits)


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ([(0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 0.0)], 1),
        ([(None, 0.0, 1.0), (None, 1.0, 1.0), (None, 1.0, 0.0)], 1),
        ([(0.0, 0.0, 1.0), (None, 1.0, 1.0), (1.0, 1.0, 0.0)], 1),
        ([(1.0, 1.0, None), (1.0, None, 0.0), (1.0, None, 1.0)], 0),
        ([(0.0, None, None), (None, 1.0, 1.0), (1.0, 1.0, 1.0)], 2),
        ([(None, None, None), (1.0, 1.0, 1.0)], 1),
        ([(1.0, 0.0, 0.0), (None, None, None)], 0),
    ],
)
async def test_checkpoints_are_compared_on_the_tasks_that_both_answered(
    rewards: Sequence[Sequence[float | None]], best: int, tmp_path: Path
) -> None:
    table = Table({str(step): own for step, own in enumerate(rewards)})
    tasksets = [make_taskset(3)]
    with Run.create(tmp_path, kind="grpo", config={}, name="x") as run:
        selection = Selection(table, tasksets=tasksets, weights=UNUSED, run=run)
        for step in range(len(rewards)):
            await selection.measure(step, ModelRef(name="policy", version=str(step)))
        assert selection.best == best
        assert [mean is None for mean in selection.means.values()] == [
            None in own for own in rewards
        ]
        again = Selection(table, tasksets=tasksets, weights=UNUSED, run=run)
        assert (again.best, again.means) == (selection.best, selection.means)
