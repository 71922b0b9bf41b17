"""Task -> tokens of one model, and back: a tokenizer with its chat template.

    template = load_template("models/smollm2")
    template.encode(task)                          the prompt, ready to be continued
    template.encode_choice(task, choice="red")     prompt and choice, and where the choice starts
    template.decode(completion.tokens)

Messages go through the tokenizer's chat template. A prompt that is plain text becomes one user
message when `chat`, which is the default for tokenizers with a chat template, and is otherwise
encoded as it is.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rookery.errors import ModelError, TaskError, boundary, install_extra
from rookery.paths import expanded
from rookery.types import Json, Message, Task, TokenIds

__all__ = [
    "Template",
    "Tokenizer",
    "check_prompt_template",
    "compile_prompt_template",
    "load_template",
    "render_prompt_template",
]

# Prompts written as jinja2 templates: `Q: {{ question }}` over the fields of a row.
#
# Templates run in jinja2's sandbox, a name that is not a field is an error, and nothing is escaped.


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


def check_prompt_template(source: str) -> str:
    """The source itself; ValueError when it does not parse or uses no field."""
    try:
        names = find_undeclared_variables(_ENVIRONMENT.parse(source))
    except jinja2.TemplateError as error:
        raise ValueError(f"the template {source!r} is not jinja2: {error}") from None
    if not names:
        raise ValueError(
            f"the template {source!r} uses no field, so that all prompts would be the same: "
            "write a field as {{ question }}"
        )
    return source


def compile_prompt_template(source: str) -> jinja2.Template:
    """Compile a source that `check_prompt_template` has passed."""
    return _ENVIRONMENT.from_string(source)


def render_prompt_template(
    template: jinja2.Template, fields: Mapping[str, object], *, where: str
) -> str:
    """The prompt of one row; `where` names the row in the error."""
    try:
        return template.render(fields)
    except jinja2.UndefinedError as error:
        names = ", ".join(map(str, fields)) or "none"
        raise TaskError(
            f"{where}: the prompt template asks for a field that the row lacks: {error}. "
            f"Fields found: {names}."
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise TaskError(f"{where}: the prompt template fails on this row: {error}") from error


MAX_CACHED_PROMPTS = 65_536
"""A search puts the same tasks to thousands of candidates; encoding each once is enough."""


class SpecialToken(Protocol):
    """An entry of the tokenizer's table of added tokens."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | dict[str, str] | None
    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, SpecialToken]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Json]],
        *,
        tools: list[Mapping[str, Json]] | None,
        add_generation_prompt: bool,
        tokenize: Literal[False],
    ) -> str: ...


class Template:
    """Encodes tasks for one tokenizer. Encoded prompts are kept, equal prompts encode once."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool | None = None) -> None:
        """`chat` None: as the tokenizer has a chat template or not."""
        if chat and not tokenizer.chat_template:
            raise ModelError(
                "chat=True needs a chat template and this tokenizer has none: "
                "leave chat out, or take the instruct version of the model."
            )
        self._tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self._cached = lru_cache(maxsize=MAX_CACHED_PROMPTS)(self._encode_prompt)
        self._special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]

    def encode(self, task: Task) -> TokenIds:
        """The prompt's tokens, with the opening of the assistant's turn when it is a chat."""
        with boundary(
            TaskError, f"Task {task.id}: the chat template", foreign=(jinja2.TemplateError,)
        ):
            tokens = self._cached(task.prompt)
        if not tokens:
            raise TaskError(f"Task {task.id}: its prompt {task.prompt!r} encodes to no tokens.")
        return tokens

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        """Tokens of a chat, with the opening of the assistant's turn. Not kept: for chats that are
        not asked again."""
        return self.encode_text(self.render_chat(messages, tools=tools))

    def render_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> str:
        """The text of a chat, with the opening of the assistant's turn."""
        with boundary(TaskError, "The chat template", foreign=(jinja2.TemplateError,)):
            text = self._render(messages, tools)
            if tools and text == self._render(messages):
                raise TaskError(
                    "This model's chat template has no place for tools: leave tools out, or take a "
                    "model that was trained to call them."
                )
        return text

    def special_text(self, token: int) -> str:
        """How a chat template writes a special token; empty for every other token."""
        added = self._tokenizer.added_tokens_decoder.get(token)
        return added.content if added is not None and added.special else ""

    def encode_choice(self, task: Task, choice: str) -> tuple[TokenIds, int]:
        """Tokens of prompt and choice, and the index of the choice's first one.

        The choice follows a chat prompt directly, since there the model starts its turn. It follows
        a plain prompt after one space, unless one of them has whitespace there or the tokenizer has
        no space. TaskError for a choice that the tokenizer cannot write. The prompt's tokens are
        always an exact prefix. Prompt (5, 6) and choice (7,): ((5, 6, 7), 2).
        """
        prompt = self.encode(task)
        tokens: TokenIds = ()
        for text in self._continuations(task, choice):
            tokens = self._encode_after(task, prompt, text)
            if tokens and self._reads_back(tokens, text):
                return prompt + tokens, len(prompt)
        if not tokens:
            raise TaskError(f"Task {task.id}: the answer {choice!r} encodes to no tokens.")
        raise TaskError(
            f"Task {task.id}: this model's tokenizer cannot write the answer {choice!r}: it reads "
            f"it as {self._decode(tokens, skip_special=False)!r}. Write the answer with tokens it "
            "has, or take another model."
        )

    def decode(self, tokens: TokenIds) -> str:
        """The text of tokens; end-of-text and other special tokens leave none."""
        return self._decode(tokens, skip_special=True)

    def _decode(self, tokens: TokenIds, *, skip_special: bool) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def without_special(self, text: str) -> str:
        """The text without the strings that this tokenizer reads as special tokens."""
        before = ""
        while before != text:  # a removal can join two halves into a new one
            before = text
            for special in self._special:
                text = text.replace(special, "")
        return text

    def _encode_prompt(self, prompt: str | tuple[Message, ...]) -> TokenIds:
        if isinstance(prompt, str) and not self.chat:
            return self.encode_opening(prompt)
        messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        return self.encode_text(self._render(messages))

    def _render(
        self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Json]] = ()
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ModelError(
                "The tasks are chats (messages) and this model's tokenizer has no chat template: "
                "give them as text (prompt), or take the instruct version of the model."
            )
        return self._tokenizer.apply_chat_template(
            [{"role": one.role, "content": one.content, **one.fields} for one in messages],
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )

    def encode_opening(self, text: str) -> TokenIds:
        """Tokens of a plain text that nothing comes before: with the special token that begins
        every text, where the tokenizer has one."""
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=True))
        # Some tokenizers end every text with end-of-text, after which there is nothing to say.
        has_ended = len(tokens) > 1 and tokens[-1] == self._tokenizer.eos_token_id
        return tokens[:-1] if has_ended and self.encode_text(text)[-1:] != tokens[-1:] else tokens

    def encode_text(self, text: str) -> TokenIds:
        """Tokens of a text as it is, with nothing before or after it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _is_plain(self, task: Task) -> bool:
        return isinstance(task.prompt, str) and not self.chat

    def _continuations(self, task: Task, choice: str) -> tuple[str, ...]:
        """How the choice may follow its prompt, the preferred text first."""
        is_apart = str(task.prompt)[-1:].isspace() or choice[:1].isspace()
        return (f" {choice}", choice) if self._is_plain(task) and not is_apart else (choice,)

    def _encode_after(self, task: Task, prompt: TokenIds, text: str) -> TokenIds:
        """As the tokenizer reads the text behind its prompt; by itself where a token would span the
        border, since the prompt's tokens are what the model is given."""
        if self._is_plain(task):
            whole = self.encode_opening(f"{task.prompt}{text}")
            if whole[: len(prompt)] == prompt:
                return whole[len(prompt) :]
        # SentencePiece tokenizers put a space before every text by themselves.
        return self.encode_text(text.removeprefix(" ") if self._prepends_space() else text)

    def _reads_back(self, tokens: TokenIds, text: str) -> bool:
        """Whether nothing of the text was lost, but for case, spaces and forms of a character."""
        decoded = self._decode(tokens, skip_special=False)
        return _essence(decoded) == _essence(text)

    def _prepends_space(self) -> bool:
        pieces = self._tokenizer.convert_ids_to_tokens(list(self.encode_text("a")))
        return pieces[:1] != [] and pieces[0].startswith("▁")


def _essence(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def load_template(model_folder: str | Path, *, chat: bool | None = None) -> Template:
    """The template of a model folder's tokenizer; a name such as owner/model is a model's id."""
    folder = expanded(model_folder)
    is_id = isinstance(model_folder, str) and not model_folder.startswith((".", "/", "~"))
    if not folder.is_dir() and not is_id:
        raise ModelError(f"There is no model folder {folder}: give one that holds tokenizer.json.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"Reading a tokenizer needs the package transformers: {install_extra('hf')}."
        ) from error
    remedy = "Give a folder that holds tokenizer.json, as transformers saves it"
    with boundary(
        ModelError,
        f"Reading the tokenizer of {model_folder}",
        remedy={OSError: remedy, ValueError: remedy},
    ):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            str(folder if folder.is_dir() else model_folder)
        )
    return Template(tokenizer, chat=chat)
