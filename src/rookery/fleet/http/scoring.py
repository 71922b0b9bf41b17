"""Score requests as prompts of one-token calls, so that the server's prefix cache is used.

    plan = plan_score(request, capabilities=capabilities)
    score = assemble_score(plan, readings)      # a Reading per part, in order

To report the log-probabilities of a prompt, a server computes all of it, ignoring its cache. Labels
after a prompt never need that. A short tail does not either: tokens (5 6 7 8) from start 2 are read
after "5 6" and after "5 6 7", and both prefixes are in the cache. Only long tails and requests for
the likeliest tokens read the prompt itself. On servers that cannot report prompts, these go token
by token too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rookery.errors import FleetError
from rookery.fleet.http.capabilities import LOGPROB_IDS_LIMIT, Capabilities
from rookery.fleet.http.wire import Fields, Reading, check_prompt, likeliest
from rookery.types import Score, ScoreRequest, TokenIds

__all__ = ["PromptPart", "assemble_score", "plan_score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """One prompt of a one-token call."""

    prompt: TokenIds
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """Parts that answer one request.

    With `steps`, a part of n tokens reads what follows them. With `prompt`, the first part also
    reads the tokens inside it.
    """

    request: ScoreRequest
    method: Literal["steps", "prompt"]
    parts: tuple[PromptPart, ...]


def plan_score(
    request: ScoreRequest, *, capabilities: Capabilities, has_head: bool = False
) -> ScorePlan:
    """Choose the cheapest exact way to read what the request asks for.

    `has_head`: the adapter adapts the output layer. vLLM reads prompts without it, as it applies
    adapters of the output layer to sampled tokens only.
    """
    _check(request, capabilities)
    if has_head:
        capabilities = replace(capabilities, has_prompt_logprobs=False)
    after = _fields(request.labels, request.top_logprobs, capabilities)
    if request.start == len(request.tokens) or _is_worth_stepping(request, capabilities):
        parts = [
            PromptPart(prompt=request.tokens[:end], fields=fields)
            for end in _tail(request)
            for fields in _fields((request.tokens[end],), request.top_logprobs, capabilities)
        ]
        parts += [PromptPart(prompt=request.tokens, fields=fields) for fields in after]
        return ScorePlan(request=request, method="steps", parts=_share_ids(parts))
    first, *rest = after or (Fields(),)
    inside = (replace(first, prompt_top=request.top_logprobs), *rest)
    parts = [PromptPart(prompt=request.tokens, fields=fields) for fields in inside]
    return ScorePlan(request=request, method="prompt", parts=tuple(parts))


def assemble_score(plan: ScorePlan, readings: Sequence[Reading]) -> Score:
    """Build the Score from the readings of a plan; FleetError if a number is missing."""
    request = plan.request
    rows, tops = _rows(plan, readings)
    end = len(request.tokens)
    wanted = [(at, request.tokens[at]) for at in _tail(request)]
    wanted += [(end, label) for label in request.labels]
    missing = [(at, token) for at, token in wanted if token not in rows.get(at, {})]
    if missing:
        raise FleetError(_missing_sentence(plan, missing))
    values = [rows[at][token] for at, token in wanted]
    num_tail = end - request.start
    positions = range(request.start, end + 1) if request.top_logprobs else ()
    return Score(
        model=request.model,
        logprobs=tuple(values[:num_tail]),
        label_logprobs=tuple(values[num_tail:]),
        top_logprobs=tuple(likeliest(tops[at], request.top_logprobs) for at in positions),
    )


def _rows(
    plan: ScorePlan, readings: Sequence[Reading]
) -> tuple[dict[int, dict[int, float]], dict[int, Mapping[int, float]]]:
    """Return per position all log-probabilities, and those that hold the likeliest tokens."""
    rows: dict[int, dict[int, float]] = {}
    tops: dict[int, Mapping[int, float]] = {}
    num = plan.request.top_logprobs
    for part, reading in zip(plan.parts, readings, strict=True):
        at = len(part.prompt)
        rows.setdefault(at, {}).update(reading.after)
        if num and part.fields.top >= num:
            tops[at] = reading.after
        for inside in _tail(plan.request) if part.fields.prompt_top is not None else ():
            row = reading.prompt[inside] if inside < len(reading.prompt) else None
            rows[inside] = dict(row or {})
            tops[inside] = rows[inside]
    return rows, tops


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


def _fields(labels: TokenIds, num_top: int, capabilities: Capabilities) -> tuple[Fields, ...]:
    """Return the fields to ask at one position for these labels and the likeliest tokens."""
    wanted = tuple(dict.fromkeys(labels))
    asked: list[Fields] = []
    if wanted and capabilities.has_label_logprobs:
        firsts = range(0, len(wanted), LOGPROB_IDS_LIMIT)
        asked += [Fields(ids=wanted[first : first + LOGPROB_IDS_LIMIT]) for first in firsts]
    elif wanted:
        asked.append(Fields(top=capabilities.max_logprobs))
    if num_top and not any(fields.top >= num_top for fields in asked):
        asked.append(Fields(top=num_top))
    return tuple(asked)


def _share_ids(parts: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
    """Ask all parts for the ids of any part if these are few: the parts then share a call."""
    ids = tuple(sorted({token for part in parts for token in part.fields.ids}))
    if len(ids) > LOGPROB_IDS_LIMIT:
        return tuple(parts)
    return tuple(
        replace(part, fields=replace(part.fields, ids=ids)) if part.fields.ids else part
        for part in parts
    )


def _is_worth_stepping(request: ScoreRequest, capabilities: Capabilities) -> bool:
    """True if a part per tail token costs less than the whole prompt, or is the only way. A part
    computes at most one block if its prefix is cached; the parts of one request share the prefix
    even if it is cold. They may cost up to half of the prefix."""
    if not capabilities.has_prompt_logprobs:
        return True
    num_tail = len(request.tokens) - request.start
    return (
        capabilities.has_label_logprobs
        and capabilities.has_prefix_cache
        and request.top_logprobs == 0
        and 2 * num_tail * capabilities.block_tokens <= request.start
    )


def _tail(request: ScoreRequest) -> range:
    return range(request.start, len(request.tokens))


def _missing_sentence(plan: ScorePlan, missing: Sequence[tuple[int, int]]) -> str:
    tokens = sorted({token for _, token in missing})
    num = max(part.fields.top for part in plan.parts)
    if plan.method == "prompt" or not num:
        return (
            f"A server left out the log-probabilities of the tokens {tokens}, which were asked for "
            "by id; Rookery does not invent them. Check the server's log."
        )
    return (
        f"The labels {tokens} are not among the {num} likeliest tokens, which is all that this "
        "server reports: it does not take `logprob_token_ids`. Use a newer vLLM, or start it with "
        "a higher --max-logprobs."
    )
