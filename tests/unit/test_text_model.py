"""Text models over engines and over one another."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import jinja2
import pytest

from rookery.errors import ConfigError, EngineDownError, EngineError, ModelError
from rookery.ports import TextModel
from rookery.rollout import EngineTextModel, EnsembleTextModel, Member
from rookery.tasks.template import SpecialToken, Template
from rookery.testing import BASE, FakeSampler, FakeTextModel
from rookery.types import Completion, Json, Message, SampleRequest, TextRequest, TokenUsage


class Letters:
    """A tokenizer with a token per letter, and a template of two marks."""

    chat_template: str | dict[str, str] | None = "as below"
    eos_token_id: int | None = 0
    added_tokens_decoder: Mapping[int, SpecialToken] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        return [ord(letter) for letter in text]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        del skip_special_tokens, clean_up_tokenization_spaces
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]

    def apply_chat_template(
        self,
        conversation: list[dict[str, Json]],
        *,
        tools: list[Mapping[str, Json]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str:
        assert add_generation_prompt and not tokenize and tools is None
        if conversation[0]["role"] == "tool":
            raise jinja2.TemplateError("roles must alternate")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<me>"


def ask(text: str = "hello", **options: object) -> TextRequest:
    return TextRequest(messages=(Message(role="user", content=text),), **options)  # type: ignore[arg-type]


class Recorder(FakeSampler):
    """Answers `yes`, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(reply=lambda *_: (121, 101, 115), decode=lambda t: "".join(map(chr, t)))
        self.asked: list[SampleRequest] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        self.asked += requests
        return await super().sample(requests)


async def test_an_engine_replies_behind_its_template() -> None:
    sampler = Recorder()
    model = EngineTextModel(sampler, model=BASE, template=Template(Letters()))
    assert isinstance(model, TextModel)
    reply = await model.reply(ask(max_tokens=7, temperature=0.5, top_p=0.9, seed=3))
    assert reply.text == "yes" and reply.finish_reason == "stop"
    assert reply.model == BASE.served_name
    assert reply.usage == TokenUsage(prompt_tokens=len("<user>hello<me>"), completion_tokens=3)
    [request] = sampler.asked
    assert "".join(map(chr, request.prompt)) == "<user>hello<me>"
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.9, 3)
    await model.reply(ask())
    params = sampler.asked[1].params
    assert (params.temperature, params.top_p, params.seed) == (1.0, 1.0, 0)


async def test_what_an_engine_cannot_reply_to_is_an_engine_error() -> None:
    sampler = Recorder()
    model = EngineTextModel(sampler, model=BASE, template=Template(Letters()))
    tool = TextRequest(messages=(Message(role="tool", content="x"),))
    with pytest.raises(EngineError, match="chat template: roles must alternate"):
        await model.reply(tool)
    sampler.failing.add(BASE)
    with pytest.raises(EngineError, match="was told to fail"):
        await model.reply(ask())
    plain = Letters()
    plain.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        EngineTextModel(sampler, model=BASE, template=Template(plain))


async def test_an_ensemble_shares_requests_by_weight_and_names_who_replied() -> None:
    models = {name: FakeTextModel(lambda _, name=name: name) for name in "abc"}  # type: ignore[misc]
    ensemble = EnsembleTextModel(
        {"a": Member(models["a"], weight=3), "b": Member(models["b"]), "c": Member(models["c"], 0)}
    )
    assert isinstance(ensemble, TextModel)
    requests = [ask(str(i), seed=5) for i in range(400)]
    replies = await asyncio.gather(*(ensemble.reply(request) for request in requests))
    found = Counter(reply.model for reply in replies)
    assert found.keys() == {"a", "b"} and 260 < found["a"] < 340
    assert all(reply.text == reply.model for reply in replies)
    again = [(await ensemble.reply(request)).model for request in reversed(requests)]
    assert again[::-1] == [reply.model for reply in replies], "by the request alone"
    reply = await ensemble.member("c").reply(ask())
    assert reply.model == "c" and models["c"].requests == [ask()]


async def test_a_member_that_fails_is_not_replaced() -> None:
    class Down:
        async def reply(self, request: TextRequest) -> object:
            del request
            raise EngineDownError("as asked")

    ensemble = EnsembleTextModel({"down": Member(Down()), "up": Member(FakeTextModel(str), 0)})  # type: ignore[arg-type]
    with pytest.raises(EngineDownError, match="as asked"):
        await ensemble.reply(ask())


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf")]])
def test_weights_that_choose_nobody_are_refused(weights: list[float]) -> None:
    members = {str(i): Member(FakeTextModel(str), w) for i, w in enumerate(weights)}
    with pytest.raises(ConfigError, match="weights of an ensemble"):
        EnsembleTextModel(members)


def test_an_unknown_member_is_named() -> None:
    with pytest.raises(ConfigError, match="x is not a model of the ensemble: a"):
        EnsembleTextModel({"a": Member(FakeTextModel(str))}).member("x")
