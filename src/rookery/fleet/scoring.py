"""Score requests as prompts of one-token calls, so that the server's prefix cache is kept.

    plan = plan_score(request, capabilities=capabilities)
    score = assemble_score(plan, readings)      # a Reading per part, in order

A server that reports the log-probabilities of a prompt computes all of it anew, whatever it has
cached. Labels after a prompt never need that. A short tail does not either: tokens (5 6 7 8) from
start 2 are read as "what follows 5 6" and "what follows 5 6 7", each of which finds its prefix in
the cache. Only long tails, and requests for the likeliest tokens, read the prompt itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rookery.errors import FleetError
from rookery.fleet.capabilities import LOGPROB_IDS_LIMIT, Capabilities
from rookery.fleet.wire import Fields, Reading, check_prompt, likeliest
from rookery.types import Score, ScoreRequest, TokenIds, TopLogprobs

__all__ = ["Part", "ScorePlan", "assemble_score", "plan_score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One prompt of a one-token call."""

    prompt: TokenIds
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """The parts that answer one request. `steps`: a part per tail token, then those after it."""

    request: ScoreRequest
    method: Literal["after", "steps", "prompt"]
    parts: tuple[Part, ...]


def plan_score(request: ScoreRequest, *, capabilities: Capabilities) -> ScorePlan:
    """Choose the cheapest exact way to read what the request asks for."""
    _check(request, capabilities)
    tail = request.tokens[request.start :]
    after = _after(request, capabilities)
    if not tail:
        parts = tuple(Part(prompt=request.tokens, fields=fields) for fields in after)
        return ScorePlan(request=request, method="after", parts=parts)
    if _is_worth_stepping(request, capabilities):
        ids = tuple(sorted({*tail, *request.labels}))
        ends = range(request.start, len(request.tokens) + bool(request.labels))
        parts = tuple(Part(prompt=request.tokens[:end], fields=Fields(ids=ids)) for end in ends)
        return ScorePlan(request=request, method="steps", parts=parts)
    if not capabilities.has_prompt_logprobs:
        raise FleetError(
            f"{capabilities.model} does not report log-probabilities of prompts, and {len(tail)} "
            "tokens are too many to ask for one by one: use a vLLM server."
        )
    first, *rest = after or (Fields(),)
    fields = (replace(first, prompt_top=request.top_logprobs), *rest)
    parts = tuple(Part(prompt=request.tokens, fields=f) for f in fields)
    return ScorePlan(request=request, method="prompt", parts=parts)


def assemble_score(plan: ScorePlan, readings: Sequence[Reading]) -> Score:
    """The Score of a plan whose parts were read; a number that is missing is a FleetError."""
    request = plan.request
    tail = request.tokens[request.start :]
    if plan.method == "steps":
        steps = zip(readings, tail, strict=False)
        logprobs = [r.after[token] for r, token in steps if token in r.after]
    elif plan.method == "prompt":
        logprobs = [_of_prompt(readings[0], at, request) for at in _tail(request)]
    else:
        logprobs = []
    after: dict[int, float] = {}
    for part, reading in zip(plan.parts, readings, strict=True):
        if len(part.prompt) == len(request.tokens):
            after.update(reading.after)
    missing = [label for label in request.labels if label not in after]
    if missing or len(logprobs) != len(tail):
        raise FleetError(_missing_sentence(plan, missing))
    return Score(
        model=request.model,
        logprobs=tuple(logprobs),
        label_logprobs=tuple(after[label] for label in request.labels),
        top_logprobs=_tops(plan, readings) if request.top_logprobs else (),
    )


def _check(request: ScoreRequest, capabilities: Capabilities) -> None:
    check_prompt(request.tokens, capabilities=capabilities)
    if not 1 <= request.start <= len(request.tokens):
        raise FleetError(
            f"A score request starts at {request.start} of {len(request.tokens)} tokens; it may "
            "start at 1 to their number: the first token has nothing to be predicted from."
        )
    if request.top_logprobs > capabilities.max_logprobs:
        raise FleetError(
            f"top_logprobs is {request.top_logprobs}; {capabilities.model} reports at most "
            f"{capabilities.max_logprobs}: start it with --max-logprobs {request.top_logprobs}."
        )


def _after(request: ScoreRequest, capabilities: Capabilities) -> tuple[Fields, ...]:
    """What to ask at the position after the tokens: the labels, then the likeliest."""
    labels = tuple(dict.fromkeys(request.labels))
    asked: list[Fields] = []
    if labels and capabilities.has_label_logprobs:
        firsts = range(0, len(labels), LOGPROB_IDS_LIMIT)
        asked += [Fields(ids=labels[first : first + LOGPROB_IDS_LIMIT]) for first in firsts]
    elif labels:
        asked.append(Fields(top=capabilities.max_logprobs))
    if request.top_logprobs and not any(f.top >= request.top_logprobs for f in asked):
        asked.append(Fields(top=request.top_logprobs))
    return tuple(asked)


def _is_worth_stepping(request: ScoreRequest, capabilities: Capabilities) -> bool:
    """Whether a part per tail token computes less than the prompt anew.

    A part computes at most one block when its prefix is cached; the parts of one request share
    that prefix even when it is cold. Half the prefix is the price allowed for it.
    """
    tail = request.tokens[request.start :]
    return (
        capabilities.has_label_logprobs
        and (capabilities.has_prefix_cache or not capabilities.has_prompt_logprobs)
        and request.top_logprobs == 0
        and len({*tail, *request.labels}) <= LOGPROB_IDS_LIMIT
        and (
            2 * len(tail) * capabilities.block_tokens <= request.start
            or not capabilities.has_prompt_logprobs
        )
    )


def _tail(request: ScoreRequest) -> range:
    return range(request.start, len(request.tokens))


def _of_prompt(reading: Reading, at: int, request: ScoreRequest) -> float:
    row = reading.prompt[at] if at < len(reading.prompt) else None
    if row is None or request.tokens[at] not in row:
        raise FleetError(
            f"A server left out the log-probability of token {at} of a prompt of "
            f"{len(request.tokens)}; Rookery does not invent it. Check the server's log."
        )
    return row[request.tokens[at]]


def _tops(plan: ScorePlan, readings: Sequence[Reading]) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens of every tail position, and of the one after."""
    num = plan.request.top_logprobs
    rows = [readings[0].prompt[at] or {} for at in _tail(plan.request)]
    for part, reading in zip(plan.parts, readings, strict=True):
        if part.fields.top >= num:
            rows.append(reading.after)
            break
    return tuple(likeliest(row, num) for row in rows)


def _missing_sentence(plan: ScorePlan, missing: Sequence[int]) -> str:
    if not missing:
        return "A server left out the log-probability of a token that was asked for by id."
    num = max(part.fields.top for part in plan.parts)
    return (
        f"The labels {list(missing)} are not among the {num} likeliest tokens, which is all that "
        "this server reports: it does not take `logprob_token_ids`. Use a newer vLLM, or start it "
        "with a higher --max-logprobs."
    )
