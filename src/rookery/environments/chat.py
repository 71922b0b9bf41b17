"""The chat: a game calls it to get the model's next reply.

async def play(task: Task, chat: Chat) -> float:
    reply = await chat("Guess a number from 1 to 9.")
    while reply.strip() != str(task.reference) and chat.turns_left:
        reply = await chat("Wrong. Guess again.")
    return float(reply.strip() == str(task.reference))
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError, TaskError
from rookery.ports import Sampler
from rookery.runtime.concurrency import run_in_thread
from rookery.seeding import stream_seed
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    KeptTokens,
    Message,
    ModelRef,
    SampleRequest,
    SamplingParams,
    TokenIds,
    TokenSequence,
)

__all__ = ["Chat", "Conversation", "DrawReply", "Seat", "draw_reply"]

# The tokens of an exchange between a game and a model; sampled tokens are never encoded again.
#
#     conversation = Conversation(template)
#     prompt = conversation.ask((Message(role="user", content="Guess."),))
#     conversation.add(completion)                   # drawn after `prompt`
#     prompt = conversation.ask((Message(role="user", content="Higher."),))
#     conversation.sequences                         # to train on
#
# The template renders the whole chat as a text. If that begins with the previous text and the
# reply, only the rest is encoded and appended to the drawn tokens:
#
#     previous text   <user>Guess.<end><assistant>
#     reply           5<end>                             drawn: kept as it is
#     the whole chat  <user>Guess.<end><assistant>5<end><user>Higher.<end><assistant>
#     encoded                                           <user>Higher.<end><assistant>
#
# Otherwise the template has rewritten earlier messages, such as by dropping thinking. The model
# then reads another text, and a new sequence begins.


ASSISTANT = "assistant"


class Conversation:
    """The messages of one exchange, and their tokens as the model read and drew them."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._finished: list[TokenSequence] = []
        self._text = ""
        """Text of the tokens before the last reply."""
        self._reply = ""
        self._reply_end = ""
        """Special token that ended the last reply; empty if none did."""
        self._start()
        self.messages: list[Message] = []
        self.num_drawn = 0

    def _start(self) -> None:
        self._tokens: list[int] = []
        self._drawn: list[int] = []
        self._logprobs: list[float] = []
        self._kept: list[Sequence[int]] = []

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All read and drawn tokens, without tokens after the last drawn one."""
        return (*self._finished, *self._current())

    @property
    def text(self) -> str:
        """The exchange as text for people."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    def ask(self, messages: tuple[Message, ...]) -> TokenIds:
        """Add the game's messages and return the tokens that the model continues."""
        self.messages += messages
        if self._template.chat:
            self._ask_chat()
        else:
            self._ask_plain(messages)
        return tuple(self._tokens)

    def add(self, completion: Completion) -> None:
        """Add the model's reply, drawn after the tokens that `ask` returned."""
        first = len(self._tokens)
        self._tokens += completion.tokens
        self._drawn += range(first, len(self._tokens))
        self._logprobs += completion.logprobs
        self._kept += KeptTokens.of(completion.kept).rows
        self.num_drawn += len(completion.tokens)
        # As rendered by a chat template, so that no reply can open its own turn.
        self._reply = self._template.without_special(completion.text)
        is_stopped = completion.finish_reason == "stop" and completion.tokens
        self._reply_end = self._template.special_text(completion.tokens[-1]) if is_stopped else ""
        self.messages.append(Message(role=ASSISTANT, content=self._reply))

    def _ask_chat(self) -> None:
        text = self._template.render_chat(tuple(self.messages))
        rest = self._rest(text)
        if rest is None:
            self._finished += self._current()
            self._start()
            rest = text
        self._tokens += self._template.encode_text(rest)
        self._text, self._reply, self._reply_end = text, "", ""

    def _rest(self, text: str) -> str | None:
        """Return the text after the tokens so far; None if the text begins differently."""
        # Many templates strip replies: the drawn whitespace stays in the tokens.
        reply = self._reply
        for written in (reply, reply.rstrip(), reply.lstrip(), reply.strip()):
            before = self._text + written
            if text.startswith(before):
                return text[len(before) :].removeprefix(self._reply_end)
        return None

    def _ask_plain(self, messages: tuple[Message, ...]) -> None:
        """Without a chat template, the model reads the texts one after the other."""
        if any(message.role != "user" for message in messages):
            raise TaskError(
                "The game gave messages with roles, and this model's tokenizer has no chat "
                "template for them: say plain texts, or take the instruct version of the model."
            )
        text = "".join(message.content for message in messages)
        is_first = not self._tokens
        self._tokens += (
            self._template.encode_opening(text) if is_first else self._template.encode_text(text)
        )

    def _current(self) -> tuple[TokenSequence, ...]:
        if not self._drawn:
            return ()
        return (
            TokenSequence(
                tokens=tuple(self._tokens[: self._drawn[-1] + 1]),
                drawn=tuple(self._drawn),
                logprobs=tuple(self._logprobs),
                kept=KeptTokens.of(self._kept) if self._kept else (),
            ),
        )


Said = str | Message | Mapping[str, str] | Sequence[Message | Mapping[str, str]]
"""A text of the user, a message, or several: {"role": "user", "content": "..."}."""

DrawReply = Callable[[SampleRequest], Awaitable[Completion]]
"""Returns the one completion of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The replying model of a game, with its sampling and limits."""

    draw: DrawReply
    template: Template
    model: ModelRef
    params: SamplingParams
    """Sampling of each reply; `max_tokens` limits a single reply."""
    max_turns: int
    max_tokens: int


class Chat:
    """One exchange with one model. Calls must not overlap."""

    def __init__(self, seat: Seat, *, seed: int, affinity: str) -> None:
        self.seed = seed
        """Seed of this game: a game that draws random numbers from it can be repeated."""
        self.conversation = Conversation(seat.template)
        self.completions: list[Completion] = []
        self.down: EngineDownError | FleetDownError | None = None
        """Why no engine replies any more. A game must not treat this as a reply of the model."""
        self.clock: asyncio.Timeout | None = None
        """Time limit of the game, paused while the game waits for a reply."""
        self._seat = seat
        self._affinity = affinity
        self._is_answering = False
        self._is_over = False

    @property
    def turns_left(self) -> int:
        """Replies that may still be requested."""
        return self._seat.max_turns - len(self.completions)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be drawn; also a limit of the next reply."""
        return self._seat.max_tokens - self.conversation.num_drawn

    async def __call__(self, said: Said) -> str:
        """Send messages and return the reply. TaskError without turns or tokens left."""
        self._require_room()
        self._is_answering = True
        left_s = self._stop_clock()
        try:
            completion = await self._reply(_messages(said))
        finally:
            self._is_answering = False
            self._start_clock(left_s)
        self.completions.append(completion)
        self.conversation.add(completion)
        return completion.text

    def close(self) -> None:
        """End the game; later calls are refused."""
        self._is_over = True

    def _stop_clock(self) -> float | None:
        """Pause the time limit and return the seconds left; None without a limit."""
        end_s = self.clock.when() if self.clock is not None else None
        if self.clock is None or end_s is None:
            return None
        self.clock.reschedule(None)
        return end_s - asyncio.get_running_loop().time()

    def _start_clock(self, left_s: float | None) -> None:
        if self.clock is not None and left_s is not None and not self._is_over:
            self.clock.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _reply(self, messages: tuple[Message, ...]) -> Completion:
        prompt = await run_in_thread(self.conversation.ask, messages)
        params = replace(
            self._seat.params,
            n=1,
            seed=stream_seed(self.seed, "turn", len(self.completions)),
            max_tokens=min(self._seat.params.max_tokens, self.tokens_left),
        )
        request = SampleRequest(
            model=self._seat.model, prompt=prompt, params=params, affinity=self._affinity
        )
        try:
            return await self._seat.draw(request)
        except (EngineDownError, FleetDownError) as error:
            self.down = error
            raise
        except (EngineError, FleetError) as error:
            raise TaskError(f"Turn {len(self.completions) + 1}: {error}") from error

    def _require_room(self) -> None:
        if self._is_over:
            raise TaskError("The game is over, and its chat gives no more replies.")
        if self._is_answering:
            raise TaskError("The game called chat twice at a time: await one reply, then the next.")
        if self.turns_left < 1 or self.tokens_left < 1:
            raise TaskError(
                f"The game asks for more than environment.max_turns ({self._seat.max_turns}) or "
                f"environment.max_tokens ({self._seat.max_tokens}) allow: look at chat.turns_left "
                "and chat.tokens_left and end the game, or raise these limits."
            )


def _messages(messages: Said) -> tuple[Message, ...]:
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    if isinstance(messages, Message | Mapping):
        messages = [messages]
    return tuple(_message(one) for one in messages)


def _message(message: Message | Mapping[str, str]) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise TaskError(
            f"The game said {message!r:.80}; a message is a text, or an object with role and "
            "content."
        )
    return Message(role=message["role"], content=message["content"])


async def draw_reply(sampler: Sampler, request: SampleRequest) -> Completion:
    """Draw the only completion of a single request."""
    [[completion]] = await sampler.sample([request])
    return completion
