"""SEARCH/REPLACE blocks and fenced rewrites, read and applied as OpenEvolve 0.4 does.

    <<<<<<< SEARCH
    total = a
    =======
    total = a + b
    >>>>>>> REPLACE

Both sides lose trailing white space. A block replaces the first place where its lines stand:
exactly, else up to trailing white space per line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rookery.loops.evolve.failures import AnswerError, FailureKind
from rookery.loops.evolve.source_files import named_file

__all__ = [
    "DIFF_PATTERN",
    "DiffBlock",
    "SummaryLimits",
    "apply_blocks",
    "extract_blocks",
    "extract_rewrite",
    "find_lines",
    "has_lines",
    "rewrite_files",
    "summarise",
]

DIFF_PATTERN = r"<<<<<<< SEARCH\n(.*?)=======\n(.*?)>>>>>>> REPLACE"
"""The default of `diff_pattern`. Group 1 is SEARCH, group 2 is REPLACE; `.` matches newlines."""

_DELIMITER = re.compile(r"^[ \t]*(<<<<<<< SEARCH|=======|>>>>>>> REPLACE)[ \t]*\r?$", re.MULTILINE)
_COMPLETE = ["<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"]
_FENCE = re.compile(r"```(.*?)```", re.DOTALL)
_Span = tuple[int, int, str, str]
"""Where a block begins and ends, what it searches, and what it puts there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffBlock:
    """One edit: the lines to find and the lines to put in their place."""

    search: str
    replace: str
    before: str = ""
    """The answer's text between the previous block and this one; it may name a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLimits:
    """How much of a block a summary shows."""

    max_line_chars: int = 100
    max_lines: int = 30


def extract_blocks(answer: str, *, pattern: str = DIFF_PATTERN) -> tuple[DiffBlock, ...]:
    """The blocks of an answer, in order; none is an empty tuple.

    With the default pattern a delimiter line outside of a block, or two within one, is an
    AnswerError: the pattern would read the stray line as code. Own patterns are not checked.
    """
    is_standard = pattern == DIFF_PATTERN
    spans = _standard_spans(answer) if is_standard else _pattern_spans(answer, pattern)
    blocks: list[DiffBlock] = []
    cursor = 0
    for start, end, search, replace in spans:
        before = answer[cursor:start]
        if is_standard:
            _check_no_delimiter(before)
            _check_complete(answer[start:end], number=len(blocks) + 1)
        blocks.append(DiffBlock(search=search.rstrip(), replace=replace.rstrip(), before=before))
        cursor = end
    if is_standard:
        _check_no_delimiter(answer[cursor:])
    return tuple(blocks)


def find_lines(lines: Sequence[str], search: Sequence[str]) -> int | None:
    """Where `search` stands first: exactly, else up to trailing white space; None if nowhere."""
    exact = _first_match(lines, search)
    if exact is not None:
        return exact
    return _first_match([line.rstrip() for line in lines], [line.rstrip() for line in search])


def has_lines(lines: Sequence[str], search: Sequence[str]) -> bool:
    """Whether `search` stands there exactly."""
    return _first_match(lines, search) is not None


def apply_blocks(text: str, blocks: Sequence[DiffBlock]) -> tuple[str, int]:
    """The edited text, and how many blocks were found in it. The others change nothing."""
    lines = text.split("\n")
    num_applied = 0
    for block in blocks:
        search = block.search.split("\n")
        start = find_lines(lines, search)
        if start is not None:
            lines[start : start + len(search)] = block.replace.split("\n")
            num_applied += 1
    return "\n".join(lines), num_applied


def extract_rewrite(answer: str, *, language: str) -> str:
    """The first fenced block of the language, else the first of any, else the whole answer.

    A fence that is opened and never closed is an AnswerError: the answer was cut off.
    """
    own = re.search(rf"```{re.escape(language)}\n(.*?)```", answer, re.DOTALL)
    if own:
        code = own[1].strip()
    elif other := _FENCE.search(answer):
        code = _without_tag(other[1]).strip()
    elif "```" in answer:
        raise AnswerError(
            FailureKind.NO_CODE,
            "The answer's code block has no end: it was cut off. Raise llm.max_tokens.",
        )
    else:
        code = answer
    if not code.strip():
        raise AnswerError(FailureKind.NO_CODE, "The answer has no code.")
    return code


def rewrite_files(answer: str, *, files: Mapping[str, str]) -> dict[str, str]:
    """The files of a folder with those replaced for which the answer has a fenced block.

    A block belongs to the file that is named on the line before it. The last block of a file wins.
    """
    rewritten = dict(files)
    num_named = cursor = 0
    for match in _FENCE.finditer(answer):
        if name := named_file(answer[cursor : match.start()], files):
            rewritten[name] = _without_tag(match[1]).strip() + "\n"
            num_named += 1
        cursor = match.end()
    if num_named == 0:
        raise AnswerError(
            FailureKind.NO_CODE,
            "The answer has no code block with a file of the program before it.",
        )
    return rewritten


def summarise(blocks: Sequence[DiffBlock], *, limits: SummaryLimits | None = None) -> str:
    """The edits as the next prompts tell them."""
    limits = limits or SummaryLimits()
    parts = []
    for number, block in enumerate(blocks, start=1):
        old, new = block.search.strip().split("\n"), block.replace.strip().split("\n")
        if len(old) == len(new) == 1:
            parts.append(f"Change {number}: '{old[0]}' to '{new[0]}'")
        else:
            shown = f"{_shorten(old, limits)}\nwith:\n{_shorten(new, limits)}"
            parts.append(f"Change {number}: Replace:\n{shown}")
    return "\n".join(parts)


def _standard_spans(answer: str) -> Iterator[_Span]:
    """What DIFF_PATTERN matches, in one pass.

    The regular expression itself takes cubic time on an answer that repeats delimiters, as small
    models do.
    """
    opening, middle, closing = "<<<<<<< SEARCH\n", "=======\n", ">>>>>>> REPLACE"
    end = 0
    while True:
        start = answer.find(opening, end)
        split = answer.find(middle, start + len(opening)) if start >= 0 else -1
        close = answer.find(closing, split + len(middle)) if split >= 0 else -1
        if close < 0:
            return
        end = close + len(closing)
        search = answer[start + len(opening) : split]
        yield start, end, search, answer[split + len(middle) : close]


def _pattern_spans(answer: str, pattern: str) -> Iterator[_Span]:
    for match in re.finditer(pattern, answer, re.DOTALL):
        yield match.start(), match.end(), match[1] or "", match[2] or ""


def _first_match(lines: Sequence[str], search: Sequence[str]) -> int | None:
    size, wanted = len(search), list(search)
    starts = (i for i in range(len(lines) - size + 1) if lines[i] == wanted[0])
    return next((i for i in starts if list(lines[i : i + size]) == wanted), None)


def _check_complete(block: str, *, number: int) -> None:
    if _DELIMITER.findall(block) != _COMPLETE:
        raise AnswerError(
            FailureKind.BAD_DELIMITERS,
            f"SEARCH/REPLACE block {number} has a delimiter line too many or in the wrong order.",
        )


def _check_no_delimiter(text: str) -> None:
    if stray := _DELIMITER.search(text):
        raise AnswerError(
            FailureKind.BAD_DELIMITERS,
            f"The answer has the delimiter {stray[1]!r} outside of a SEARCH/REPLACE block.",
        )


def _without_tag(content: str) -> str:
    """The content of a fence without the word behind its backticks, such as `py`."""
    first, newline, rest = content.partition("\n")
    return rest if newline and re.fullmatch(r"[\w+#.-]*\s*", first) else content


def _shorten(lines: Sequence[str], limits: SummaryLimits) -> str:
    shown = []
    for line in lines[: limits.max_lines]:
        text = line.rstrip()
        if len(text) > limits.max_line_chars:
            text = text[: limits.max_line_chars - 3] + "..."
        shown.append("  " + text)
    if len(lines) > limits.max_lines:
        shown.append(f"  ... ({len(lines) - limits.max_lines} more lines)")
    return "\n".join(shown) or "  (empty)"
