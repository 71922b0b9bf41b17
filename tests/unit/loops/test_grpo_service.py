"""grpo over the client of a service: the same run, to the last bit, as with parts of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from loops.training import Inputs, _drawing, clockless, run_training

from rookery.compose.serve import ServeConfig, serving
from rookery.embedded import EngineConfig
from rookery.errors import EngineError, TrainError
from rookery.loops.grpo import GrpoConfig, GrpoInputs, train_policy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.policy_weights import POLICY, TraineePolicy
from rookery.remote import ServiceClient, ServiceClientConfig, open_client
from rookery.reports import GrpoReport
from rookery.rollout import RolloutLog
from rookery.runs import Run
from rookery.slots import SlottedModel
from rookery.tasks.taskset import load_tasksets
from rookery.tasks.template import load_template
from rookery.types import (
    Datum,
    LoraShape,
    ModelRef,
    OptimStep,
    Penalties,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TrainRequest,
)
from rookery.weights import read_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
LORA = {"rank": 4, "alpha": 32.0, "targets": ALL}
DATUM = Datum(tokens=(5, 6, 7), positions=(1, 2), targets=(7, 8), weights=(1.0, 1.0))


@asynccontextmanager
async def opened(folder: Path, model: Path) -> AsyncIterator[ServiceClient]:
    config = ServeConfig(
        port=0,
        anonymous=True,
        models={"tiny": str(model)},
        folder=folder,
        engine=EngineConfig(cache_gib=0.01),
    )
    async with (
        serving(config) as url,
        open_client(ServiceClientConfig(url=url, away_s=5.0)) as client,
    ):
        yield client


async def run_on_service(run: Run, inputs: Inputs, client: ServiceClient) -> GrpoReport:
    config = GrpoConfig.model_validate(inputs.document(lora=LORA, drawing=DRAWING))
    tasksets = load_tasksets(config.judged_tasksets)
    shape = LoraShape(rank=4, seed=config.seed)
    start = run.path / "start" if read_start(run) is not None else shape
    await client.trainer.create(POLICY, start)
    drawer, evaluator = _drawing(
        config, client.engine, load_template(inputs.model), tasksets, RolloutLog(run)
    )
    parts = GrpoInputs(
        config=config,
        weights=TraineePolicy(client.trainer, trainees=client.trainer, engine=client.engine),
        tasksets=tasksets,
        drawer=drawer,
        evaluator=evaluator,
    )
    return await train_policy(parts, engine=client.engine, run=run)


DRAWING = {"max_tokens": 4, "top_p": 0.9}


async def test_a_training_on_a_service_is_the_same_training(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    with Run.create(tmp_path, kind="grpo", config={}, name="own") as run:
        own = await run_training(run, grpo_inputs, model=plain_model, lora=LORA, drawing=DRAWING)
    with Run.create(tmp_path, kind="grpo", config={}, name="far") as run:
        async with opened(tmp_path / "serve", grpo_inputs.model) as client:
            far = await run_on_service(run, grpo_inputs, client)
    assert (
        read_adapter(tmp_path / "far/trained").version
        == read_adapter(tmp_path / "own/trained").version
    )
    ours, theirs = clockless(own), clockless(far)
    assert theirs["steps"] == ours["steps"]
    assert theirs["rows"] == ours["rows"]


async def test_the_engine_of_a_service_answers_as_one_of_its_own(
    grpo_inputs: Inputs, tmp_path: Path
) -> None:
    async with opened(tmp_path / "serve", grpo_inputs.model) as client:
        engine, trainer = client.engine, client.trainer
        assert (
            engine.linear_layers["lm_head"][0]
            == engine.linear_layers["model.layers.0.self_attn.q_proj"][0]
        )
        params = SamplingParams(
            max_tokens=6, n=2, seed=3, top_k=5, top_logprobs=2, return_kept=True
        )
        request = SampleRequest(model=engine.base, prompt=(5, 6, 7), params=params)
        first, again = await engine.sample([request, request])
        assert first == again
        assert all(len(one.kept) == len(one.tokens) == len(one.top_logprobs) for one in first)
        assert {len(row) for row in first[0].kept} == {5}
        apart = replace(params, temperature=0.0, n=1, penalties=Penalties(frequency=2.0))
        calm = replace(apart, penalties=None)
        pair = [replace(request, params=own) for own in (apart, calm)]
        [[varied], [plain]] = await engine.sample(pair)
        assert varied.logprobs[0] == plain.logprobs[0], "nothing was there before"
        assert varied.logprobs != plain.logprobs
        drawn = first[0].tokens
        [score] = await engine.score(
            [ScoreRequest(model=engine.base, tokens=(5, 6, 7, *drawn), start=3, labels=(9, 10))]
        )
        assert len(score.logprobs) == len(drawn) and len(score.label_logprobs) == 2

        await trainer.create("pupil", LoraShape(rank=2, seed=1))
        before = await trainer.publish("pupil")
        [output] = await trainer.forward_backward([TrainRequest(trainee="pupil", data=(DATUM,))])
        assert len(output.logprobs[0]) == 2 and output.metrics["train/loss"] > 0
        await trainer.save("pupil", tmp_path / "state")
        [step] = await trainer.optim_step([OptimStep(trainee="pupil", learning_rate=1e-2)])
        assert step.metrics["train/grad_norm"] > 0
        after = await trainer.publish("pupil")
        assert after.version != before.version
        with pytest.raises(EngineError, match="not in the service"):
            await engine.sample([SampleRequest(model=before, prompt=(5,))])
        await trainer.load("pupil", tmp_path / "state")
        assert await trainer.publish("pupil") == before, "as it was saved"
        await trainer.export("pupil", tmp_path / "pupil")
        ref = await engine.load(read_adapter(tmp_path / "pupil", name="copy"))
        assert await engine.load(read_adapter(tmp_path / "pupil", name="copy")) == ref
        [one] = await engine.sample([SampleRequest(model=ref, prompt=(5, 6), params=params)])
        assert len(one) == 2
        await engine.unload(ref)
        await engine.unload(ref)
        with pytest.raises(EngineError):
            await engine.unload(ref)


async def test_what_is_wrong_is_said_by_the_ports(grpo_inputs: Inputs, tmp_path: Path) -> None:
    async with opened(tmp_path / "serve", grpo_inputs.model) as client:
        trainer = client.trainer
        await trainer.create("pupil", LoraShape(rank=2, seed=1))
        wrong = TrainRequest(trainee="pupil", data=(DATUM,), loss="none")
        nobody = TrainRequest(trainee="nobody", data=(DATUM,))
        fine = TrainRequest(trainee="pupil", data=(DATUM,))
        outputs = await trainer.forward_backward([wrong, nobody, fine])
        assert "not a loss" in outputs[0].error
        assert "no trainee" in outputs[1].error
        assert not outputs[2].error, "one that is refused does not hold up the next"
        with pytest.raises(TrainError, match="not a loss"):
            await trainer.check_loss("none", {})
        await trainer.check_loss("grpo", {})
        unknown = SampleRequest(model=ModelRef(name="x", version="1"), prompt=(5,))
        with pytest.raises(EngineError, match="not in the service"):
            await client.engine.sample([unknown])
