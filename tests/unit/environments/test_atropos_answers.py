"""Groups that come again, as their sender did not hear that they are kept."""

import asyncio
from pathlib import Path

import pytest
from environments.groups import make_group

from rookery.compat.atropos import group_queue
from rookery.compat.atropos.gateway import Gateway
from rookery.compat.atropos.group_queue import TrainerRegistration
from rookery.runs import Run

TRAINER = TrainerRegistration(batch_size=4, max_token_len=8, num_steps=10)


async def gone() -> bool:
    return True


async def open_gateway(run: Run) -> Gateway:
    return await Gateway.open(run, trainer=TRAINER, vocab_size=97)


def new_run(folder: Path) -> Run:
    return Run.create(folder, kind="gateway", name="gateway", config={})


async def test_who_was_not_told_sends_the_same_group_again(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        for _ in range(3):
            await gateway.accept(make_group(), is_gone=gone)
        assert len(gateway.queue.groups) == 1, "it has heard nothing three times"
        await gateway.accept(make_group(), is_gone=gone)
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 1
        for _ in range(2):
            await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 3, "equal groups of who was told are others"
        await gateway.accept(make_group(scores=[0.0, 2.0]))
        assert len(gateway.queue.groups) == 4


async def test_what_was_trained_on_meanwhile_is_not_trained_on_again(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group(4), is_gone=gone)
        batch = await gateway.queue.take(4)
        await gateway.queue.acknowledge(batch)
        await gateway.accept(make_group(4))
        assert not gateway.queue.groups


async def test_the_second_post_waits_for_the_first(tmp_path: Path) -> None:
    """Its sender has waited long enough, and the first is still being written."""
    written, has_gone = asyncio.Event(), asyncio.Event()

    async def goes() -> bool:
        written.set()
        await has_gone.wait()
        return True

    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        first = asyncio.create_task(gateway.accept(make_group(), is_gone=goes))
        await written.wait()
        second = asyncio.create_task(gateway.accept(make_group()))
        await gateway.accept(make_group(3))  # others do not wait
        has_gone.set()
        await asyncio.gather(first, second)
        assert [group.size for group in gateway.queue.groups] == [2, 3]


async def kept_and_stopped(gateway: Gateway) -> None:
    """A group that is durable when its process ends, before the answer."""
    written = asyncio.Event()

    async def stopped() -> bool:
        written.set()
        await asyncio.Event().wait()
        return False

    sending = asyncio.create_task(gateway.accept(make_group(), is_gone=stopped))
    await written.wait()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_the_next_process_knows_who_was_not_told(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group())
        await kept_and_stopped(gateway)
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        assert len(gateway.queue.groups) == 2
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 2, "the second one again"
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 3, "both were answered"
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 4


async def test_after_the_machine_went_down_all_count_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the newest may not have reached the disk."""
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(group_queue, "BOOT", boot)
    boot.write_text("first\n")
    with new_run(tmp_path) as run:
        await kept_and_stopped(await open_gateway(run))
    boot.write_text("second\n")
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 2
    boot.unlink()  # a system that does not say
    with Run.open(run.path) as run:
        await kept_and_stopped(await open_gateway(run))
    with Run.open(run.path) as run:
        gateway = await open_gateway(run)
        await gateway.accept(make_group())
        assert len(gateway.queue.groups) == 4


async def test_contents_are_forgotten_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_queue, "MAX_UNTOLD", 2)
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        groups = [make_group(scores=[0.0, float(score)]) for score in range(3)]
        for group in groups:
            await gateway.accept(group, is_gone=gone)
        await gateway.accept_all(groups)
        assert len(gateway.queue.groups) == 4, "the oldest counts as new"


async def test_of_a_list_each_group_counts(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        gateway = await open_gateway(run)
        await gateway.accept_all([make_group(), make_group()], is_gone=gone)
        await gateway.accept_all([make_group(), make_group(), make_group()])
        assert len(gateway.queue.groups) == 3
        await gateway.accept_all([make_group()])
        assert len(gateway.queue.groups) == 4
