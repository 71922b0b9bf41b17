"""Text models over what there is: an engine behind its chat template, and several models as one.

local = EngineTextModel(engine, model=engine.base, template=template)
both = EnsembleTextModel({"local": Member(local, weight=3), "big": Member(api, weight=1)})
reply = await both.reply(request)                  # reply.model is "local" or "big"
reply = await both.member("big").reply(request)    # for whoever chooses by other rules
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rookery.errors import ConfigError, EngineError, ModelError, TaskError
from rookery.ports import Sampler, TextModel
from rookery.seeding import stream
from rookery.tasks.template import Template
from rookery.types import (
    ModelRef,
    SampleRequest,
    SamplingParams,
    TextReply,
    TextRequest,
    TokenUsage,
)

__all__ = ["EngineTextModel", "EnsembleTextModel", "Member"]


class EngineTextModel:
    """A TextModel over one model of a sampler, base or adapter."""

    def __init__(self, sampler: Sampler, *, model: ModelRef, template: Template) -> None:
        if not template.chat:
            raise ModelError(
                f"{model.served_name} has no chat template to put messages in: take the instruct "
                "version of the model."
            )
        self._sampler = sampler
        self._model = model
        self._template = template

    async def reply(self, request: TextRequest) -> TextReply:
        try:
            prompt = await asyncio.to_thread(self._template.encode_chat, request.messages)
        except TaskError as error:
            raise EngineError(str(error)) from error
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed or 0,
        )
        asked = SampleRequest(model=self._model, prompt=prompt, params=params)
        [[completion]] = await self._sampler.sample([asked])
        return TextReply(
            text=completion.text,
            finish_reason=completion.finish_reason,
            model=self._model.served_name,
            usage=TokenUsage(prompt_tokens=len(prompt), completion_tokens=len(completion.tokens)),
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A model of an ensemble; one of weight 3 gets three times the requests of one of weight 1."""

    model: TextModel
    weight: float = 1.0


class EnsembleTextModel:
    """A TextModel that puts each request to one of its members. One that fails is not replaced by
    another: its error is the request's."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        weights = [member.weight for member in members.values()]
        if not weights or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ConfigError(
                f"The weights of an ensemble are {weights}: give one or more, none below 0 and one "
                "at least above."
            )
        self._members = dict(members)
        self._shares = [weight / sum(weights) for weight in weights]

    def member(self, name: str) -> TextModel:
        """One of its models, whose replies are named as the ensemble's are."""
        if name not in self._members:
            raise ConfigError(f"{name} is not a model of the ensemble: {', '.join(self._members)}.")
        return _Named(self._members[name].model, name)

    async def reply(self, request: TextRequest) -> TextReply:
        return await self.member(self.choose(request)).reply(request)

    def choose(self, request: TextRequest) -> str:
        """Who gets the request: by the weights, drawn from its seed and messages alone."""
        said = [part for message in request.messages for part in (message.role, message.content)]
        rng = stream(request.seed or 0, "ensemble", *said)
        return list(self._members)[int(rng.choice(len(self._shares), p=self._shares))]


@dataclass(frozen=True, slots=True)
class _Named:
    model: TextModel
    name: str

    async def reply(self, request: TextRequest) -> TextReply:
        return replace(await self.model.reply(request), model=self.name)
