"""The tokens of one exchange between a game and a model: what was drawn is never encoded again.

    conversation = Conversation(template)
    prompt = conversation.ask((Message(role="user", content="Guess."),))
    conversation.add(completion)                   # drawn after `prompt`
    prompt = conversation.ask((Message(role="user", content="Higher."),))
    conversation.sequences                         # to train on

The template writes the whole chat as a text. Where that begins with the text so far and the reply,
only the rest is encoded, and follows the drawn tokens:

    text so far     <user>Guess.<end><assistant>
    reply           5<end>                             drawn: kept as it is
    the whole chat  <user>Guess.<end><assistant>5<end><user>Higher.<end><assistant>
    encoded                                           <user>Higher.<end><assistant>

Where it does not, the template has rewritten what was said, such as thinking that it leaves out:
the model reads another text from then on, and a new sequence begins.
"""

from collections.abc import Sequence

from rookery.errors import TaskError
from rookery.tasks.template import Template
from rookery.types import Completion, KeptTokens, Message, TokenIds, TokenSequence

__all__ = ["ASSISTANT", "Conversation"]

ASSISTANT = "assistant"


class Conversation:
    """The messages of one exchange, and their tokens as the model read and drew them."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._finished: list[TokenSequence] = []
        self._text = ""
        """What the tokens before the last reply stand for."""
        self._reply = ""
        self._reply_end = ""
        """The special token that ended the last reply, if one did."""
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
        """Everything that was read and drawn. Tokens that follow the last drawn one are not in."""
        return (*self._finished, *self._current())

    @property
    def text(self) -> str:
        """The exchange, for people to read."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    def ask(self, messages: tuple[Message, ...]) -> TokenIds:
        """Add what the game says; the tokens that the model is to continue."""
        self.messages += messages
        if self._template.chat:
            self._ask_chat()
        else:
            self._ask_plain(messages)
        return tuple(self._tokens)

    def add(self, completion: Completion) -> None:
        """The model's reply, drawn after what `ask` returned."""
        first = len(self._tokens)
        self._tokens += completion.tokens
        self._drawn += range(first, len(self._tokens))
        self._logprobs += completion.logprobs
        self._kept += KeptTokens.of(completion.kept).rows
        self.num_drawn += len(completion.tokens)
        # As a chat template is given it, so that no reply can open a turn of its own.
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
        """What the text adds to the tokens so far; None when it does not begin as they do."""
        # Many templates strip replies: the drawn whitespace stays in the tokens.
        reply = self._reply
        for written in (reply, reply.rstrip(), reply.lstrip(), reply.strip()):
            before = self._text + written
            if text.startswith(before):
                return text[len(before) :].removeprefix(self._reply_end)
        return None

    def _ask_plain(self, messages: tuple[Message, ...]) -> None:
        """A model without a chat template reads the texts one after the other."""
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
