"""Which bridge a training takes to stub servers, and why."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from fleet.sharing import SharingStub, said_of
from fleet.stub import Stub, serve, until
from forked import forked, run_code
from tiny import tiny_adapter, write_tokenizer
from transformers import BertConfig, BertForMaskedLM

from rookery.compose.grpo import plan as grpo_plan
from rookery.compose.grpo import run_grpo
from rookery.compose.grpo import setup as grpo_setup
from rookery.compose.grpo.bridge import (
    adapter_publisher,
    attach,
    choose_bridge,
    open_beside,
)
from rookery.compose.grpo.setup import plan_bridge, read_setup
from rookery.embedded.folders import resolve_model
from rookery.engines import launch_of
from rookery.errors import ConfigError, FleetError, ModelError
from rookery.fleet import FleetConfig, open_fleet
from rookery.fleet.bridges.alias import share_base
from rookery.fleet.routing.paused import is_trained
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY
from rookery.slots.loading import load_model, read_weights
from rookery.train import LoraTrainer, TrainerConfig

TASKS = [{"type": "jsonl", "path": "none.jsonl", "scorer": {"type": "exact"}}]


def config_of(*stubs: SharingStub, **changes: Any) -> GrpoConfig:
    engine = {"type": "fleet", "urls": [stub.url for stub in stubs], "all_down_timeout_s": 5}
    return GrpoConfig.model_validate({"engine": engine, "full": True, "tasksets": TASKS, **changes})


@pytest.mark.parametrize(
    ("stub", "changes", "name", "why"),
    [
        (SharingStub(), {}, "alias", "all weights can be views"),
        (SharingStub(), {"bridge": "alias"}, "alias", "as configured"),
        (SharingStub(), {"bridge": "copy"}, "copy", "as configured"),
        (SharingStub(), {"publish_every": 2}, "reload", "publish_every is above 1"),
        (SharingStub(refusal="its weights are quantised (fp8)"), {}, "reload", "quantised"),
        (SharingStub(), {"full": False}, "adapter", "takes no adapters from memory"),
    ],
)
async def test_auto_takes_the_nearest_bridge_and_says_why(
    stub: SharingStub, changes: dict[str, Any], name: str, why: str
) -> None:
    async with serve(stub):
        config = config_of(stub, **changes)
        assert isinstance(config.engine, FleetConfig)
        async with open_fleet(config.engine) as fleet:
            bridge = await choose_bridge(plan_bridge(config), fleet)
            bridge.release()
    assert bridge.name == name and why in bridge.why


async def test_a_weight_that_servers_lack_is_the_reason_for_another_bridge(
    tiny_folder: Path,
) -> None:
    stub, folder = SharingStub(), tiny_folder
    async with serve(stub):
        config = config_of(stub)
        assert isinstance(config.engine, FleetConfig)
        async with open_fleet(config.engine) as fleet:
            bridge = await choose_bridge(plan_bridge(config, folder=folder), fleet)
            bridge.release()
            assert bridge.name == "reload" and "model.embed_tokens.weight" in bridge.why
            alias = config_of(stub, bridge="alias")
            with pytest.raises(FleetError, match=r"no weight that is model\.embed_tokens\.weight"):
                await choose_bridge(plan_bridge(alias, folder=folder), fleet)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", "0.001"), ("bfloat16", "0.5")])
async def test_servers_by_url_tell_how_closely_they_are_judged(
    tiny_folder: Path, dtype: str, limit: str
) -> None:
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    trainer = LoraTrainer(model, config=TrainerConfig())
    trainer.add(POLICY, tiny_adapter("tiny"))
    stub = Stub(root=str(tiny_folder), dtype=dtype)
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        trainer.publish_to(adapter_publisher(fleet, trainer, model=model))
        with pytest.raises(FleetError, match=f"nats, more than {limit}"):
            await trainer.publish(POLICY)


async def test_several_processes_have_no_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    stub = SharingStub()
    async with serve(stub):
        config = config_of(stub)
        assert isinstance(config.engine, FleetConfig)
        async with open_fleet(config.engine) as fleet:
            bridge = await choose_bridge(plan_bridge(config), fleet)
            bridge.release()
            assert bridge.name == "reload" and "2 processes of torchrun" in bridge.why
            with pytest.raises(ConfigError, match=r"2 processes .*: write bridge: copy"):
                await choose_bridge(plan_bridge(config_of(stub, bridge="alias")), fleet)


ATTACHED = """
import asyncio, sys
from rookery.compose.grpo import run_grpo
from rookery.compose.grpo.bridge import choose_bridge
from rookery.compose.grpo.setup import plan_bridge, read_setup
from rookery.fleet import open_fleet
from rookery.loops.grpo import GrpoConfig

async def main():
    config = GrpoConfig.model_validate_json(sys.argv[1])
    async with open_fleet(config.engine) as fleet:
        bridge = await choose_bridge(plan_bridge(config), fleet)
        await fleet.pool.replicas[0].client.post("/pause?mode=keep", b"")
        print(bridge.name, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_server_has_one_trainer_and_goes_on_when_it_was_killed() -> None:
    """The first one is killed while the server is paused, which then answers nothing."""
    stub = SharingStub()
    async with serve(stub):
        config = config_of(stub)
        assert isinstance(config.engine, FleetConfig)
        with forked(run_code, ATTACHED, config.model_dump_json(exclude_unset=True)) as first:
            assert await asyncio.to_thread(first.lines.readline) == "alias\n"
            num_asked = stub.num_asked_whether_paused
            opening = asyncio.create_task(open_and_choose(config))
            await until(lambda: stub.num_asked_whether_paused >= num_asked + 2)
            assert stub.is_paused and not opening.done(), "it waits for the change to be over"
            await resume(stub.url)
            with pytest.raises(FleetError, match="Another process trains the weights of"):
                await opening
            await pause(stub.url)
            first.send(signal.SIGKILL)
            await asyncio.to_thread(first.wait)
        async with asyncio.timeout(60):
            assert await open_and_choose(config) == "alias"
        assert not stub.is_paused


async def open_and_choose(config: GrpoConfig) -> str:
    assert isinstance(config.engine, FleetConfig)
    async with open_fleet(config.engine) as fleet:
        bridge = await choose_bridge(plan_bridge(config), fleet)
        bridge.release()
        return bridge.name


class _SlowPause(SharingStub):
    async def _pause(self, request: web.Request) -> web.Response:
        self.is_pausing.set()
        await self.may_pause.wait()
        return await super()._pause(request)

    async def start(self) -> None:
        self.is_pausing, self.may_pause = asyncio.Event(), asyncio.Event()
        await super().start()


async def test_a_server_that_serves_is_paused_while_a_trainer_writes_its_start(
    tiny_folder: Path,
) -> None:
    """What others have in flight there would be computed with weights half written."""
    start = read_weights(tiny_folder, dtype=torch.float32)
    stub = _SlowPause(tensors={name: tensor + 1 for name, tensor in start.items()})
    before = said_of(stub.tensors)
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        shared = await share_base(fleet)
        found = resolve_model(str(tiny_folder))
        attaching = asyncio.create_task(attach(found, fleet, shared, start=tiny_folder))
        await until(lambda: stub.is_pausing.is_set() or attaching.done())
        assert said_of(stub.tensors) == before
        stub.may_pause.set()
        await attaching
        assert said_of(stub.tensors) == said_of(start)
        assert not stub.is_paused


async def test_a_server_is_free_again_when_its_training_has_ended() -> None:
    """Also one that was refused: an error refers to all that was there when it was raised."""
    stub = SharingStub()
    async with serve(stub):
        config = config_of(stub)
        assert isinstance(config.engine, FleetConfig)
        async with open_fleet(config.engine) as fleet:
            first, second = [await choose_bridge(plan_bridge(config), fleet) for _ in range(2)]
            assert is_trained(stub.url)
            first.release()
            assert is_trained(stub.url), "by the second"
            second.release()
            assert not is_trained(stub.url)
            stub.refusal = "its weights are quantised (fp8)"
            with pytest.raises(FleetError, match="quantised") as refused:
                await choose_bridge(plan_bridge(config_of(stub, bridge="alias")), fleet)
            assert not is_trained(stub.url) and refused.tb


async def resume(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/resume"):
        pass


async def pause(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/pause?mode=keep"):
        pass


@pytest.mark.parametrize(
    ("changes", "document", "is_beside", "merged"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({"bridge": "merge"}, {}, False, True),
        ({"bridge": "slot"}, {}, True, False),
        ({"full": True}, {}, True, False),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, {}, True, False),
        ({}, {"quantization_config": {}}, True, False),
        ({}, {"num_experts": 8}, True, False),
        ({"environment": {"type": "atropos", "port": 1}}, {}, True, False),
        ({"sweep": {"vary": {"learning_rate": [1e-4]}}}, {}, True, False),
    ],
)
def test_a_policy_is_merged_where_its_server_has_no_other_use(
    tmp_path: Path,
    changes: dict[str, Any],
    document: dict[str, Any],
    is_beside: bool,
    merged: bool,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = config_of(SharingStub(port=1), **{"full": False, **changes})
    layers = config.lora.targets
    plan = plan_bridge(config, folder=tmp_path, layers=layers, is_beside=is_beside)
    assert plan.is_merged is merged
    forced = config.model_copy(update={"bridge": "merge"})
    with pytest.raises(ConfigError, match="write bridge: slot"):
        plan_bridge(forced, folder=tmp_path, layers=("lm_head",), is_beside=is_beside)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bridge": "slot"}, "all weights are trained: write one of auto, alias, copy"),
        (
            {"full": False, "bridge": "alias"},
            "an adapter is trained: write one of auto, merge, slot",
        ),
        ({"bridge": "alias", "publish_every": 2}, "write publish_every: 1, or bridge: copy"),
    ],
)
def test_bridges_for_other_weights_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(SharingStub(port=1), **changes)


def test_no_server_is_started_on_a_model_that_does_not_continue_texts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, **layers)).save_pretrained(tmp_path / "bert")
    write_tokenizer(tmp_path / "bert")
    started = tmp_path / "started"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {started}\nexit 1\n")
    python.chmod(0o755)
    launch = {"model": str(tmp_path / "bert"), "python": str(python), "device": "cpu"}
    config = {
        "engine": {"type": "fleet", "launch": launch}, "full": True,
        "environment": {"type": "atropos", "port": 8000},
    }  # fmt: skip
    with pytest.raises(ModelError, match="of the type bert, which does not continue texts"):
        run_grpo(config, runs_dir=tmp_path / "runs", progress=False)
    assert not started.exists()


async def test_slot_without_the_extension_is_refused() -> None:
    stub = SharingStub()
    async with serve(stub):
        config = config_of(stub, full=False, bridge="slot")
        assert isinstance(config.engine, FleetConfig)
        async with open_fleet(config.engine) as fleet:
            with pytest.raises(FleetError, match=r"takes no adapters from memory: .*adapter"):
                await choose_bridge(plan_bridge(config), fleet)


def test_servers_are_started_as_the_bridge_needs_them(tmp_path: Path) -> None:
    launch = {"model": str(tmp_path), "device": "cpu"}
    document = {"engine": {"type": "fleet", "launch": launch}, "tasksets": TASKS}

    def started(**changes: Any) -> Any:
        config = GrpoConfig.model_validate({**document, **changes})
        return plan_bridge(config).engine

    full = started(full=True)
    assert full.launch.live_weights and full.launch.max_loras == 0
    assert not started(full=True, bridge="restart").launch.live_weights
    adapter = started(bridge="adapter")
    assert adapter.peft_folders and adapter.launch.max_loras and not adapter.launch.live_weights


async def test_servers_get_the_share_of_the_gpu_that_the_trainer_leaves(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan comes last: what the config names is read before."""
    tasks = tmp_path / "tasks.jsonl"
    rows = ({"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(60))
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = GrpoConfig.model_validate(
        {
            "engine": {"type": "fleet", "launch": {"model": str(tiny_folder), "device": "cpu"}},
            "tasksets": [{"type": "jsonl", "path": str(tasks), "scorer": {"type": "exact"}}],
        }
    )
    started: list[FleetConfig] = []

    def open_servers(config: FleetConfig, **_: object) -> Any:
        started.append(config)
        raise FleetError("no server here")

    monkeypatch.setattr("rookery.compose.grpo.bridge.open_servers", open_servers)
    setup = read_setup(config)
    for launch in ({"gpu_memory_utilization": 0.4}, {}):
        with pytest.raises(FleetError, match="no server here"):
            async with open_beside(setup, launch=launch, on_launch=lambda _: None):
                pass
    shares = [launch_of(engine).gpu_memory_utilization for engine in started]  # type: ignore[union-attr]
    assert shares == [0.4, None]


@pytest.mark.parametrize(
    ("launch", "changes", "gib", "num"),
    [
        ({}, {}, 40, 2),
        ({}, {}, 16, 1),
        ({"servers_per_gpu": 3}, {}, 40, 3),
        ({"replicas": 1}, {}, 40, 1),
        ({"replicas": 1, "servers_per_gpu": 2}, {}, 40, 2),
        ({}, {"bridge": "slot"}, 40, 1),
    ],
)
def test_a_small_policy_is_served_twice_if_the_gpu_has_room(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: dict[str, Any],
    changes: dict[str, Any],
    gib: int,
    num: int,
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f'{{"prompt": "{n} =", "answer": "{n}"}}\n' for n in range(60)))
    server = {"model": str(tiny_folder), "device": "cuda", **launch}
    config = GrpoConfig.model_validate(
        {
            "engine": {"type": "fleet", "launch": server},
            "tasksets": [{"type": "jsonl", "path": str(tasks), "scorer": {"type": "exact"}}],
            **changes,
        }
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(grpo_setup, "trainer_place", lambda _: ("cuda", "bfloat16"))
    monkeypatch.setattr(grpo_plan, "_memory", lambda _: gib * 2**30)
    setup = read_setup(config)
    assert setup.bridge is not None and setup.bridge.is_merged == (config.bridge == "auto")
    settings = grpo_plan.plan_servers(config, setup)
    assert settings["servers_per_gpu"] == num
    assert 0.5 < float(str(settings["gpu_memory_utilization"])) < 0.95
