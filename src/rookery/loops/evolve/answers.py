"""From a model's answer to a child program, or to the reason why there is none.

read_answer(text, parent=parent, rules=AnswerRules(language="python"))
ChildProgram(code=..., changes="Change 1: 'a = 1' to 'a = 2'", ...)
AnswerFailure(kind="search_not_found", message="None of the 2 SEARCH blocks ...")
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from enum import StrEnum
from itertools import chain

from rookery.loops.evolve.imports import add_imports
from rookery.loops.evolve.program import (
    ProgramRecord,
    find_file_problem,
    join_files,
    named_file,
    split_files,
)
from rookery.runs.disk import is_utf8

__all__ = [
    "DIFF_PATTERN",
    "AnswerError",
    "AnswerFailure",
    "AnswerRules",
    "ChildProgram",
    "DiffBlock",
    "EvolveBlock",
    "FailureKind",
    "SummaryLimits",
    "apply_blocks",
    "code_diff",
    "enforce_blocks",
    "evolve_blocks",
    "extract_blocks",
    "extract_prompt",
    "extract_rewrite",
    "find_lines",
    "find_marker_problem",
    "has_lines",
    "read_answer",
    "rewrite_files",
    "summarise",
]


class FailureKind(StrEnum):
    """Reasons why an answer gives no child."""

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
    """An answer that gives no child. `read_answer` turns it into an AnswerFailure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


# EVOLVE-BLOCK markers enclose the lines that the model may change, in any language:
#
#     # EVOLVE-BLOCK-START
#     ...
#     # EVOLVE-BLOCK-END
#
# A marker line begins with any comment sign (`//`, `--`, `%`, `<!--`), or has a trailing
# `# EVOLVE-BLOCK-START`. Without `enforce_evolve_blocks`, markers only advise the model.


_MARKER = re.compile(r"^\W*EVOLVE-BLOCK-(START|END)\b")
_TRAILING = re.compile(r"# EVOLVE-BLOCK-(START|END)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveBlock:
    """Lines between two markers. The line numbers are the markers' own, counted from 0."""

    start_line: int
    end_line: int
    text: str


def evolve_blocks(code: str) -> tuple[EvolveBlock, ...]:
    """Return the blocks of a program whose markers are well-formed."""
    lines = code.split("\n")
    marked = [number for number, line in enumerate(lines) if _marker(line)]
    pairs = zip(marked[::2], marked[1::2], strict=True)
    return tuple(
        EvolveBlock(start_line=start, end_line=end, text="\n".join(lines[start + 1 : end]))
        for start, end in pairs
    )


def find_marker_problem(code: str) -> str | None:
    """Describe the first broken marker, with its line counted from 1. None if none is broken."""
    opened: int | None = None
    for number, line in enumerate(code.split("\n"), start=1):
        match _marker(line):
            case "START" if opened is not None:
                return (
                    f"line {number} has EVOLVE-BLOCK-START inside the block that line {opened} "
                    "began: end that block first."
                )
            case "START":
                opened = number
            case "END" if opened is None:
                return f"line {number} has EVOLVE-BLOCK-END, but no EVOLVE-BLOCK-START before it."
            case "END":
                opened = None
    if opened is not None:
        return f"line {opened} has EVOLVE-BLOCK-START, but no EVOLVE-BLOCK-END follows it."
    return None


def enforce_blocks(original: str, child: str) -> str:
    """Return the original with the contents of the child's blocks, undoing all other edits.

    If the original has no blocks or broken markers, the child is returned. Raises AnswerError if
    the child has broken markers or another number of blocks.
    """
    if find_marker_problem(original) or not (kept := evolve_blocks(original)):
        return child
    if problem := find_marker_problem(child):
        raise AnswerError(FailureKind.MARKERS_BROKEN, f"The child's markers are broken: {problem}")
    if len(new := evolve_blocks(child)) != len(kept):
        raise AnswerError(
            FailureKind.MARKERS_BROKEN,
            f"The child has {len(new)} EVOLVE-BLOCKs, its parent has {len(kept)}.",
        )
    lines = original.split("\n")
    starts = [0, *(block.end_line for block in kept)]
    ends = [*(block.start_line + 1 for block in kept), len(lines)]
    outside = [lines[start:end] for start, end in zip(starts, ends, strict=True)]
    inside = [*(_content(child, block) for block in new), []]
    pieces = zip(outside, inside, strict=True)
    return "\n".join(chain.from_iterable(before + within for before, within in pieces))


def _content(code: str, block: EvolveBlock) -> list[str]:
    return code.split("\n")[block.start_line + 1 : block.end_line]


def _marker(line: str) -> str | None:
    """Return START, END, or None. A line with both trailing markers counts as START."""
    if match := _MARKER.match(line):
        return match[1]
    trailing = set(_TRAILING.findall(line))
    return max(trailing, default=None)


# SEARCH/REPLACE blocks and fenced rewrites, read and applied as in OpenEvolve 0.4:
#
#     <<<<<<< SEARCH
#     total = a
#     =======
#     total = a + b
#     >>>>>>> REPLACE
#
# Trailing white space of both sides is dropped. A block replaces the first place with its lines: an
# exact match, else one up to trailing white space per line.


DIFF_PATTERN = r"<<<<<<< SEARCH\n(.*?)=======\n(.*?)>>>>>>> REPLACE"
"""Default of `diff_pattern`. Group 1 is SEARCH, group 2 is REPLACE; `.` matches newlines."""

_DELIMITER = re.compile(r"^[ \t]*(<<<<<<< SEARCH|=======|>>>>>>> REPLACE)[ \t]*\r?$", re.MULTILINE)
_COMPLETE = ["<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"]
_FENCE = re.compile(r"```(.*?)```", re.DOTALL)
_Span = tuple[int, int, str, str]
"""Start and end of a block, its search text and its replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffBlock:
    """One edit: lines to find and their replacement."""

    search: str
    replace: str
    before: str = ""
    """Text between the previous block and this one, which may name a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLimits:
    """Limits of a block in a summary."""

    max_line_chars: int = 100
    max_lines: int = 30


def extract_blocks(answer: str, *, pattern: str = DIFF_PATTERN) -> tuple[DiffBlock, ...]:
    """Return the blocks of an answer, in order; empty if there are none.

    With the default pattern, raises AnswerError if a delimiter is outside a block, or repeated
    inside one: the pattern would read it as code. Other patterns are not checked.
    """
    is_standard = pattern == DIFF_PATTERN
    spans = _standard_spans(answer) if is_standard else _pattern_spans(answer, pattern)
    blocks: list[DiffBlock] = []
    cursor = 0
    for start, end, search, replacement in spans:
        before = answer[cursor:start]
        if is_standard:
            _check_no_delimiter(before)
            _check_complete(answer[start:end], number=len(blocks) + 1)
        blocks.append(
            DiffBlock(search=search.rstrip(), replace=replacement.rstrip(), before=before)
        )
        cursor = end
    if is_standard:
        _check_no_delimiter(answer[cursor:])
    return tuple(blocks)


def find_lines(lines: Sequence[str], search: Sequence[str]) -> int | None:
    """Find the first match: exact, else up to trailing white space. None if there is none."""
    exact = _first_match(lines, search)
    if exact is not None:
        return exact
    return _first_match([line.rstrip() for line in lines], [line.rstrip() for line in search])


def has_lines(lines: Sequence[str], search: Sequence[str]) -> bool:
    """Return True if the lines match exactly somewhere."""
    return _first_match(lines, search) is not None


def apply_blocks(text: str, blocks: Sequence[DiffBlock]) -> tuple[str, int]:
    """Return the edited text and the number of applied blocks. Skips blocks without a match."""
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
    """Return the first fenced block of the language, else the first of any, else the whole answer.

    Raises AnswerError for an unclosed fence, because the answer was cut off.
    """
    match = re.search(rf"```{re.escape(language)}\n(.*?)```", answer, re.DOTALL)
    if match:
        code = match[1].strip()
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


def extract_prompt(answer: str) -> str:
    """Return the text from the first fence to the last, because a prompt may contain fences, or
    else the whole answer. Raises AnswerError for an unclosed fence: the answer was cut off."""
    first, last = answer.find("```"), answer.rfind("```")
    if 0 <= first == last:
        raise AnswerError(
            FailureKind.NO_CODE,
            "The answer's block has no end: it was cut off. Raise llm.max_tokens.",
        )
    prompt = answer if first < 0 else _without_tag(answer[first + 3 : last])
    if not prompt.strip():
        raise AnswerError(FailureKind.NO_CODE, "The answer has no prompt.")
    return prompt.strip()


def rewrite_files(answer: str, *, files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a folder, replaced where the answer has a fenced block for one.

    The line before a block names its file. The last block of a file wins.
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
    """Summarise the edits for later prompts."""
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
    """Yield the matches of DIFF_PATTERN in linear time. On repeated delimiters, which small models
    produce, the regular expression takes cubic time."""
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
    """Return a fence's content without the tag after its backticks, such as `py`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """The config keys that decide how answers are read."""

    language: str
    is_diff: bool = True
    diff_pattern: str = DIFF_PATTERN
    max_code_chars: int = 10_000
    enforce_blocks: bool = False
    with_description: bool = False
    """True if an answer must also update the changes description."""
    initial_description: str = ""
    """Changes description for a parent that has none."""
    is_prompt: bool = False
    """True if answers are whole prompts, in which fences and file headers have no meaning."""
    summary: SummaryLimits = field(default_factory=SummaryLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgram:
    """A new program, ready to be evaluated."""

    code: str
    changes: str
    changes_description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFailure:
    """An answer without a child. Its attempt is recorded as failed."""

    kind: FailureKind
    message: str


def read_answer(
    answer: str, *, parent: ProgramRecord, rules: AnswerRules
) -> ChildProgram | AnswerFailure:
    """Read the child of `parent` from an answer. Pure."""
    try:
        if not answer.strip():
            raise AnswerError(FailureKind.EMPTY, "The answer is empty.")
        child = _edit(answer, parent, rules) if rules.is_diff else _rewrite(answer, parent, rules)
        child = _keep_blocks(child, parent) if rules.enforce_blocks else child
        _check_text(child.code, rules)
    except AnswerError as error:
        return AnswerFailure(kind=error.kind, message=error.message)
    return child


def code_diff(old: str, new: str) -> str:
    """Return a unified diff of two programs, for traces and pages."""
    lines = unified_diff(old.splitlines(), new.splitlines(), "parent", "child", lineterm="")
    return "\n".join(lines)


def _edit(answer: str, parent: ProgramRecord, rules: AnswerRules) -> ChildProgram:
    blocks = extract_blocks(answer, pattern=rules.diff_pattern)
    if not blocks:
        raise AnswerError(FailureKind.NO_DIFF, "The answer has no SEARCH/REPLACE block.")
    description = parent.changes_description
    if rules.with_description:
        old = parent.changes_description or rules.initial_description
        blocks, about = _split_by_target(blocks, parent.code, old)
        description = _new_description(old, about)
        if not blocks:
            raise AnswerError(FailureKind.NO_CHANGE, "The answer edits only the description.")
    code, num_applied = _apply(parent.code, blocks)
    if num_applied == 0:
        raise AnswerError(
            FailureKind.SEARCH_NOT_FOUND,
            f"None of the {len(blocks)} SEARCH blocks stands in the parent program.",
        )
    if code == parent.code:
        raise AnswerError(FailureKind.NO_CHANGE, "The diff does not change the parent program.")
    return ChildProgram(
        code=code,
        changes=summarise(blocks, limits=rules.summary),
        changes_description=description,
    )


def _rewrite(answer: str, parent: ProgramRecord, rules: AnswerRules) -> ChildProgram:
    if rules.is_prompt:
        code = extract_prompt(answer)
    elif files := parent.files:
        code = _join(rewrite_files(answer, files=files))
    else:
        code = extract_rewrite(answer, language=rules.language)
        code = add_imports(code, parent=parent.code) if rules.language == "python" else code
    if code.strip() == parent.code.strip():
        raise AnswerError(FailureKind.NO_CHANGE, "The rewrite is identical to the parent program.")
    return ChildProgram(
        code=code, changes="Full rewrite", changes_description=parent.changes_description
    )


def _apply(code: str, blocks: Sequence[DiffBlock]) -> tuple[str, int]:
    """Apply the blocks to the one file, or each block to its file of a folder."""
    files = split_files(code)
    if not files:
        return apply_blocks(code, blocks)
    num_applied = 0
    for block in blocks:
        if (name := _target(files, block)) is not None:
            files[name], num = apply_blocks(files[name], [block])
            num_applied += num
    return _join(files), num_applied


def _target(files: dict[str, str], block: DiffBlock) -> str | None:
    """Return the file named before the block, else the only file with its lines."""
    if name := named_file(block.before, files):
        return name
    search = block.search.split("\n")
    hits = [
        name for name, text in files.items() if find_lines(text.split("\n"), search) is not None
    ]
    if len(hits) > 1:
        raise AnswerError(
            FailureKind.SEARCH_AMBIGUOUS,
            f"A SEARCH block stands in {' and '.join(hits)}, and the answer names neither.",
        )
    return hits[0] if hits else None


def _split_by_target(
    blocks: Sequence[DiffBlock], code: str, description: str
) -> tuple[tuple[DiffBlock, ...], tuple[DiffBlock, ...]]:
    """Separate blocks for the code from those that match the changes description exactly."""
    lines, words = code.split("\n"), description.split("\n")
    for_code: list[DiffBlock] = []
    about: list[DiffBlock] = []
    for block in blocks:
        search = block.search.split("\n")
        is_about = has_lines(words, search)
        if is_about and has_lines(lines, search):
            raise AnswerError(
                FailureKind.SEARCH_AMBIGUOUS,
                "A SEARCH block stands both in the code and in the changes description.",
            )
        (about if is_about else for_code).append(block)
    return tuple(for_code), tuple(about)


def _new_description(old: str, blocks: Sequence[DiffBlock]) -> str:
    new, _ = apply_blocks(old, blocks)
    if not new.strip() or new.strip() == old.strip():
        raise AnswerError(
            FailureKind.NO_DESCRIPTION, "The answer does not update the changes description."
        )
    return new


def _keep_blocks(child: ChildProgram, parent: ProgramRecord) -> ChildProgram:
    before, after = split_files(parent.code), split_files(child.code)
    if before:
        code = _join({name: enforce_blocks(text, after[name]) for name, text in before.items()})
    else:
        code = enforce_blocks(parent.code, child.code)
    if code == parent.code:
        raise AnswerError(FailureKind.NO_CHANGE, "All edits are outside of the EVOLVE-BLOCKs.")
    return replace(child, code=code)


def _join(files: dict[str, str]) -> str:
    if problem := find_file_problem(files):
        raise AnswerError(FailureKind.BAD_FILES, problem)
    return join_files(files)


def _check_text(code: str, rules: AnswerRules) -> None:
    if not is_utf8(code):
        raise AnswerError(FailureKind.NOT_TEXT, "The child has characters that no file can hold.")
    files = {} if rules.is_prompt else split_files(code)
    num_chars = sum(map(len, files.values())) or len(code)
    if num_chars > rules.max_code_chars:
        raise AnswerError(
            FailureKind.TOO_LONG,
            f"The child has {num_chars} characters; max_code_length is {rules.max_code_chars}.",
        )
