"""The engine for environments: completions of the newest policy, and log-probabilities.

    side = EngineSide(engine, codec=template, samples=gateway.samples)
    side.use(ref, step=3)
    completions = await side.draw((5, 6), SamplingParams(n=4))

Requests wait while new weights are published.
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

# How the completions of environments were drawn, and by which policy.
#
# The Atropos API has no field for this, so a sequence is found again by its tokens. If the same
# tokens were drawn in several ways, as for training and evaluation, log-probabilities decide.


MAX_DRAWS = 200_000
"""Completions remembered, about 100 MB."""
MAX_WAYS = 8
"""Ways in which the same tokens were drawn; the newest are remembered."""
NUM_LOGPROBS = 8
"""Last tokens of a completion whose log-probabilities tell its ways apart."""
MAX_KEPT_BYTES = 1 << 30
"""Limit on the remembered `kept` tokens: at top_p 0.95 some hundred bytes per token."""
_NONE = KeptTokens.of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a completion was drawn, or a sequence with several completions."""

    step: int
    """Policy step at the time of the request; for several completions the earliest."""
    temperature: float
    is_cut: bool
    """True if top_p, top_k or min_p cut the distribution."""
    kept: KeptTokens = _NONE
    """Tokens that each drawn token was drawn from, if cut; empty if unknown."""
    is_penalised: bool = False
    """True if penalties changed the distribution, which the trainer cannot repeat."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the ways in which the same tokens were drawn."""

    drawn: Drawn
    logprobs: "array[float]"
    """Log-probabilities of the last tokens."""

    def is_like(self, other: "_Way") -> bool:
        plain, others = (replace(way.drawn, kept=_NONE) for way in (self, other))
        return plain == others and self.logprobs == other.logprobs


class SampleIndex:
    """Newest completions by prompt and answer."""

    def __init__(self) -> None:
        self._ways: OrderedDict[bytes, tuple[_Way, ...]] = OrderedDict()
        """Ways per completion, the newest last."""
        self._with_kept: OrderedDict[bytes, int] = OrderedDict()
        """Completions whose `kept` is still stored, with its size in bytes."""
        self._kept_bytes = 0

    def note(self, tokens: Sequence[int], drawn: Drawn, logprobs: Sequence[float] = ()) -> None:
        """Remember a completion: `tokens` of prompt and answer, `logprobs` of the answer."""
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
        """Return how a sequence was drawn, given its drawn places and their log-probabilities; None
        if it was drawn elsewhere.

        `kept` has a row per place if it is known for every answer that was cut, else none. An
        unknown answer before the last counts as one step older.
        """
        logprob_at = dict(zip(drawn, logprobs, strict=False))
        *earlier, last = _runs(drawn)
        end = len(tokens)
        newest = self._nearest(tokens, end, logprob_at)
        if newest is None:
            end = last[-1] + 1
            newest = self._nearest(tokens, end, logprob_at)
        if newest is None:
            return None
        ends = [*(run[-1] + 1 for run in earlier), end]
        each = [*(self._nearest(tokens, place, logprob_at) for place in ends[:-1]), newest]
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

    def _nearest(
        self, tokens: Sequence[int], end: int, logprob_at: Mapping[int, float]
    ) -> Drawn | None:
        """Return how the answer that ends at `end` was drawn, in the way whose log-probabilities
        are nearest. On a tie, greedy ways come last, as they are rarely meant for training."""

        def distance(way: _Way) -> tuple[float, bool]:
            places = range(end - len(way.logprobs), end)
            pairs = zip(places, way.logprobs, strict=True)
            gaps = [
                abs(logprob_at[place] - logprob) for place, logprob in pairs if place in logprob_at
            ]
            return round(max(gaps, default=0.0), 5), way.drawn.temperature == 0

        ways = self._ways.get(_key(tokens[:end]), ())
        return min(reversed(ways), key=distance).drawn if ways else None


def _runs(places: Sequence[int]) -> list[Sequence[int]]:
    """Return the runs of consecutive places: 2 3 6 7 8 are 2 3 and 6 7 8."""
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return [places[i:j] for i, j in zip(starts, [*starts[1:], len(places)], strict=True)]


def _rows(answer: Drawn | None, run: Sequence[int], end: int) -> list[Sequence[int]] | None:
    """Return the tokens that those of an answer were drawn from; None if unknown."""
    if answer is None or not answer.is_cut:
        return [()] * len(run)
    first = end - len(answer.kept)
    if run[0] < first:
        return None
    rows = answer.kept.rows
    return [rows[place - first] for place in run]


def _joined(rows: Sequence[Sequence[Sequence[int]] | None]) -> KeptTokens:
    """Join the rows of all answers; empty if one is unknown."""
    known = [row_list for row_list in rows if row_list is not None]
    return KeptTokens.of(
        [row for row_list in known for row in row_list] if len(known) == len(rows) else ()
    )


def _temperature(answers: Sequence[Drawn]) -> float:
    """Return the common temperature; TaskError if they differ, as training uses one."""
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
"""Seconds between two checks whether the awaited weights are there."""
PUBLISH_S = 600.0
"""Longest wait for new weights: a restart of a server takes minutes."""


class ServingEngine(Engine, Protocol):
    """An engine that lists its loaded adapters."""

    @property
    def loaded(self) -> tuple[ModelRef, ...]: ...


class EngineSide:
    """The engine for environments. They name no model: the newest policy answers."""

    def __init__(
        self, engine: ServingEngine, *, codec: Codec, samples: SampleIndex, num_kept: int | None = 0
    ) -> None:
        """`num_kept`: up to how many tokens the engine can report as those drawn from; None for any
        number, 0 if never needed. Training on answers cut by top_p needs them."""
        self.codec = codec
        self._num_kept = num_kept
        self._has_lowered = False
        self._engine = engine
        self._samples = samples
        self._is_adapter = False
        self._ref = engine.base
        self._step = 0
        self.num_answers = self.num_tokens = 0
        """Totals of what environments received."""

    @property
    def context_tokens(self) -> int | None:
        return self._engine.context_tokens

    def use(self, ref: ModelRef, *, step: int) -> None:
        """Set the policy after this many steps."""
        self._is_adapter = ref != self._engine.base
        self._ref, self._step = ref, step

    async def draw(self, prompt: TokenIds, params: SamplingParams) -> tuple[Completion, ...]:
        step, params = self._step, self._with_kept(params)

        async def ask(ref: ModelRef) -> tuple[Completion, ...]:
            [drawn] = await self._engine.sample(
                [SampleRequest(model=ref, prompt=prompt, params=params)]
            )
            return drawn

        completions = await self._ask_policy(ask)
        self.num_answers += len(completions)
        self.num_tokens += sum(len(completion.tokens) for completion in completions)
        details = Drawn(
            step=step,
            temperature=params.temperature,
            is_cut=params.is_cut,
            is_penalised=params.penalties is not None,
        )
        for completion in completions:
            noted = replace(details, kept=KeptTokens.of(completion.kept))
            self._samples.note((*prompt, *completion.tokens), noted, completion.logprobs)
        return completions

    def _with_kept(self, params: SamplingParams) -> SamplingParams:
        """Request the tokens drawn from, if the engine can report them. Only half of the reported
        tokens count towards top_k: servers also keep tokens as likely as the last."""
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
        """Score all tokens but the first."""

        async def ask(ref: ModelRef) -> Score:
            request = ScoreRequest(model=ref, tokens=tokens, top_logprobs=top_logprobs)
            [score] = await self._engine.score([request])
            return score

        return await self._ask_policy(ask)

    async def _ask_policy(self, ask: Callable[[ModelRef], Awaitable[Answer]]) -> Answer:
        """Ask the newest policy; if it is replaced before it answers, ask the next."""
        try:
            return await self._ask_newest(ask)
        except TimeoutError:
            raise FleetDownError(
                f"No new weights arrived within {PUBLISH_S:g} s: look at the run's log, and ask "
                "again."
            ) from None

    async def _ask_newest(self, ask: Callable[[ModelRef], Awaitable[Answer]]) -> Answer:
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
