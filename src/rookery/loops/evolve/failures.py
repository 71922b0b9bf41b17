"""Why an answer of the model gives no child program: a kind that is counted, and a sentence.

Code that reads an answer raises AnswerError; `answers.read_answer` turns it into a record.
"""

from enum import StrEnum

__all__ = ["AnswerError", "FailureKind"]


class FailureKind(StrEnum):
    """The ways in which an answer is not a child."""

    EMPTY = "empty_answer"
    NO_DIFF = "no_diff"
    BAD_DELIMITERS = "bad_delimiters"
    SEARCH_NOT_FOUND = "search_not_found"
    SEARCH_AMBIGUOUS = "search_ambiguous"
    NO_CODE = "no_code"
    NO_CHANGE = "no_change"
    TOO_LONG = "too_long"
    MARKERS_BROKEN = "markers_broken"
    NO_DESCRIPTION = "no_description"
    BAD_FILES = "bad_files"
    NOT_TEXT = "not_text"


class AnswerError(Exception):
    """An answer that cannot be turned into a child program."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
