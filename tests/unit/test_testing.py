"""The fakes that are shipped: each satisfies its port, and says the same thing every time."""

from pathlib import Path
from typing import Any

import pytest

from rookery.errors import EngineError, ExecutorError
from rookery.ports import (
    Adapters,
    Embedder,
    Executor,
    Publisher,
    Sampler,
    Scorer,
    TextModel,
    Trainer,
)
from rookery.testing import (
    BASE,
    FakeAdapters,
    FakeEmbedder,
    FakeExecutor,
    FakePublisher,
    FakeSampler,
    FakeScorer,
    FakeTextModel,
    FakeTrainee,
    FakeTrainer,
)
from rookery.types import (
    Adapter,
    Datum,
    Job,
    JobDone,
    JobFailed,
    Message,
    ModelRef,
    OptimStep,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    StepOutput,
    TextRequest,
    TokenUsage,
    TrainRequest,
    WorkerLost,
)

OTHER = ModelRef(name="poet", version="1")


def request(model: ModelRef = BASE, **params: Any) -> SampleRequest:
    return SampleRequest(model=model, prompt=(1, 2, 3), params=SamplingParams(**params))


def adapter(version: str = "1") -> Adapter:
    return Adapter(name="poet", base="", factors={}, version=version)


@pytest.mark.parametrize(
    ("fake", "port"),
    [
        (FakeSampler(), Sampler),
        (FakeAdapters(), Adapters),
        (FakePublisher(), Publisher),
        (FakeTextModel(lambda request: ""), TextModel),
        (FakeEmbedder(lambda text: [1.0]), Embedder),
        (FakeTrainer(), Trainer),
        (FakeScorer(lambda task, completion: 1.0), Scorer),
        (FakeExecutor(), Executor),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_fake_satisfies_its_port(fake: object, port: type) -> None:
    assert isinstance(fake, port)


async def test_a_sampler_answers_by_the_request_alone() -> None:
    requests = [request(seed=1, n=3, max_tokens=2), request(OTHER, seed=1), request(seed=2)]
    one, other = FakeSampler(), FakeSampler()
    answers = await one.sample(requests)
    assert answers == await other.sample(requests)
    assert [await other.sample([r]) for r in reversed(requests)] == [[a] for a in answers[::-1]]
    assert [len(group) for group in answers] == [3, 1, 1]
    assert len({c.tokens for group in answers for c in group}) == 5, "seeds, models, samples differ"
    for completion in answers[0]:
        assert completion.model == BASE and completion.finish_reason == "length"
        assert len(completion.tokens) == len(completion.logprobs) == 2
        assert completion.text == " ".join(map(str, completion.tokens))
        assert all(logprob < 0 for logprob in completion.logprobs)
    assert (one.num_samples, one.num_scores) == (5, 0)


async def test_scores_agree_with_the_log_probabilities_of_samples() -> None:
    sampler = FakeSampler()
    [[completion]] = await sampler.sample([request()])
    tokens = (1, 2, 3, *completion.tokens)
    [score] = await sampler.score([ScoreRequest(model=BASE, tokens=tokens, start=3)])
    assert score.logprobs == completion.logprobs
    labels = (*completion.tokens[:1], 7, 8)
    [score] = await sampler.score(
        [ScoreRequest(model=BASE, tokens=tokens[:3], start=3, labels=labels)]
    )
    assert score.logprobs == () and len(score.label_logprobs) == 3
    assert score.label_logprobs[0] == completion.logprobs[0]
    assert sampler.num_scores == 2


async def test_the_likeliest_tokens_are_reported_when_asked_for() -> None:
    [[completion]] = await FakeSampler().sample([request(top_logprobs=3, max_tokens=2)])
    [score] = await FakeSampler().score(
        [ScoreRequest(model=BASE, tokens=(1, 2, 3, *completion.tokens), start=3, top_logprobs=3)]
    )
    assert len(completion.top_logprobs) == 2
    assert score.top_logprobs[:2] == completion.top_logprobs
    assert len(score.top_logprobs) == 3, "also of what would come next"
    for top in score.top_logprobs:
        values = [logprob for _, logprob in top]
        assert len(top) == 3 and values == sorted(values, reverse=True)
    [[plain]] = await FakeSampler().sample([request()])
    assert plain.top_logprobs == ()


async def test_models_that_fail_fail_whole_calls_and_count_nothing() -> None:
    sampler = FakeSampler()
    sampler.failing.add(OTHER)
    with pytest.raises(EngineError, match="poet@1 was told to fail"):
        await sampler.sample([request(), request(OTHER)])
    with pytest.raises(EngineError, match="poet@1"):
        await sampler.score([ScoreRequest(model=OTHER, tokens=(1, 2))])
    assert (sampler.num_samples, sampler.num_scores) == (0, 0)
    assert len(await sampler.sample([request()])) == 1
    sampler.failing.clear()
    assert len(await sampler.sample([request(OTHER)])) == 1


async def test_adapters_are_counted_as_engines_count_them() -> None:
    """Loaded twice is unloaded twice: two loops may share one adapter."""
    adapters = FakeAdapters()
    ref = await adapters.load(adapter())
    assert ref == await adapters.load(adapter()) == ModelRef(name="poet", version="1")
    second = await adapters.load(adapter("2"))
    assert set(adapters.loaded) == {ref, second} and adapters.num_loads == 3
    await adapters.unload(ref)
    assert set(adapters.loaded) == {ref, second}
    await adapters.unload(ref)
    assert set(adapters.loaded) == {second}
    with pytest.raises(EngineError, match="poet@1 is not loaded"):
        await adapters.unload(ref)


async def test_a_trainer_learns_one_number_and_remembers_it(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    datum = Datum(
        tokens=(1, 2), positions=(0, 1), targets=(2, 3), weights=(1.0, 1.0), advantages=(2.0, -0.5)
    )
    request = TrainRequest(trainee="policy", data=(datum, datum), loss="grpo")
    [output] = await trainer.forward_backward([request])
    loss = -sum(sum(values) for values in output.logprobs)
    assert output.metrics == {"train/num_data": 2.0, "train/loss_sum": pytest.approx(loss)}
    assert trainer.trainees["policy"] == FakeTrainee(gradient=3.0)
    assert [len(values) for values in output.logprobs] == [2, 2]
    await trainer.save("policy", tmp_path / "state")
    step = OptimStep(trainee="policy", learning_rate=0.5)
    assert await trainer.optim_step([step]) == [StepOutput(metrics={"train/value": 1.5})]
    assert await trainer.publish("policy") == ModelRef(name="policy", version="1")
    again = FakeTrainer()
    await again.load("policy", tmp_path / "state")
    assert again.trainees["policy"] == FakeTrainee(gradient=3.0)
    assert await again.forward([request]) == [output]
    await again.optim_step([step])
    assert again.trainees == trainer.trainees


async def test_a_trainee_that_fails_fails_alone() -> None:
    trainer = FakeTrainer("good", "bad")
    trainer.failing.add("bad")
    datum = Datum(tokens=(1,), positions=(0,), targets=(2,), weights=(1.0,))
    requests = [TrainRequest(trainee=name, data=(datum,)) for name in ("bad", "good", "other")]
    outputs = await trainer.forward_backward(requests)
    assert [output.error for output in outputs] == [
        "bad was told to fail.",
        "",
        "There is no trainee 'other'.",
    ]
    assert trainer.trainees["good"].gradient == 1.0 and trainer.trainees["bad"].gradient == 0.0
    [output] = await trainer.optim_step([OptimStep(trainee="bad", learning_rate=1.0)])
    assert output.error == "bad was told to fail."


async def test_an_executor_runs_in_order_and_tells_what_became_of_each_job() -> None:
    def task(payload: bytes) -> bytes:
        return str(6 // int(payload)).encode()

    def job(attempt: int, payload: bytes) -> Job:
        return Job(attempt=attempt, epoch=0, payload=payload, limit_s=1.0)

    executor = FakeExecutor(task)
    executor.lost.add((2, 0))
    done = await executor.submit(job(0, b"3"))
    assert isinstance(done, JobDone) and done.output == b"2"
    failed = await executor.submit(job(1, b"0"))
    assert isinstance(failed, JobFailed) and failed.error.startswith("ZeroDivisionError")
    assert isinstance(await executor.submit(job(2, b"3")), WorkerLost)
    assert [job.attempt for job in executor.jobs] == [0, 1, 2]
    await executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        await executor.submit(job(3, b"1"))


async def test_a_text_model_replies_counts_words_cuts_and_fails() -> None:
    chat = (Message(role="user", content="say two words"),)
    model = FakeTextModel(lambda request: "two words" if request.seed == 0 else None)
    reply = await model.reply(TextRequest(messages=chat, seed=0))
    assert (reply.text, reply.finish_reason, reply.model) == ("two words", "stop", "fake-text")
    assert reply.usage == TokenUsage(prompt_tokens=3, completion_tokens=2)
    cut = await model.reply(TextRequest(messages=chat, seed=0, max_tokens=1))
    assert (cut.text, cut.finish_reason) == ("two", "length")
    with pytest.raises(EngineError, match="told to fail"):
        await model.reply(TextRequest(messages=chat, seed=1))
    assert [request.seed for request in model.requests] == [0, 0, 1]
