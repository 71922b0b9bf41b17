"""CUDA graphs of whole steps: captured and run alike, and servers that compute them wrongly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleet.stub import Stub, serve

from rookery.errors import FleetError
from rookery.fleet.adapters.staging import open_staging
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.fleet.routing.replica import Replica
from rookery.fleet.servers.settings import FleetConfig, LaunchConfig
from rookery.fleet.vllm_plugin.whole_graphs import agree_on_queries

CONFIG = FleetConfig(urls=("http://127.0.0.1:1",))
NONE, FULL, DECODE = "none", "full", "full for single tokens"


def make_batch(num_tokens: int, *, num_sequences: int, room: int) -> Any:
    """Tokens of equally many per sequence, in a graph that has room for more."""
    return SimpleNamespace(
        num_tokens_after_padding=room,
        num_scheduled_tokens=np.full(num_sequences, num_tokens // num_sequences, np.int32),
    )


class Old:
    """Prepares attention for the longest of the sequences: vLLM 0.26."""

    def prepare_attn(self, batch: Any, mode: str, *, for_capture: bool = False) -> int:
        assert batch.num_scheduled_tokens.ndim == 1
        return int(batch.num_scheduled_tokens.max())


class New(Old):
    """For what the batch says, else for the longest: vLLM 0.32."""

    def prepare_attn(self, batch: Any, mode: str, *, for_capture: bool = False) -> int:
        said = getattr(batch, "max_query_len", None)
        return said or super().prepare_attn(batch, mode, for_capture=for_capture)


class Manager:
    """Stands in for vLLM's: 24 tokens are captured as 24 sequences of one."""

    def __init__(self, mode: str) -> None:
        self.cudagraph_mode = mode

    def capture(self, model: str, model_state: Old, *, has_lora: bool) -> int:
        assert (model, has_lora) == ("model", True)
        batch = make_batch(24, num_sequences=24, room=24)
        longest = model_state.prepare_attn(batch, NONE, for_capture=True)
        assert batch.num_scheduled_tokens.max() == 1, "the batch itself is left alone"
        return longest


@pytest.mark.parametrize("kind", [Old, New])
def test_whole_steps_are_captured_and_run_for_a_prompt_as_long_as_the_graph(kind: type) -> None:
    class Own(Manager):
        pass

    modes = SimpleNamespace(FULL=FULL)
    agree_on_queries(SimpleNamespace(ModelCudaGraphManager=Own, CUDAGraphMode=modes))
    state = kind()
    assert Own(FULL).capture("model", state, has_lora=True) == 24
    answers = make_batch(20, num_sequences=20, room=24)
    prompts = make_batch(24, num_sequences=2, room=24)
    assert state.prepare_attn(answers, FULL) == state.prepare_attn(prompts, FULL) == 24
    assert state.prepare_attn(prompts, NONE) == 12, "what no graph holds is left alone"
    state = kind()
    assert Own(DECODE).capture("model", state, has_lora=True) == 1
    assert state.prepare_attn(answers, FULL) == 1


@pytest.mark.parametrize(
    ("stub", "apart"),
    [
        (Stub(), None),
        (Stub(prompts_off=1.5), r"1\.50"),
        (Stub(together_off=1.5), r"1\.50"),
        (Stub(together_off=None), "inf"),
    ],
    ids=["right", "prompts", "answers together", "no numbers"],
)
async def test_a_server_with_whole_graphs_shows_that_it_computes_right(
    stub: Stub, apart: str | None, tmp_path: Path
) -> None:
    local: Any = SimpleNamespace(
        config=LaunchConfig(model="tiny", device="cuda", cuda_graphs="full")
    )
    async with serve(stub), open_session() as session:
        client = Client(stub.url, session=session, config=ClientConfig())
        with open_staging(tmp_path) as staging:
            replica = Replica(client, config=CONFIG, staging=staging, local=local)
            if apart is None:
                await replica.connect()
                assert replica.load.is_open
                return
            with pytest.raises(FleetError, match=rf"is {apart} nats from.*cuda_graphs: auto"):
                await replica.connect()
            assert not replica.load.is_open
