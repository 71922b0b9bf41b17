"""A tokenizer with its chat template: encodes tasks as tokens of one model, and decodes answers.

    template = load_template("models/smollm2")
    template.encode(task)                          the prompt, ready to be continued
    template.encode_choice(task, choice="red")     prompt and choice, and index of the choice
    template.decode(completion.tokens)

Messages go through the tokenizer's chat template. If `chat` is set, a plain-text prompt becomes one
user message; otherwise it is encoded unchanged. Tokenizers with a chat template set it by default.
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

# Prompt templates such as `Q: {{ question }}` run in jinja2's sandbox, fail on unknown fields and
# escape nothing.
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


def check_prompt_template(source: str) -> str:
    """Return the source; ValueError if it does not parse or uses no field."""
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
    """Render the prompt of one row; `where` names the row in errors."""
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
"""Prompts that a template caches: a search gives the same tasks to thousands of candidates."""


class SpecialToken(Protocol):
    """An entry of the tokenizer's table of added tokens."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

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
    """Encodes tasks for one tokenizer, and caches encoded prompts.

    `chat` None: True if the tokenizer has a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool | None = None) -> None:
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
        """Return the prompt's tokens; a chat ends with the opening of the assistant's turn."""
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
        """Return a chat's tokens up to the opening of the assistant's turn. Not cached."""
        return self.encode_text(self.render_chat(messages, tools=tools))

    def render_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> str:
        """Return a chat's text up to the opening of the assistant's turn."""
        with boundary(TaskError, "The chat template", foreign=(jinja2.TemplateError,)):
            text = self._render(messages, tools)
            if tools and text == self._render(messages):
                raise TaskError(
                    "This model's chat template has no place for tools: leave tools out, or take a "
                    "model that was trained to call them."
                )
        return text

    def special_text(self, token: int) -> str:
        """Return the text of a special token; "" for any other token."""
        added = self._tokenizer.added_tokens_decoder.get(token)
        return added.content if added is not None and added.special else ""

    def encode_choice(self, task: Task, choice: str) -> tuple[TokenIds, int]:
        """Return the tokens of prompt and choice, and the index of the choice's first token.

        The choice follows a chat prompt directly, since the model's turn starts there. It follows a
        plain prompt after one space, unless either has whitespace there or the tokenizer has no
        space. TaskError if the tokenizer cannot write the choice. The prompt's tokens are always an
        exact prefix. Prompt (5, 6) and choice (7,): ((5, 6, 7), 2).
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
        """Return the text of tokens, without end-of-text and other special tokens."""
        return self._decode(tokens, skip_special=True)

    def _decode(self, tokens: TokenIds, *, skip_special: bool) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def without_special(self, text: str) -> str:
        """Remove all strings that this tokenizer would read as special tokens."""
        before = ""
        while before != text:  # a removal can join two halves into a new special token
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
        """Return the tokens of a plain text at the start of a context, with the tokenizer's
        begin-of-text token if it has one."""
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=True))
        # Some tokenizers append end-of-text, after which a model has nothing to continue.
        has_ended = len(tokens) > 1 and tokens[-1] == self._tokenizer.eos_token_id
        return tokens[:-1] if has_ended and self.encode_text(text)[-1:] != tokens[-1:] else tokens

    def encode_text(self, text: str) -> TokenIds:
        """Return the tokens of a text without added special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _is_plain(self, task: Task) -> bool:
        return isinstance(task.prompt, str) and not self.chat

    def _continuations(self, task: Task, choice: str) -> tuple[str, ...]:
        """Return the texts by which the choice may follow its prompt, preferred first."""
        is_apart = str(task.prompt)[-1:].isspace() or choice[:1].isspace()
        return (f" {choice}", choice) if self._is_plain(task) and not is_apart else (choice,)

    def _encode_after(self, task: Task, prompt: TokenIds, text: str) -> TokenIds:
        """Encode the text in the context of its prompt. If a token would span the border, encode it
        alone, since the prompt's tokens are fixed."""
        if self._is_plain(task):
            whole = self.encode_opening(f"{task.prompt}{text}")
            if whole[: len(prompt)] == prompt:
                return whole[len(prompt) :]
        # SentencePiece tokenizers prepend a space to every text.
        return self.encode_text(text.removeprefix(" ") if self._prepends_space() else text)

    def _reads_back(self, tokens: TokenIds, text: str) -> bool:
        """Return whether the tokens decode to the text, up to case, spacing and Unicode form."""
        decoded = self._decode(tokens, skip_special=False)
        return _essence(decoded) == _essence(text)

    def _prepends_space(self) -> bool:
        pieces = self._tokenizer.convert_ids_to_tokens(list(self.encode_text("a")))
        return pieces[:1] != [] and pieces[0].startswith("▁")


def _essence(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def load_template(model_folder: str | Path, *, chat: bool | None = None) -> Template:
    """Load the tokenizer of a model folder, or of a hub id if no such folder exists."""
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
