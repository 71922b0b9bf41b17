"""Text models over engines."""

from collections.abc import Mapping, Sequence

import jinja2
import pytest

from rookery.errors import EngineError, ModelError
from rookery.ports import TextModel
from rookery.rollout import EngineTextModel
from rookery.tasks.template import SpecialToken, Template
from rookery.testing import BASE, FakeSampler
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
