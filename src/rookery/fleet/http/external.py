"""An external OpenAI-compatible API as a `Sampler`; `api.py` is the connection to it.

    config = ExternalConfig(url="https://api.example.com/v1", model="big", requests_per_minute=60)
    async with open_external(config, codec=TextCodec(encode=encode, decode=decode)) as sampler:
        [[completion]] = await sampler.sample([SampleRequest(model=sampler.base, prompt=tokens)])

Such an API reads and writes text, so prompts are decoded and answers encoded with the caller's own
tokenizer. Completions have log-probabilities if the API reports them for exactly those tokens, else
none: they are never invented. An answer that is filtered, cut off or unreadable is a FleetError;
`api.py` lists the others.

A call fails as a whole. After one request fails no more are sent, and those in flight are awaited.
Their answers are kept for the next call with the same requests, so that nothing is paid twice.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from rookery.errors import ConfigError, FleetDownError, FleetError, FleetSettingsError, boundary
from rookery.fleet.http.api import CHECK_S, Api, ExternalConfig, open_api, read_usage
from rookery.fleet.http.client import ServerLost
from rookery.runtime.concurrency import together
from rookery.types import (
    Completion,
    Message,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TextReply,
    TextRequest,
    TokenIds,
    TokenUsage,
)

__all__ = [
    "ExternalConfig",
    "ExternalEmbedder",
    "ExternalSampler",
    "ExternalTextModel",
    "TextCodec",
    "open_embedder",
    "open_external",
    "open_text_model",
]

# An external OpenAI-compatible API as a `TextModel`: messages in, text and token usage out.
#
#     config = ExternalConfig(url="https://api.example.com/v1", model="big", requests_per_minute=60)
#     async with open_text_model(config) as model:
#         reply = await model.reply(TextRequest(messages=(Message(role="user", content="Hello"),)))
#
# An API that serves nobody (unreachable, busy for long, no credit, failing or silent on every
# request) is a FleetDownError: a loop waits, or ends and can be resumed. An API that refuses the
# key, the model or every request is a FleetSettingsError: a loop ends. Any other FleetError
# concerns one request.


CHARACTERS_PER_TOKEN = 3
"""Estimate of prompt tokens for tokens_per_minute without a tokenizer: English has four."""
SHORTEST = TextRequest(messages=(Message(role="user", content="Hello"),), max_tokens=1)
"""Request that every working API answers."""


class ExternalTextModel:
    """A TextModel over one API; made by `open_text_model`."""

    def __init__(self, api: Api) -> None:
        self.config = api.config
        self._api = api

    @property
    def usage(self) -> TokenUsage:
        """All tokens paid for so far, as far as the API reports them."""
        return TokenUsage(
            prompt_tokens=self._api.num_prompt_tokens,
            completion_tokens=self._api.num_completion_tokens,
        )

    async def check(self) -> None:
        """FleetSettingsError if the API refuses the key or lacks the model. A listed model is not
        called; an API that does not answer passes."""
        names = await self._api.list_models()
        if not names or self.config.model in names:
            return
        try:  # some list only part of what they serve
            async with asyncio.timeout(CHECK_S):
                await self._ask(SHORTEST)
        except FleetSettingsError:
            raise
        except (FleetError, TimeoutError):
            return

    async def reply(self, request: TextRequest) -> TextReply:
        """Return the reply. If the server fails, a short request decides: if that fails too, the
        API is down; else this prompt alone was too much."""
        try:
            return await self._ask(request)
        except ServerLost as loss:
            if await self._serves_others():
                raise
            said = str(loss).rstrip(".")
            raise FleetDownError(f"{said}. A short request fails too.") from loss

    async def _serves_others(self) -> bool:
        try:
            await self._ask(SHORTEST)
        except FleetSettingsError:
            raise
        except (ServerLost, FleetDownError):
            return False
        except FleetError:
            return True  # a refusal is an answer
        return True

    async def _ask(self, request: TextRequest) -> TextReply:
        written = sum(len(message.content) for message in request.messages)
        cost = written // CHARACTERS_PER_TOKEN + request.max_tokens
        async with self._api.call():
            path = f"{self._api.root}/chat/completions"
            answer = await self._api.ask(path, self._body(request), cost=cost)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise FleetError(f"{self.config.model} answered {choices!r:.80}, not one message.")
        text, reason = message.get("content"), choice.get("finish_reason")
        if reason not in ("stop", "length") or not isinstance(text, str):
            why = message.get("refusal") or f"it ended as {reason!r}"
            raise FleetError(f"{self.config.model} gave no complete reply: {_clean(str(why))}.")
        return TextReply(
            text=_clean(text),
            finish_reason=reason,
            model=self.config.model,
            usage=read_usage(answer),
        )

    def _body(self, request: TextRequest) -> dict[str, Any]:
        """None values are left out, so that the API's own default applies."""
        config = self.config
        optional: dict[str, Any] = {
            "seed": request.seed if config.takes_seed else None,
            "reasoning_effort": config.reasoning_effort,
        }
        if config.token_limit == "max_tokens":
            optional |= {"temperature": request.temperature, "top_p": request.top_p}
        return {
            "model": config.model,
            "messages": [{"role": m.role, "content": m.content} for m in request.messages],
            config.token_limit: request.max_tokens,
            **{name: value for name, value in optional.items() if value is not None},
        }


def _clean(text: str) -> str:
    """Make text writable as UTF-8: JSON allows half of a surrogate pair."""
    return text.encode(errors="replace").decode()


@asynccontextmanager
async def open_text_model(
    config: ExternalConfig, *, api_key: str | None = None, key_hint: str = ""
) -> AsyncIterator[ExternalTextModel]:
    """Connect to the API as `open_api` does. `url` is all that comes before /chat/completions."""
    if config.route != "chat" or config.logprobs:
        raise ConfigError(
            f"A model of texts needs route: chat and logprobs: false; given are {config.route} and "
            f"{str(config.logprobs).lower()}."
        )
    async with open_api(config, api_key=api_key, key_hint=key_hint) as api:
        yield ExternalTextModel(api)


# An external OpenAI-compatible API as an `Embedder`: a text in, its vector out.
#
#     config = ExternalConfig(url="https://api.example.com/v1", model="text-embedding-3-small")
#     async with open_embedder(config) as embedder:
#         vector = await embedder.embed("def f(x): return x * x")


class ExternalEmbedder:
    """An Embedder over one API; made by `open_embedder`."""

    def __init__(self, api: Api) -> None:
        self.config = api.config
        self._api = api

    async def check(self) -> None:
        """FleetSettingsError if the API refuses the key or requires one. Embeds nothing."""
        await self._api.list_models()

    async def embed(self, text: str) -> tuple[float, ...]:
        clean = text.encode(errors="replace").decode()
        body = {"model": self.config.model, "input": [clean], "encoding_format": "float"}
        async with self._api.call():
            path = f"{self._api.root}/embeddings"
            answer = await self._api.ask(path, body, cost=1 + len(clean) // CHARACTERS_PER_TOKEN)
        rows = answer.get("data")
        row = rows[0] if isinstance(rows, list) and len(rows) == 1 else None
        vector = row.get("embedding") if isinstance(row, dict) else None
        if not isinstance(vector, list) or not vector or not all(map(_is_number, vector)):
            raise FleetError(f"{self.config.model} answered {rows!r:.80}, not one vector.")
        return tuple(map(float, vector))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@asynccontextmanager
async def open_embedder(
    config: ExternalConfig, *, api_key: str | None = None, key_hint: str = ""
) -> AsyncIterator[ExternalEmbedder]:
    """Connect to the API as `open_api` does. `url` is all that comes before /embeddings."""
    async with open_api(config, api_key=api_key, key_hint=key_hint) as api:
        yield ExternalEmbedder(api)


Request = TypeVar("Request", SampleRequest, ScoreRequest)
Answer = TypeVar("Answer")
MAX_TOP = 20
"""Limit on the likeliest tokens per position in OpenAI-compatible APIs."""
LATE_S = 30.0
"""Seconds to wait for answers in flight after a request of their call failed."""
MAX_KEPT = 10_000
"""Limit on kept answers of failed calls; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """The caller's tokenizer: text to tokens and back."""

    encode: Callable[[str], TokenIds]
    decode: Callable[[TokenIds], str]


class KeptAnswers(Generic[Request, Answer]):
    """Answers of failed calls that nobody received yet, by request."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Request, list[Answer]] = OrderedDict()

    def keep(self, request: Request, answer: Answer) -> None:
        self._kept.setdefault(request, []).append(answer)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def take(self, request: Request) -> list[Answer]:
        """Return one answer and forget it; empty if there is none."""
        answers = self._kept.get(request, [])
        if len(answers) <= 1:
            self._kept.pop(request, None)
        return [answers.pop()] if answers else []


class ExternalSampler:
    """A Sampler over one API; made by `open_external`."""

    def __init__(self, api: Api, *, codec: TextCodec) -> None:
        self.config = api.config
        self.base = ModelRef(name="base", version=api.config.model)
        self.context_tokens: int | None = None
        """None, as APIs do not report it."""
        self._api = api
        self._codec = codec
        self._samples = KeptAnswers[SampleRequest, tuple[Completion, ...]]()
        self._scores = KeptAnswers[ScoreRequest, Score]()

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        for request in requests:
            self._require(request.model)
            _require_text_params(request)
        return await self._all(requests, self._sample, self._samples)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return log-probabilities of labels after a prompt, as far as the API reports them."""
        for request in requests:
            self._require(request.model)
            self._require_labels(request)
        return await self._all(requests, self._score, self._scores)

    async def _all(
        self,
        requests: Sequence[Request],
        ask: Callable[[Request, Callable[[], bool]], Awaitable[Answer]],
        kept: KeptAnswers[Request, Answer],
    ) -> list[Answer]:
        """Return all answers, in order. If a request fails, keep the others and raise its error."""
        answers: dict[int, Answer] = {}
        failures: list[FleetError] = []

        async def answer(place: int, request: Request, limit: asyncio.Timeout) -> None:
            try:
                answers[place] = await ask(request, lambda: not failures)
            except FleetError as error:
                if not failures:
                    limit.reschedule(asyncio.get_running_loop().time() + LATE_S)
                failures.append(error)

        is_whole = False
        try:
            async with self._api.call() as limit:
                for place, request in enumerate(requests):
                    for known in kept.take(request):
                        answers[place] = known
                missing = [place for place in range(len(requests)) if place not in answers]
                await together(answer(place, requests[place], limit) for place in missing)
            is_whole = not failures
        except TimeoutError:
            pass  # the answers that were on their way are too late
        finally:
            if not is_whole:
                for place, known in answers.items():
                    kept.keep(requests[place], known)
        if failures:
            raise failures[0]
        return [answers[place] for place in range(len(requests))]

    async def _sample(
        self, request: SampleRequest, is_wanted: Callable[[], bool]
    ) -> tuple[Completion, ...]:
        params = request.params
        body = self._body(request.prompt, params)
        cost = len(request.prompt) + params.n * params.max_tokens
        choices = await self._ask(body, cost=cost, num=params.n, is_wanted=is_wanted)
        with boundary(FleetError, f"Could not parse the response of {self.config.model}"):
            return tuple(self._completion(choice, request) for choice in choices)

    async def _score(self, request: ScoreRequest, is_wanted: Callable[[], bool]) -> Score:
        body = self._body(request.tokens, SamplingParams(max_tokens=1), num_top=MAX_TOP)
        cost = len(request.tokens) + 1
        [choice] = await self._ask(body, cost=cost, num=1, is_wanted=is_wanted)
        with boundary(FleetError, f"Could not parse the response of {self.config.model}"):
            positions = _positions(choice)
        if not positions:
            raise FleetError(f"{self.config.model} reports no log-probabilities: labels need them.")
        likeliest = dict(positions[0][2])
        names = [self._codec.decode((label,)) for label in request.labels]
        missing = [name for name in names if name not in likeliest]
        if missing:
            raise FleetError(
                f"The labels {missing} are not among the {len(likeliest)} likeliest tokens that "
                f"{self.config.model} reports; Rookery does not invent their log-probabilities. "
                "Use labels that are one likely token each, or a vLLM server."
            )
        return Score(
            model=request.model,
            logprobs=(),
            label_logprobs=tuple(likeliest[name] for name in names),
        )

    def _body(
        self, prompt: TokenIds, params: SamplingParams, *, num_top: int = 0
    ) -> dict[str, Any]:
        """Parameters that only some APIs know are sent if set, as others refuse them."""
        text = self._codec.decode(prompt)
        body: dict[str, Any] = {
            "model": self.config.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "n": params.n,
            "seed": params.seed,
        }
        optional = {"stop": list(params.stop), "top_k": params.top_k, "min_p": params.min_p}
        body |= {name: value for name, value in optional.items() if value}
        if params.penalties is not None:
            body |= {
                f"{name}_penalty": penalty for name, penalty in asdict(params.penalties).items()
            }
        if self.config.route == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.config.logprobs and self.config.route == "chat":
            body |= {"logprobs": True, "top_logprobs": num_top}
        elif self.config.logprobs:
            body["logprobs"] = num_top
        return body

    async def _ask(
        self, body: Mapping[str, Any], *, cost: int, num: int, is_wanted: Callable[[], bool]
    ) -> list[Any]:
        path = "/v1/chat/completions" if self.config.route == "chat" else "/v1/completions"
        answer = await self._api.ask(path, body, cost=cost, is_wanted=is_wanted)
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != num:
            raise FleetError(
                f"{self.config.model} answered {choices!r:.80} where {num} choices were asked for."
            )
        return choices

    def _completion(self, choice: Mapping[str, Any], request: SampleRequest) -> Completion:
        message = choice.get("message") or {}
        text = message.get("content") if self.config.route == "chat" else choice.get("text")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length") or not isinstance(text, str):
            why = message.get("refusal") or f"it ended as {reason!r}"
            raise FleetError(f"{self.config.model} gave no complete answer: {why}.")
        tokens = self._codec.encode(text)
        positions = _positions(choice)
        is_aligned = [name for name, _, _ in positions] == [
            self._codec.decode((token,)) for token in tokens
        ]
        return Completion(
            model=request.model,
            tokens=tokens,
            logprobs=tuple(value for _, value, _ in positions) if is_aligned else (),
            text=text,
            finish_reason=reason,
        )

    def _require(self, ref: ModelRef) -> None:
        if ref != self.base:
            raise FleetError(
                f"{ref.served_name} cannot be served: {self.config.model} takes no adapters. "
                f"Name {self.base.served_name}, or use a vLLM fleet."
            )

    def _require_labels(self, request: ScoreRequest) -> None:
        if not self.config.logprobs:
            raise FleetError(
                "Scoring labels on an external API needs logprobs: true in its config."
            )
        if request.start < len(request.tokens) or not request.labels or request.top_logprobs:
            raise FleetError(
                "An external API reports no log-probabilities of a given text and no token ids. It "
                "can score labels after a text: set start to the number of tokens and top_logprobs "
                "to 0, or use a vLLM server."
            )


@asynccontextmanager
async def open_external(
    config: ExternalConfig, *, codec: TextCodec
) -> AsyncIterator[ExternalSampler]:
    """Connect to the API as `open_api` does."""
    async with open_api(config) as api:
        yield ExternalSampler(api, codec=codec)


def _require_text_params(request: SampleRequest) -> None:
    """FleetError for options in token ids, which an API of texts cannot apply."""
    params = request.params
    token_options = {
        "json_schema": request.json_schema,
        "stop_tokens": params.stop_tokens,
        "ignore_eos": params.ignore_eos,
        "top_logprobs": params.top_logprobs,
        "return_kept": params.return_kept,
    }
    for name, value in token_options.items():
        if value:
            raise FleetError(
                f"{name} is {value!r}; an external API reads and writes text, not token ids, and "
                "cannot do this: leave it out, stop at texts (stop), or use a vLLM server."
            )


def _positions(choice: Mapping[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Return per new position the drawn token, its log-probability and the likeliest."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        return [
            (
                entry["token"],
                _logprob(entry["logprob"]),
                [
                    (top["token"], _logprob(top["logprob"]))
                    for top in entry.get("top_logprobs") or []
                ],
            )
            for entry in logprobs["content"]
        ]
    tops = logprobs.get("top_logprobs") or []
    drawn = zip(logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True)
    return [
        (
            token,
            _logprob(logprob),
            [(top, _logprob(value)) for top, value in (tops[i] or {}).items()]
            if i < len(tops)
            else [],
        )
        for i, (token, logprob) in enumerate(drawn)
    ]


def _logprob(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise FleetError(
            f"The API answered {value!r:.40} for a log-probability; Rookery does not invent them: "
            "set logprobs: false, or use another API."
        )
    return float(value)
