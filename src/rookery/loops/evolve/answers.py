"""From the text that a model answered to a child program, or to the reason why there is none.

read_answer(text, parent=parent, rules=AnswerRules(language="python"))
ChildProgram(code=..., changes="Change 1: 'a = 1' to 'a = 2'", ...)
AnswerFailure(kind="search_not_found", message="None of the 2 SEARCH blocks ...")
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff

from rookery.loops.evolve.blocks import enforce_blocks
from rookery.loops.evolve.diffs import (
    DIFF_PATTERN,
    DiffBlock,
    SummaryLimits,
    apply_blocks,
    extract_blocks,
    extract_rewrite,
    find_lines,
    has_lines,
    rewrite_files,
    summarise,
)
from rookery.loops.evolve.failures import AnswerError, FailureKind
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.source_files import find_file_problem, join_files, named_file, split_files
from rookery.runs.document import is_utf8

__all__ = ["AnswerFailure", "AnswerRules", "ChildProgram", "code_diff", "read_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """How answers are read: the keys of the config that decide it."""

    language: str
    is_diff: bool = True
    diff_pattern: str = DIFF_PATTERN
    max_code_chars: int = 10_000
    enforce_blocks: bool = False
    with_description: bool = False
    """Whether an answer must also update the changes description."""
    initial_description: str = ""
    """The changes description of a parent that has none."""
    summary: SummaryLimits = field(default_factory=SummaryLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgram:
    """A program that is new and may be evaluated."""

    code: str
    changes: str
    changes_description: str = ""
    num_unmatched: int = 0
    """SEARCH blocks that were nowhere in the parent and changed nothing."""
    num_reverted_files: int = 0
    """Files in which edits outside of EVOLVE-BLOCKs were undone; at most 1 for a single file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFailure:
    """An answer without a child. The attempt is recorded as failed."""

    kind: FailureKind
    message: str


def read_answer(
    answer: str, *, parent: ProgramRecord, rules: AnswerRules
) -> ChildProgram | AnswerFailure:
    """The child of `parent` that an answer describes. Pure: the same answer, the same child."""
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
    """A unified diff of two programs, for traces and pages."""
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
        num_unmatched=len(blocks) - num_applied,
    )


def _rewrite(answer: str, parent: ProgramRecord, rules: AnswerRules) -> ChildProgram:
    if files := parent.files:
        code = _join(rewrite_files(answer, files=files))
    else:
        code = extract_rewrite(answer, language=rules.language)
    if code.strip() == parent.code.strip():
        raise AnswerError(FailureKind.NO_CHANGE, "The rewrite is identical to the parent program.")
    return ChildProgram(
        code=code, changes="Full rewrite", changes_description=parent.changes_description
    )


def _apply(code: str, blocks: Sequence[DiffBlock]) -> tuple[str, int]:
    """Blocks applied to the one file, or each to the file of the folder that it is for."""
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
    """The file that the answer names before the block, else the only one that has its lines."""
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
    """Blocks for the code and blocks whose lines stand, exactly, in the changes description."""
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
        kept = {name: enforce_blocks(text, after[name]) for name, text in before.items()}
        code, num_reverted = _join(kept), sum(kept[name] != after[name] for name in kept)
    else:
        code = enforce_blocks(parent.code, child.code)
        num_reverted = int(code != child.code)
    if code == parent.code:
        raise AnswerError(FailureKind.NO_CHANGE, "All edits are outside of the EVOLVE-BLOCKs.")
    return replace(child, code=code, num_reverted_files=num_reverted)


def _join(files: dict[str, str]) -> str:
    if problem := find_file_problem(files):
        raise AnswerError(FailureKind.BAD_FILES, problem)
    return join_files(files)


def _check_text(code: str, rules: AnswerRules) -> None:
    if not is_utf8(code):
        raise AnswerError(FailureKind.NOT_TEXT, "The child has characters that no file can hold.")
    num_chars = sum(map(len, split_files(code).values())) or len(code)
    if num_chars > rules.max_code_chars:
        raise AnswerError(
            FailureKind.TOO_LONG,
            f"The child has {num_chars} characters; max_code_length is {rules.max_code_chars}.",
        )
