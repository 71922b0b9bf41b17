import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rookery.errors import ModelError, TaskError
from rookery.tasks.template import Template, load_template
from rookery.types import Message, Task

FIXTURES = [HealthCheck.function_scoped_fixture]


def ask(prompt: str | tuple[Message, ...]) -> Task:
    return Task(id="t", prompt=prompt, reference=None)


def chat(*turns: tuple[str, str]) -> Task:
    return ask(tuple(Message(role=role, content=content) for role, content in turns))


def test_messages_get_the_chat_template_and_open_the_assistants_turn(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = Template(byte_tokenizer).encode(chat(("system", "s"), ("user", "red")))
    assert byte_tokenizer.decode(tokens) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens[0] == byte_tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_text_is_one_user_message_by_default_iff_there_is_a_chat_template(
    byte_tokenizer: PreTrainedTokenizerFast, metaspace_tokenizer: PreTrainedTokenizerFast
) -> None:
    with_chat = Template(byte_tokenizer)
    assert with_chat.chat
    assert with_chat.encode(ask("red")) == with_chat.encode(chat(("user", "red")))
    without = Template(metaspace_tokenizer)
    assert not without.chat
    assert without.encode(ask("red")) == tuple(metaspace_tokenizer.encode("red"))
    assert without.encode(ask("red"))[0] == metaspace_tokenizer.bos_token_id


def test_chat_false_encodes_text_as_it_is(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(byte_tokenizer, chat=False)
    assert byte_tokenizer.decode(template.encode(ask("Answer:"))) == "Answer:"


def test_messages_without_a_chat_template_say_what_to_do(
    metaspace_tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        Template(metaspace_tokenizer).encode(chat(("user", "red")))
    with pytest.raises(ModelError, match="chat=True needs a chat template"):
        Template(metaspace_tokenizer, chat=True)


def test_a_chat_template_that_refuses_names_the_task(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TaskError, match="Task t: the chat template: roles must alternate"):
        Template(tokenizer).encode(ask("red"))


def test_an_appended_end_of_text_is_dropped_from_a_plain_prompt(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)]
    )
    assert tokenizer.encode("red")[-1] == tokenizer.eos_token_id
    template = Template(tokenizer, chat=False)
    assert template.decode(template.encode(ask("red"))) == "red"
    assert template.encode(ask("red"))[-1] != tokenizer.eos_token_id
    # One that the prompt itself ends with stays.
    assert template.encode(ask("red<|im_end|>"))[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("prompt", "chat", "choice", "text"),
    [
        ("Answer:", False, "red", "Answer: red"),
        ("Answer: ", False, "red", "Answer: red"),
        ("Answer:\n", False, "red", "Answer:\nred"),
        ("Answer:", False, "\nred", "Answer:\nred"),
        ("Answer:", True, "red", "assistant\nred"),
    ],
)
def test_space_before_a_choice(
    byte_tokenizer: PreTrainedTokenizerFast, prompt: str, chat: bool, choice: str, text: str
) -> None:
    tokens, _ = Template(byte_tokenizer, chat=chat).encode_choice(ask(prompt), choice)
    assert byte_tokenizer.decode(tokens).endswith(text)


def test_a_tokenizer_without_a_space_gets_none_and_must_know_the_answer() -> None:
    vocabulary = {"<pad>": 0, **{character: i for i, character in enumerate("+=0123456789", 1)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    spelled = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    template = Template(spelled)
    tokens, start = template.encode_choice(ask("500+1="), "501")
    assert start == 6 and template.decode(tokens[start:]) == "501"
    with pytest.raises(TaskError, match=r"Task t: .* cannot write the answer '5a1': .* '5<pad>1'"):
        template.encode_choice(ask("500+1="), "5a1")


@pytest.mark.parametrize(("prompt", "first"), [("Answer:", "▁red"), ("Answer:\n", "red")])
def test_sentencepiece_tokenizers_write_a_choice_as_in_running_text(
    metaspace_tokenizer: PreTrainedTokenizerFast, prompt: str, first: str
) -> None:
    tokens, start = Template(metaspace_tokenizer).encode_choice(ask(prompt), "red")
    assert metaspace_tokenizer.convert_ids_to_tokens(list(tokens[start:]))[0] == first


@given(prompt=st.text(min_size=1), choice=st.text(min_size=1), chat=st.booleans())
@settings(suppress_health_check=FIXTURES)
def test_the_prompt_is_always_an_exact_prefix_of_a_choice(
    byte_tokenizer: PreTrainedTokenizerFast,
    prompt: str | tuple[Message, ...],
    choice: str,
    chat: bool,
) -> None:
    template = Template(byte_tokenizer, chat=chat)
    prompt_tokens = template.encode(ask(prompt))
    tokens, start = template.encode_choice(ask(prompt), choice)
    assert start == len(prompt_tokens)
    assert tokens[:start] == prompt_tokens
    assert len(tokens) > start


def test_empty_prompt_and_empty_choice_are_errors(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(byte_tokenizer, chat=False)
    with pytest.raises(TaskError, match="Task t: its prompt '' encodes to no tokens"):
        template.encode(ask(""))
    with pytest.raises(TaskError, match="the answer '' encodes to no tokens"):
        template.encode_choice(ask("Answer: "), "")


@given(st.text())
@settings(suppress_health_check=FIXTURES)
def test_decode_is_the_inverse_of_encoding_a_text(
    byte_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    template = Template(byte_tokenizer, chat=False)
    assert template.decode(tuple(byte_tokenizer.encode(text))) == template.without_special(text)


def test_decode_leaves_out_special_tokens_and_keeps_spaces(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tuple(byte_tokenizer.encode(" red , blue !<|im_end|>"))
    assert Template(byte_tokenizer).decode(ids) == " red , blue !"


def test_special_strings_cannot_be_put_together_from_halves(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "x<|im_<|im_end|>end|>y<|im_start|>assistant"
    assert Template(byte_tokenizer).without_special(text) == "xyassistant"


def test_equal_prompts_are_encoded_once(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    template = Template(byte_tokenizer)
    assert template.encode(ask("red")) is template.encode(ask("red"))


def test_load_template_reads_what_transformers_saves(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    byte_tokenizer.save_pretrained(tmp_path)
    template = load_template(tmp_path)
    assert template.chat
    assert template.encode(ask("red")) == Template(byte_tokenizer).encode(ask("red"))


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Reading the tokenizer of .*tokenizer\.json"):
        load_template(tmp_path)
    with pytest.raises(ModelError, match="There is no model folder"):
        load_template(tmp_path / "nowhere")
