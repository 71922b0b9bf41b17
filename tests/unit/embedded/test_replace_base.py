"""New base weights in a running engine: packed or plain, with requests in flight or none."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from tiny import tiny_adapter, write_tiny_model

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, run_engine
from rookery.errors import EngineDownError, EngineError, ModelError
from rookery.slots import load_model
from rookery.types import ModelWeights, SampleRequest, SamplingParams, ScoreRequest

PROMPT = (1, *range(30, 60))
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
KINDS: dict[str, Any] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}


@pytest.fixture(params=["tied", pytest.param("untied", marks=long)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", **KINDS[request.param])


@pytest.fixture(params=["packed", "plain"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[EmbeddedEngine]:
    config = EngineConfig(model=str(folder))
    if request.param == "packed":
        async with open_engine(config) as packed:
            yield packed
    else:
        model = load_model(folder)
        async with run_engine(model, config=config, detokenize=str, name="tiny") as plain:
            yield plain


def other_weights(folder: Path, version: str = "2") -> ModelWeights:
    """Every weight moved, norms and embeddings too."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: weight.detach() + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_model(folder).weights.items()
    }
    return ModelWeights(name="policy", tensors=tensors, version=version)


async def expected(folder: Path, weights: ModelWeights) -> tuple[float, ...]:
    model = load_model(folder)
    with torch.no_grad():
        for name, parameter in model.weights.items():
            parameter.copy_(weights.tensors[name])
    config = EngineConfig(model=str(folder))
    async with run_engine(model, config=config, detokenize=str, name="x") as engine:
        return await scores(engine)


async def scores(engine: EmbeddedEngine) -> tuple[float, ...]:
    [score] = await engine.score([ScoreRequest(model=engine.base, tokens=PROMPT, start=1)])
    return score.logprobs


async def test_answers_are_those_of_the_new_weights(engine: EmbeddedEngine, folder: Path) -> None:
    """Nothing of the old ones is left in a cache, a packed layer or a fused norm."""
    weights = other_weights(folder)
    wanted = await expected(folder, weights)
    before, old = await scores(engine), engine.base
    ref = await engine.replace_base(weights)
    assert (ref.name, ref.version) == ("policy", "2") and engine.base == ref
    assert await scores(engine) == pytest.approx(wanted, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(before, wanted, strict=True)) > 0.1
    with pytest.raises(EngineError, match=r"is not loaded. Loaded: policy@2"):
        await engine.score([ScoreRequest(model=old, tokens=PROMPT, start=1)])
    start = load_model(folder).weights
    await engine.replace_base(ModelWeights(name="policy", tensors=start, version="1"))
    assert await scores(engine) == pytest.approx(before, abs=1e-5)


async def test_requests_in_flight_end_on_the_old_weights(
    engine: EmbeddedEngine, folder: Path
) -> None:
    request = SampleRequest(model=engine.base, prompt=PROMPT, params=LONG)
    [[alone]] = await engine.sample([request])
    await engine.reset_prefix_cache()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.sample([request]))
        await asyncio.sleep(0)  # the call is in flight now
        assert engine.stats.num_in_flight == 1
        replacing = group.create_task(engine.replace_base(other_weights(folder)))
        await asyncio.sleep(0)
        late = group.create_task(refused(engine, request))
    [[completion]] = running.result()
    assert completion.tokens == alone.tokens and completion.logprobs == alone.logprobs
    assert replacing.result() == engine.base
    assert "is not loaded" in late.result()


async def refused(engine: EmbeddedEngine, request: SampleRequest) -> str:
    """What a call is told that came while the weights were being replaced."""
    with pytest.raises(EngineError) as told:
        await engine.sample([request])
    return str(told.value)


async def test_weights_that_do_not_fit_change_nothing(engine: EmbeddedEngine, folder: Path) -> None:
    before, base = await scores(engine), engine.base
    weights = other_weights(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    for tensors, sentence in (
        ({**weights.tensors, name: torch.zeros(3, 3)}, r"up_proj.weight is \(3, 3\) and here"),
        ({**weights.tensors, "model.extra": torch.zeros(3)}, r"model.extra is \(3,\)"),
        ({n: t for n, t in weights.tensors.items() if n != name}, "up_proj.weight is None"),
    ):
        wrong = ModelWeights(name="policy", tensors=tensors, version="3")
        with pytest.raises(ModelError, match=sentence):
            await engine.replace_base(wrong)
    assert engine.base == base and await scores(engine) == before


async def test_adapters_must_go_first(engine: EmbeddedEngine, folder: Path) -> None:
    ref = await engine.load(tiny_adapter("poet", base=""))
    with pytest.raises(EngineError, match=r"poet@.* unload them first"):
        await engine.replace_base(other_weights(folder))
    await engine.unload(ref)
    await engine.replace_base(other_weights(folder))


async def test_an_adapter_that_was_unloaded_is_waited_for(
    engine: EmbeddedEngine, folder: Path
) -> None:
    """Its last request is in flight: that ends on the old weights, and nobody is refused."""
    ref = await engine.load(tiny_adapter("poet", base=""))
    request = SampleRequest(model=ref, prompt=PROMPT, params=LONG)
    [[alone]] = await engine.sample([request])
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.sample([request]))
        await asyncio.sleep(0)  # the call is in flight now
        await engine.unload(ref)
        assert engine.stats.num_in_flight == 1
        group.create_task(engine.replace_base(other_weights(folder)))
    [[completion]] = running.result()
    assert completion.tokens == alone.tokens
    assert engine.base.version == "2" and engine.loaded == ()


async def test_who_waits_for_new_weights_is_told_when_the_engine_closes(folder: Path) -> None:
    async with open_engine(EngineConfig(model=str(folder))) as engine:
        request = SampleRequest(model=engine.base, prompt=PROMPT, params=LONG)
        waiting = [
            asyncio.create_task(engine.sample([request])),
            asyncio.create_task(engine.replace_base(other_weights(folder))),
            asyncio.create_task(engine.sample([request])),
        ]
        await asyncio.sleep(0)
    told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
    assert all(isinstance(error, EngineDownError) for error in told)


async def test_a_cancelled_replacement_leaves_no_wrong_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was being computed and runs to its end: the new weights have the new name only."""
    model, weights = load_model(folder), other_weights(folder)
    wanted = await expected(folder, weights)
    begun, may_end = threading.Event(), threading.Event()
    set_weights = model.set_weights

    def slow(tensors: Mapping[str, torch.Tensor]) -> None:
        begun.set()
        assert may_end.wait(20)
        set_weights(tensors)

    monkeypatch.setattr(model, "set_weights", slow)
    config = EngineConfig(model=str(folder))
    async with run_engine(model, config=config, detokenize=str, name="tiny") as engine:
        old = engine.base
        replacing = asyncio.create_task(engine.replace_base(weights))
        assert await asyncio.to_thread(begun.wait, 20)
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        may_end.set()
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.score([ScoreRequest(model=old, tokens=PROMPT, start=1)])
        assert await scores(engine) == pytest.approx(wanted, abs=1e-4)
