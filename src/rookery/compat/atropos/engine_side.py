"""What environments ask of the engine: completions of the newest policy, and log-probabilities.

    side = EngineSide(engine, codec=template, samples=gateway.samples)
    side.use(ref, step=3)
    completions = await side.draw((5, 6), SamplingParams(n=4))

While new weights are published, requests wait for them.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, TypeVar

from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError, TaskError
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

__all__ = [
    "Drawn",
    "EngineSide",
    "SampleIndex",
    "ServingEngine",
]

# What is known of the completions that environments got: which policy drew them, and how.
#
# The Atropos API has no field for it, so that a sequence is found again by its tokens; where the
# same were drawn in several ways, as for a training and for an evaluation, by its log-
# probabilities.


MAX_DRAWS = 200_000
"""Completions that are remembered, about 100 MB."""
MAX_WAYS = 8
"""In which the same tokens were drawn: the newest are remembered."""
NUM_LOGPROBS = 8
"""Of the last tokens of a completion, to tell ways apart."""
MAX_KEPT_BYTES = 1 << 30
"""Of what their tokens were drawn from: at top_p 0.95 some hundred bytes of each."""
_NONE = KeptTokens.of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a completion was drawn, or a sequence that has several of them."""

    step: int
    """Of the policy when it was asked for, the first of several: its oldest tokens are of that
    one."""
    temperature: float
    is_cut: bool
    """By top_p, top_k or min_p."""
    kept: KeptTokens = _NONE
    """What each drawn token was drawn from, where that was cut; empty: it is not known."""
    is_penalised: bool = False
    """By what was drawn before: the trainer knows the distribution without that."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One of those in which the same tokens were drawn."""

    drawn: Drawn
    logprobs: "array[float]"
    """Of the last tokens."""

    def is_like(self, other: "_Way") -> bool:
        plain, others = (replace(way.drawn, kept=_NONE) for way in (self, other))
        return plain == others and self.logprobs == other.logprobs


class SampleIndex:
    """The newest completions by prompt and answer."""

    def __init__(self) -> None:
        self._ways: OrderedDict[bytes, tuple[_Way, ...]] = OrderedDict()
        """Of each, the newest last."""
        self._with_kept: OrderedDict[bytes, int] = OrderedDict()
        """The completions whose `kept` is still there, with its size."""
        self._kept_bytes = 0

    def note(self, tokens: Sequence[int], drawn: Drawn, logprobs: Sequence[float] = ()) -> None:
        """`tokens` are the prompt with the answer, `logprobs` those of the answer."""
        key, way = _key(tokens), _Way(drawn, array("d", logprobs[-NUM_LOGPROBS:]))
        others = [other for other in self._ways.get(key, ()) if not other.is_like(way)]
        self._put(key, (*others, way)[-MAX_WAYS:])
        while self._kept_bytes > MAX_KEPT_BYTES:
            oldest = next(iter(self._with_kept))
            ways = self._ways[oldest]
            self._put(oldest, tuple(replace(w, drawn=replace(w.drawn, kept=_NONE)) for w in ways))
        while len(self._ways) > MAX_DRAWS:
            oldest, _ = self._ways.popitem(last=False)
            self._kept_bytes -= self._with_kept.pop(oldest, 0)

    def _put(self, key: bytes, ways: tuple[_Way, ...]) -> None:
        self._ways[key] = ways
        self._kept_bytes -= self._with_kept.pop(key, 0)
        if num_bytes := sum(len(way.drawn.kept.data) for way in ways):
            self._with_kept[key] = num_bytes
            self._kept_bytes += num_bytes

    def find(
        self, tokens: Sequence[int], *, drawn: Sequence[int], logprobs: Sequence[float] = ()
    ) -> Drawn | None:
        """How a sequence was drawn whose tokens at these places were drawn, with these
        log-probabilities; None: elsewhere.

        `kept` has a row for each place when it is known of every one that was cut, else none. An
        answer before the last that is not known counts as drawn before it.
        """
        told = dict(zip(drawn, logprobs, strict=False))
        *earlier, last = _runs(drawn)
        end = len(tokens)
        newest = self._nearest(tokens, end, told)
        if newest is None:
            end = last[-1] + 1
            newest = self._nearest(tokens, end, told)
        if newest is None:
            return None
        ends = [*(run[-1] + 1 for run in earlier), end]
        each = [*(self._nearest(tokens, place, told) for place in ends[:-1]), newest]
        rows = list(map(_rows, each, (*earlier, last), ends))
        answers = [answer for answer in each if answer is not None]
        is_cut = any(answer.is_cut for answer in answers)
        return Drawn(
            step=max(0, min(newest.step - 1 if one is None else one.step for one in each)),
            temperature=_temperature(answers),
            is_cut=is_cut,
            kept=_joined(rows) if is_cut else _NONE,
            is_penalised=any(answer.is_penalised for answer in answers),
        )

    def _nearest(self, tokens: Sequence[int], end: int, told: Mapping[int, float]) -> Drawn | None:
        """How the answer that ends there was drawn; in which way, its log-probabilities tell. They
        do not tell greedy answers from others, which are rarely meant to be trained on."""

        def distance(way: _Way) -> tuple[float, bool]:
            places = range(end - len(way.logprobs), end)
            pairs = zip(places, way.logprobs, strict=True)
            gaps = [abs(told[place] - logprob) for place, logprob in pairs if place in told]
            return round(max(gaps, default=0.0), 5), way.drawn.temperature == 0

        ways = self._ways.get(_key(tokens[:end]), ())
        return min(reversed(ways), key=distance).drawn if ways else None


def _runs(places: Sequence[int]) -> list[Sequence[int]]:
    """Places that follow one another: 2 3 6 7 8 are 2 3 and 6 7 8."""
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return [places[i:j] for i, j in zip(starts, [*starts[1:], len(places)], strict=True)]


def _rows(answer: Drawn | None, run: Sequence[int], end: int) -> list[Sequence[int]] | None:
    """What the tokens of one answer were drawn from, which ends at `end`; None: it is not known."""
    if answer is None or not answer.is_cut:
        return [()] * len(run)
    first = end - len(answer.kept)
    if run[0] < first:
        return None
    rows = answer.kept.rows
    return [rows[place - first] for place in run]


def _joined(rows: Sequence[Sequence[Sequence[int]] | None]) -> KeptTokens:
    """Of all answers; nothing when it is not known of one."""
    known = [row_list for row_list in rows if row_list is not None]
    return KeptTokens.of(
        [row for row_list in known for row in row_list] if len(known) == len(rows) else ()
    )


def _temperature(answers: Sequence[Drawn]) -> float:
    """Of all answers; TaskError when they differ, as a sequence is trained on with one."""
    temperatures = {answer.temperature for answer in answers}
    if len(temperatures) > 1:
        raise TaskError(
            f"The answers of a sequence were drawn with the temperatures {min(temperatures):g} and "
            f"{max(temperatures):g}: draw all that is trained on as one sequence with the same."
        )
    return answers[-1].temperature


def _key(tokens: Sequence[int]) -> bytes:
    return blake2b(array("Q", tokens).tobytes(), digest_size=16).digest()


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
        self, engine: ServingEngine, *, codec: Codec, samples: SampleIndex, num_kept: int | None = 0
    ) -> None:
        """`num_kept`: of how many tokens the engine can tell that one was drawn from them; None: of
        any number, 0: nobody asks. Answers that top_p cut are trained on with them."""
        self.codec = codec
        self._num_kept = num_kept
        self._has_lowered = False
        self._engine = engine
        self._samples = samples
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
            noted = replace(how, kept=KeptTokens.of(completion.kept))
            self._samples.note((*prompt, *completion.tokens), noted, completion.logprobs)
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
                "environments ask for top_p %g and min_p %g without top_k: Rookery draws with "
                "top_k %d, because servers report %d tokens per position (launch.max_logprobs)",
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
                f"No new weights arrived within {PUBLISH_S:g} s: look at the run's log, and ask "
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
