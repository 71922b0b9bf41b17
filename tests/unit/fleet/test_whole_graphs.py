"""CUDA graphs of whole steps: captured for prompts, and servers that compute them wrongly."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleet.stub import Stub, serve

from rookery.errors import FleetError
from rookery.fleet.client import Client, ClientConfig, open_session
from rookery.fleet.inside.whole_graphs import capture_for_prompts
from rookery.fleet.replica import Replica, ReplicaSettings
from rookery.fleet.settings import LaunchConfig
from rookery.fleet.staging import open_staging

SETTINGS = ReplicaSettings(
    max_in_flight=None,
    max_loras=None,
    max_lora_rank=None,
    is_folder_shared=False,
    has_resolver=False,
)
FULL, DECODE = "full", "full for single tokens"


class State:
    """Prepares attention for the longest of the sequences, and has other parts."""

    rope = "rope"

    def prepare_attn(self, batch: Any, mode: str, *, for_capture: bool = False) -> int:
        assert mode == "none" and for_capture
        return int(batch.num_scheduled_tokens.max())


def make_graphs(prepare: Callable[..., Any]) -> Any:
    """Stands in for vLLM's module: 24 tokens are captured as 24 sequences of one."""

    class Manager:
        def __init__(self, mode: str) -> None:
            self.cudagraph_mode = mode

        def capture(self, model: str, model_state: State, *, has_lora: bool) -> int:
            assert (model, model_state.rope, has_lora) == ("model", "rope", True)
            batch = SimpleNamespace(num_tokens=24, num_scheduled_tokens=np.ones(24, np.int32))
            longest = model_state.prepare_attn(batch, "none", for_capture=True)
            assert batch.num_scheduled_tokens.max() == 1, "the batch itself is left alone"
            return longest

    return SimpleNamespace(
        prepare_inputs_to_capture=prepare,
        ModelCudaGraphManager=Manager,
        CUDAGraphMode=SimpleNamespace(FULL=FULL),
    )


@pytest.mark.parametrize(("mode", "longest"), [(FULL, 24), (DECODE, 1)])
def test_whole_steps_are_captured_for_a_prompt_as_long_as_the_batch(
    mode: str, longest: int
) -> None:
    def old(num_reqs: int, num_tokens: int) -> None: ...

    graphs = make_graphs(old)
    capture_for_prompts(graphs)
    manager = graphs.ModelCudaGraphManager(mode)
    assert manager.capture("model", State(), has_lora=True) == longest


def test_versions_that_capture_for_prompts_are_left_alone() -> None:
    def new(num_reqs: int, num_tokens: int, max_query_len: int | None = None) -> None: ...

    graphs = make_graphs(new)
    stock = graphs.ModelCudaGraphManager.capture
    capture_for_prompts(graphs)
    assert graphs.ModelCudaGraphManager.capture is stock


@pytest.mark.parametrize("off", [0.0, 1.5])
async def test_a_server_with_whole_graphs_shows_that_it_computes_prompts_right(
    off: float, tmp_path: Path
) -> None:
    local: Any = SimpleNamespace(
        config=LaunchConfig(model="tiny", device="cuda", cuda_graphs="full")
    )
    async with serve(Stub(prompts_off=off)) as (stub,), open_session() as session:
        client = Client(stub.url, session=session, config=ClientConfig())
        with open_staging(tmp_path) as staging:
            replica = Replica(client, settings=SETTINGS, staging=staging, local=local)
            if not off:
                await replica.connect()
                assert replica.lane.is_open
                return
            with pytest.raises(FleetError, match=r"by 1\.50 nats a token.*cuda_graphs: auto"):
                await replica.connect()
            assert not replica.lane.is_open
