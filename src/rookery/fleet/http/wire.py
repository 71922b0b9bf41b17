"""Converts Rookery's requests to bodies of `/v1/completions` or `token_route.py`, and the answers
back. Pure: no I/O.

A body carries many prompts but one set of parameters: equal `Fields` may share a call.

    fields = sample_fields(request, capabilities=capabilities)
    body = encode_body("poet@3fa9", fields, [request.prompt])
    choices = read_choices(answer, num_prompts=1, n=fields.n)
    completion = read_completion(choices[0][0], model=request.model, num_top=0)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_json

from rookery.errors import FleetError
from rookery.fleet.http.capabilities import Capabilities
from rookery.seeding import stream_seed
from rookery.types import (
    Completion,
    CompletionDelta,
    KeptTokens,
    ModelRef,
    Penalties,
    SampleRequest,
    SamplingParams,
    TokenIds,
    TopLogprobs,
    VersionSpan,
)

__all__ = [
    "Choice",
    "Fields",
    "Reading",
    "StreamedChoices",
    "check_prompt",
    "compact",
    "encode_body",
    "encode_tokens",
    "likeliest",
    "read_choices",
    "read_completion",
    "read_completions",
    "read_kept",
    "read_reading",
    "sample_fields",
]

# The tokens that a token was drawn from, read from the likeliest tokens that a server reports.
#
# A server with processed log-probabilities reports minus infinity for tokens that top_k, top_p and
# min_p cut off. So if top_k is no larger than what it reports, all remaining tokens are reported.
# vLLM's own `--return-sampling-mask` would report more, but a server with it refuses every greedy
# request and every one without top_k, such as evaluations and scores.


_TIES = 2
"""Multiple of top_k to request: vLLM keeps ties with the last, frequent in half precision."""
_MISSING = 1e-3
"""Rounding loses less probability than this: beyond it, a kept token was not reported."""


def num_shown_for_kept(params: SamplingParams, capabilities: Capabilities) -> int:
    """Return how many of the likeliest tokens cover all kept ones; 0 if not requested."""
    if not (params.return_kept and params.is_cut):
        return 0
    most = capabilities.max_logprobs
    if not 0 < params.top_k <= most:
        raise FleetError(
            f"top_k is {params.top_k}; {capabilities.model} reports at most {most} tokens of each "
            "position, and training with top_p, top_k or min_p needs all tokens that were left. "
            f"Set top_k to 1 to {most}, start the servers with a higher --max-logprobs "
            "(launch.max_logprobs), or draw with top_p 1, top_k 0 and min_p 0."
        )
    return min(most, _TIES * params.top_k)


def read_kept(tops: Sequence[Mapping[int, float]]) -> KeptTokens:
    """Return the tokens of each position with a probability; FleetError if some are missing."""
    for top in tops:
        missing = 1.0 - math.fsum(map(math.exp, top.values()))
        if missing > _MISSING:
            raise FleetError(
                f"A server reported {len(top)} of the tokens that one was drawn from, and "
                f"{missing:.3f} of the probability is missing: many tokens were as likely as the "
                "last of top_k. Start the servers with a higher --max-logprobs "
                "(launch.max_logprobs), or lower top_k."
            )
    return KeptTokens.of(sorted(t for t, value in top.items() if value > -math.inf) for top in tops)


_TOKEN = "token_id:"
_FLOOR = -9999.0
"""vLLM's number for minus infinity, which JSON cannot express."""
_MAX_SEED = 2**63 - 1
"""vLLM ignores the seed -1, and refuses or fails on seeds beyond 64 bits."""

NO_PENALTIES = Penalties()

Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Parameters of a call, for all of its prompts. Equal fields may share a call."""

    max_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    penalties: Penalties = NO_PENALTIES
    stop: tuple[str, ...] = ()
    stop_tokens: TokenIds = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    top: int = 0
    """How many of the likeliest tokens to report at every new position."""
    ids: TokenIds = ()
    """Tokens to report at every new position, instead of the likeliest."""
    json_schema: str = ""
    """Schema that the answers must match."""
    prompt_top: int | None = None
    """Report the prompt's own tokens too, with this many of the likeliest; None for no report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Answer of a one-token call about one prompt."""

    after: Mapping[int, float]
    """Log-probabilities of tokens after the prompt."""
    prompt: tuple[Mapping[int, float] | None, ...]
    """Per prompt position, of its token and the likeliest; None for the first position."""


def sample_fields(request: SampleRequest, *, capabilities: Capabilities) -> Fields:
    """Check a request and return its fields; `max_tokens` is cut to the context left."""
    params = request.params
    _check_params(params)
    check_prompt(request.prompt, capabilities=capabilities)
    _check_server(params, capabilities)
    if request.json_schema and not capabilities.has_json_schemas:
        raise FleetError(
            f"{capabilities.model} cannot hold answers to a JSON schema (structured_outputs): "
            "leave it out, or use vLLM 0.26 or newer."
        )
    is_greedy = params.temperature == 0
    room = math.inf if capabilities.max_model_len is None else capabilities.max_model_len
    return Fields(
        max_tokens=int(min(params.max_tokens, room - len(request.prompt))),
        temperature=params.temperature,
        top_p=1.0 if is_greedy else params.top_p,
        top_k=0 if is_greedy else params.top_k,
        min_p=0.0 if is_greedy else params.min_p,
        penalties=params.penalties or NO_PENALTIES,
        stop=params.stop,
        stop_tokens=params.stop_tokens,
        ignore_eos=params.ignore_eos,
        # Greedy draws have no randomness: without a seed more of them share a call.
        seed=None if is_greedy else _seed(params),
        # The server refuses n greedy draws, which are all equal: one is made and copied.
        n=1 if is_greedy else params.n,
        top=max(params.top_logprobs, num_shown_for_kept(params, capabilities)),
        json_schema=request.json_schema,
    )


def _seed(params: SamplingParams) -> int:
    """Return the seed to send. vLLM draws sample i with seed + i, so that without the key the
    second sample of seed 0 would be the first of seed 1."""
    return params.seed if params.n == 1 else stream_seed(params.seed, "samples")


def check_prompt(prompt: TokenIds, *, capabilities: Capabilities) -> None:
    """FleetError unless the prompt leaves room for one token, which the server always draws."""
    if not prompt:
        raise FleetError("A request has no prompt tokens; give at least one.")
    limit = capabilities.max_model_len
    if limit is not None and len(prompt) >= limit:
        raise FleetError(
            f"A prompt has {len(prompt)} tokens; {capabilities.model} reads at most {limit - 1} "
            "and one new token: shorten it, or start the servers with a higher --max-model-len."
        )


def encode_body(
    model: str, fields: Fields, prompts: Sequence[TokenIds], *, is_streamed: bool = False
) -> bytes:
    """Encode one call of `/v1/completions` as JSON."""
    body = {
        "model": model,
        "prompt": prompts,
        # Log-probabilities bring the ids: `return_token_ids` would send the prompts back too.
        "return_tokens_as_token_ids": True,
        **_parameters(fields),
    }
    if is_streamed:
        body["stream"] = True
    if fields.json_schema:
        body["structured_outputs"] = {"json": fields.json_schema}
    return to_json(body)


def encode_tokens(
    model: str, fields: Fields, prompts: Sequence[TokenIds], *, path: str | None
) -> bytes:
    """Encode one call of our own route as JSON; `path` locates its adapter, None for the base."""
    body = {"model": model, "path": path, "prompts": prompts, "params": _parameters(fields)}
    return to_json(body)


def _parameters(fields: Fields) -> dict[str, Any]:
    """Return every parameter explicitly, so that no server default applies."""
    parameters: dict[str, Any] = {
        "max_tokens": fields.max_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "repetition_penalty": fields.penalties.repetition,
        "presence_penalty": fields.penalties.presence,
        "frequency_penalty": fields.penalties.frequency,
        "n": fields.n,
        "logprobs": len(fields.ids) if fields.ids else fields.top,
    }
    optional = {
        "stop": list(fields.stop),
        "stop_token_ids": list(fields.stop_tokens),
        "ignore_eos": fields.ignore_eos,
        "logprob_token_ids": list(fields.ids),
    }
    parameters.update({key: value for key, value in optional.items() if value})
    if fields.seed is not None:
        parameters["seed"] = fields.seed
    if fields.prompt_top is not None:
        parameters["prompt_logprobs"] = fields.prompt_top
    return parameters


class StreamedChoices:
    """Joins the chunks of a streamed call of one prompt into its choices.

    `tell` gets each addition once. A call that was lost with its server starts anew on another one,
    whose answer must repeat the beginning.
    """

    def __init__(self, tell: Callable[[CompletionDelta], None], *, num_top: int) -> None:
        self._tell = tell
        self._num_top = num_top
        self._passed_on: dict[int, tuple[list[int], int]] = {}
        """Per sample: the tokens passed on, and the length of the text passed on."""
        self._ended: set[int] = set()
        self._choices: dict[int, dict[str, Any]] = {}
        self._system: Any = None

    @property
    def answer(self) -> dict[str, Any]:
        """The answer in the form of a call without `stream`."""
        return {"choices": list(self._choices.values()), "system_fingerprint": self._system}

    def begin(self) -> None:
        """Start over, as a server begins to answer."""
        self._choices, self._system = {}, None

    def add(self, chunk: Any) -> None:
        """Add a chunk; FleetError if it contradicts what was passed on before."""
        self._system = chunk.get("system_fingerprint") or self._system  # vLLM: in the last chunk
        for part in chunk["choices"]:
            sample = part["index"]
            choice = self._choices.setdefault(
                sample,
                {"index": sample, "text": "", "token_ids": [], "token_logprobs": [], "top": []},
            )
            start = len(choice["token_ids"])
            tokens, logprobs = _drawn(part)
            tops = _tops(part)
            choice["text"] += part.get("text") or ""
            choice["finish_reason"] = part.get("finish_reason")
            choice["token_ids"] += tokens
            choice["token_logprobs"] += logprobs
            choice["top"] += [(list(top), list(top.values())) for top in tops]
            self._tell_new(choice, start, [likeliest(top, self._num_top) for top in tops])

    def _tell_new(self, choice: Choice, start: int, tops: Sequence[TopLogprobs]) -> None:
        sample, reason = choice["index"], choice["finish_reason"]
        old_tokens, num_text = self._passed_on.get(sample, ([], 0))
        tokens = choice["token_ids"]
        if tokens[start : len(old_tokens)] != old_tokens[start : len(tokens)]:
            raise FleetError(
                "A server was lost while it streamed an answer, and another one began another "
                "answer: ask again."
            )
        new, text = tokens[len(old_tokens) :], choice["text"][num_text:]
        if sample in self._ended or not (new or text or reason):
            return
        logprobs = choice["token_logprobs"][len(old_tokens) :]
        old_tokens += new
        self._passed_on[sample] = (old_tokens, num_text + len(text))
        if reason is not None:
            self._ended.add(sample)
        self._tell(
            CompletionDelta(
                sample=sample,
                tokens=tuple(new),
                logprobs=tuple(map(_logprob, logprobs)),
                text=text,
                finish_reason=reason,
                top_logprobs=tuple(tops[len(tops) - len(new) :]) if self._num_top else (),
            )
        )


def read_choices(answer: Any, *, num_prompts: int, n: int) -> list[list[Choice]]:
    """Return the choices per prompt, in order; FleetError if the answer is incomplete."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != num_prompts * n:
        num_choices = len(choices) if isinstance(choices, list) else 0
        raise FleetError(
            f"A server returned {num_choices} choices for {num_prompts} prompts times {n}: "
            "is it an OpenAI-compatible completions server?"
        )
    ordered: list[Choice | None] = [None] * len(choices)
    for choice in choices:
        index = choice.get("index", -1)
        if not 0 <= index < len(ordered) or ordered[index] is not None:
            raise FleetError(f"A server returned choice {index} twice or out of range.")
        ordered[index] = choice
    complete = [choice for choice in ordered if choice is not None]
    return [complete[first : first + n] for first in range(0, len(complete), n)]


def compact(choice: Choice) -> Choice:
    """Convert a choice with only drawn tokens to the form of our own route. This drops the
    dictionary per token of `/v1/completions`: thousands of them would wait for the last answer, and
    Python's garbage collection would scan them again and again."""
    if "token_logprobs" in choice:
        return choice
    tokens, logprobs = _drawn(choice)
    return {
        "finish_reason": choice.get("finish_reason"),
        "text": choice.get("text"),
        "token_ids": tuple(tokens),
        "token_logprobs": tuple(logprobs),
    }


def read_completion(choice: Choice, *, model: ModelRef, num_top: int) -> Completion:
    """Convert one choice to a Completion; every token needs its id and log-probability."""
    tokens, logprobs = _drawn(choice)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise FleetError(f"A completion of {model.served_name} ended with {reason!r}, incomplete.")
    if not tokens or not logprobs or len(tokens) != len(logprobs):
        raise FleetError(
            f"A server returned a completion of {model.served_name} without log-probabilities; "
            "Rookery does not invent them: use a vLLM server."
        )
    return Completion(
        model=model,
        tokens=tuple(tokens),
        # A call per number would take a tenth of a completion's cost: only odd values need one.
        logprobs=tuple([v if v is not None and v > _FLOOR else _logprob(v) for v in logprobs]),
        text=choice.get("text") or "",
        finish_reason=reason,
        top_logprobs=tuple(likeliest(top, num_top) for top in _tops(choice)) if num_top else (),
    )


def read_completions(
    request: SampleRequest, choices: Sequence[Choice], *, has_versions: bool = False
) -> tuple[Completion, ...]:
    """Return one request's completions, with the reported weight versions if `has_versions`."""
    num_top = request.params.top_logprobs
    completions = tuple(read_completion(c, model=request.model, num_top=num_top) for c in choices)
    if has_versions:
        completions = tuple(map(_with_versions, completions, choices))
    if request.params.return_kept and request.params.is_cut:
        completions = tuple(
            replace(completion, kept=read_kept(_tops(choice)))
            for completion, choice in zip(completions, choices, strict=True)
        )
    # Greedy samples are all equal: the server made one.
    return completions * request.params.n if len(completions) == 1 else completions


def _with_versions(completion: Completion, choice: Choice) -> Completion:
    spans = tuple(
        VersionSpan(version=version, start=start, stop=stop)
        for version, start, stop in choice.get("versions") or ()
    )
    if not spans:
        return completion
    model = replace(completion.model, version=spans[-1].version)
    return replace(completion, model=model, version_spans=spans if len(spans) > 1 else ())


def read_position(choice: Choice) -> dict[int, float]:
    """Return the log-probabilities at the first new position."""
    tops = _tops(choice)
    if not tops:
        raise FleetError("A server returned a score without log-probabilities: use a vLLM server.")
    return tops[0]


def read_reading(choice: Choice) -> Reading:
    """Read a one-token answer: after the prompt, and inside it if that was requested."""
    if "prompt_top" in choice:
        rows = [None if row is None else _paired(*row) for row in choice["prompt_top"]]
    else:
        rows = [
            None
            if row is None
            else {int(token): _logprob(entry["logprob"]) for token, entry in row.items()}
            for row in choice.get("prompt_logprobs") or []
        ]
    return Reading(after=read_position(choice), prompt=tuple(rows))


def likeliest(logprobs: Mapping[int, float], num: int) -> TopLogprobs:
    """Return the `num` likeliest of the reported tokens, best first; ties by lower id."""
    if len(logprobs) < num:
        raise FleetError(
            f"A server reported {len(logprobs)} of the {num} likeliest tokens. vLLM's older model "
            "runner does so when another client asks it for given tokens at the same time: let "
            "one client use it, or ask for no top_logprobs."
        )
    return tuple(sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:num])


def _drawn(choice: Choice) -> tuple[Sequence[int], Sequence[float | None]]:
    """Return the tokens and their log-probabilities, from either route."""
    if "token_logprobs" in choice:
        return choice["token_ids"], choice["token_logprobs"]
    logprobs = choice.get("logprobs") or {}
    start = len(_TOKEN)
    tokens = logprobs.get("tokens") or ()
    ids = [int(t[start:]) if t[:start] == _TOKEN else _token_id(t) for t in tokens]
    return ids, logprobs.get("token_logprobs") or ()


def _tops(choice: Choice) -> list[dict[int, float]]:
    """Return the tokens reported at every new position, at least the drawn one."""
    if "top" in choice:
        return [_paired(*top) for top in choice["top"]]
    if "token_logprobs" in choice:
        tokens, logprobs = _drawn(choice)
        return [_paired([token], [value]) for token, value in zip(tokens, logprobs, strict=True)]
    reported = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return [
        {_token_id(token): _logprob(value) for token, value in top.items()}
        for top in reported
        if top is not None
    ]


def _paired(tokens: Sequence[int], logprobs: Sequence[float | None]) -> dict[int, float]:
    return {token: _logprob(value) for token, value in zip(tokens, logprobs, strict=True)}


def _token_id(token: str) -> int:
    if not token.startswith(_TOKEN):
        raise FleetError(
            f"A server named a token {token!r} where `{_TOKEN}17` was asked for: it does not know "
            "return_tokens_as_token_ids. Use vLLM 0.26 or newer, or the external API config."
        )
    return int(token[len(_TOKEN) :])


def _logprob(value: float | None) -> float:
    if value is None or value != value:
        raise FleetError(
            f"A server returned {value} for a log-probability: its weights overflow, or it is not "
            "vLLM. Check the adapter and the dtype."
        )
    return -math.inf if value <= _FLOOR else value


def _check_server(params: SamplingParams, capabilities: Capabilities) -> None:
    if params.top_logprobs > capabilities.max_logprobs:
        raise FleetError(
            f"top_logprobs is {params.top_logprobs}; {capabilities.model} reports at most "
            f"{capabilities.max_logprobs}: start it with --max-logprobs {params.top_logprobs}."
        )
    is_uncut = params.top_p == 1 and params.top_k == 0 and params.min_p == 0
    is_plain = params.penalties is None and (
        params.temperature == 0 or (params.temperature == 1 and is_uncut)
    )
    if not is_plain and not capabilities.has_processed_logprobs:
        raise FleetError(
            f"{capabilities.model} reports log-probabilities before temperature, top_p, top_k, "
            "min_p and penalties, not of the distribution that was drawn from. Start it "
            "with --logprobs-mode processed_logprobs, or sample with temperature 1 or 0, without "
            "cuts and penalties."
        )


def _check_params(params: SamplingParams) -> None:
    rules = (
        (params.max_tokens >= 1, "max_tokens", params.max_tokens, "1 or more"),
        (params.temperature >= 0, "temperature", params.temperature, "0 (greedy) or more"),
        (0 < params.top_p <= 1, "top_p", params.top_p, "above 0, at most 1"),
        (params.top_k >= 0, "top_k", params.top_k, "0 (all) or more"),
        (0 <= params.min_p <= 1, "min_p", params.min_p, "0 to 1"),
        (params.n >= 1, "n", params.n, "1 or more"),
        (params.top_logprobs >= 0, "top_logprobs", params.top_logprobs, "0 or more"),
        (0 <= params.seed <= _MAX_SEED, "seed", params.seed, f"0 to {_MAX_SEED}"),
        (all(params.stop), "stop", params.stop, "non-empty strings"),
    )
    for is_fine, name, value, allowed in rules:
        if not is_fine:
            raise FleetError(f"{name} is {value!r}; it must be {allowed}.")
