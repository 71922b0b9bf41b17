"""What environments ask of the engine: completions of the newest policy, and log-probabilities.

    side = EngineSide(engine, codec=template, book=gateway.book)
    side.use(ref, step=3)
    completions = await side.draw((5, 6), SamplingParams(n=4))

While new weights are published, requests wait for them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from rookery.environments.atropos.draw_book import DrawBook, Drawn
from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError
from rookery.ports import Codec, Engine
from rookery.types import (
    Completion,
    KeptTokens,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenIds,
)

__all__ = ["EngineSide", "ServingEngine"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

LOOK_S = 0.02
"""How often a request looks whether the weights it waits for are there."""
PUBLISH_S = 600.0
"""How long new weights may take: a restart of a server takes minutes."""


class ServingEngine(Engine, Protocol):
    """An engine that tells what it serves."""

    @property
    def loaded(self) -> tuple[ModelRef, ...]: ...


class EngineSide:
    """The engine for environments: they name no model, the newest policy answers."""

    def __init__(
        self, engine: ServingEngine, *, codec: Codec, book: DrawBook, num_kept: int | None = 0
    ) -> None:
        """`num_kept`: of how many tokens the engine can tell that one was drawn from them; None: of
        any number, 0: nobody asks. Answers that top_p cut are trained on with them."""
        self.codec = codec
        self._num_kept = num_kept
        self._has_lowered = False
        self._engine = engine
        self._book = book
        self._is_adapter = False
        self._ref = engine.base
        self._step = 0
        self.num_answers = self.num_tokens = 0
        """What environments were given so far."""

    @property
    def context_tokens(self) -> int | None:
        return self._engine.context_tokens

    def use(self, ref: ModelRef, *, step: int) -> None:
        """The policy after so many steps."""
        self._is_adapter = ref != self._engine.base
        self._ref, self._step = ref, step

    async def draw(self, prompt: TokenIds, params: SamplingParams) -> tuple[Completion, ...]:
        step, params = self._step, self._with_kept(params)

        async def ask(ref: ModelRef) -> tuple[Completion, ...]:
            [drawn] = await self._engine.sample(
                [SampleRequest(model=ref, prompt=prompt, params=params)]
            )
            return drawn

        completions = await self._asked(ask)
        self.num_answers += len(completions)
        self.num_tokens += sum(len(completion.tokens) for completion in completions)
        how = Drawn(
            step=step,
            temperature=params.temperature,
            is_cut=params.is_cut,
            is_penalised=params.penalties is not None,
        )
        for completion in completions:
            own = replace(how, kept=KeptTokens.of(completion.kept))
            self._book.note((*prompt, *completion.tokens), own, completion.logprobs)
        return completions

    def _with_kept(self, params: SamplingParams) -> SamplingParams:
        """Have the engine tell what tokens are drawn from, where it can. Of the likeliest that
        servers tell half are drawn from: they keep those that are as likely as the last, too."""
        if not params.is_cut or self._num_kept == 0:
            return params
        if self._num_kept is None:
            return replace(params, return_kept=True)
        top_k = params.top_k or self._num_kept // 2
        if not 0 < top_k <= self._num_kept:
            return params
        if top_k != params.top_k and not self._has_lowered:
            self._has_lowered = True
            logger.warning(
                "environments ask for top_p %g and min_p %g without top_k: the %d likeliest tokens "
                "are drawn from, as servers tell %d of each position (launch.max_logprobs)",
                params.top_p, params.min_p, top_k, self._num_kept,
            )  # fmt: skip
        return replace(params, top_k=top_k, return_kept=True)

    async def score(self, tokens: TokenIds, *, top_logprobs: int) -> Score:
        """Of all tokens but the first."""

        async def ask(ref: ModelRef) -> Score:
            request = ScoreRequest(model=ref, tokens=tokens, top_logprobs=top_logprobs)
            [score] = await self._engine.score([request])
            return score

        return await self._asked(ask)

    async def _asked(self, ask: Callable[[ModelRef], Awaitable[Answer]]) -> Answer:
        """Ask the newest policy; when it is replaced before it could answer, the next."""
        try:
            return await self._asked_of_newest(ask)
        except TimeoutError:
            raise FleetDownError(
                f"New weights were not there after {PUBLISH_S:g} s: look at the run's log, and ask "
                "again."
            ) from None

    async def _asked_of_newest(self, ask: Callable[[ModelRef], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(PUBLISH_S) as limit:
            while True:
                ref = self._ref if self._is_adapter else self._engine.base
                if self._is_served(ref):
                    limit.reschedule(None)
                    try:
                        return await ask(ref)
                    except (EngineDownError, FleetDownError):
                        raise
                    except (EngineError, FleetError):
                        if self._is_served(ref):
                            raise
                    limit.reschedule(asyncio.get_running_loop().time() + PUBLISH_S)
                await asyncio.sleep(LOOK_S)

    def _is_served(self, ref: ModelRef) -> bool:
        return ref == self._engine.base or ref in self._engine.loaded
