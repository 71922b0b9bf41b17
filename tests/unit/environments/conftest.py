"""The tokenizer with a chat template that the tests of tasks make."""

from tasks.conftest import byte_tokenizer  # noqa: F401
