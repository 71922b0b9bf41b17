"""SEARCH/REPLACE blocks, rewrites and markers, case by case beside OpenEvolve 0.4."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.loops.evolve.answers import (
    DIFF_PATTERN,
    AnswerError,
    DiffBlock,
    FailureKind,
    SummaryLimits,
    apply_blocks,
    enforce_blocks,
    evolve_blocks,
    extract_blocks,
    extract_rewrite,
    find_marker_problem,
    summarise,
)
from rookery.loops.evolve.problem import detect_language, normalise

OpenEvolve = Callable[[str, Any], Any]

LINES = ["a = 1", "a = 1  ", "  b = 2", "", "c = 3", "\tc", "=======", "a = 1\r", "# note"]
DELIMITERS = [
    "x <<<<<<< SEARCH",
    "y =======",
    "<<<<<<< SEARCH",
    "=======",
    ">>>>>>> REPLACE",
    " ======= ",
    "<<<<<<< SEARCH x",
]
MARKERS = [
    "# EVOLVE-BLOCK-START",
    "# EVOLVE-BLOCK-END",
    "// EVOLVE-BLOCK-START",
    "<!-- EVOLVE-BLOCK-END -->",
    "x = 1  # EVOLVE-BLOCK-START",
    "y = 1  # EVOLVE-BLOCK-END",
    "EVOLVE-BLOCK-STARTED",
    "x EVOLVE-BLOCK-END",
]


def _text(rng: random.Random, words: list[str], most: int = 8) -> str:
    return "\n".join(rng.choice(words) for _ in range(rng.randrange(most)))


def _answer(rng: random.Random) -> str:
    """Prose and blocks, most of them well formed, some of them not."""
    parts = []
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.25:
            parts.append(_text(rng, LINES + DELIMITERS))
            continue
        search, replace = _text(rng, LINES, 4), _text(rng, LINES, 4)
        parts.append(f"<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE")
    return "\n".join(parts)


def _blocks(answer: str, pattern: str = DIFF_PATTERN) -> list[list[str]] | str:
    try:
        return [[block.search, block.replace] for block in extract_blocks(answer, pattern=pattern)]
    except AnswerError as error:
        assert error.kind == FailureKind.BAD_DELIMITERS
        return "refused"


def test_blocks_are_read_and_applied_as_openevolve_does(openevolve: OpenEvolve) -> None:
    rng = random.Random(1)
    cases = [(_text(rng, LINES, 12), _answer(rng)) for _ in range(600)]
    theirs = openevolve(
        """
from openevolve.utils.code_utils import apply_diff_blocks, extract_diffs, format_diff_summary
def one(code, text):
    try:
        blocks = extract_diffs(text)
    except ValueError:
        return "refused", None, None
    return blocks, apply_diff_blocks(code, blocks), format_diff_summary(blocks, 6, 2)
answer([one(*case) for case in DATA])
""",
        cases,
    )
    num_refused = num_applied = 0
    for (code, text), (blocks, applied, summary) in zip(cases, theirs, strict=True):
        ours = _blocks(text)
        assert ours == blocks, text
        if blocks == "refused":
            num_refused += 1
            continue
        found = extract_blocks(text)
        assert list(apply_blocks(code, found)) == applied, text
        assert summarise(found, limits=SummaryLimits(max_line_chars=6, max_lines=2)) == summary
        num_applied += applied[1]
    assert num_refused > 30 and num_applied > 30


@pytest.mark.timeout(30)
def test_an_answer_that_repeats_itself_is_read_in_linear_time() -> None:
    answer = "<<<<<<< SEARCH\n=======\n" * 20_000
    assert _blocks(answer) == "refused"
    assert apply_blocks("x\n" * 20_000, [DiffBlock(search="x\ny", replace="z")])[1] == 0


def test_an_own_pattern_has_its_own_grammar(openevolve: OpenEvolve) -> None:
    pattern = r"<old>\n(.*?)</old>\n<new>\n(.*?)</new>"
    text = "<old>\na = 1\n</old>\n<new>\n=======\n</new>\n>>>>>>> REPLACE\n"
    theirs = openevolve(
        """
from openevolve.utils.code_utils import extract_diffs
answer(extract_diffs(*DATA))
""",
        [text, pattern],
    )
    assert _blocks(text, pattern) == theirs == [["a = 1", "======="]]


def test_rewrites_are_found_as_openevolve_does(openevolve: OpenEvolve) -> None:
    cases = [
        "Here:\n```python\nx = 1\n\n```\nand\n```python\nx = 2\n```",
        "```\nx = 1\n```",
        "```rust\nfn a() {}\n```\n```python\nx = 3\n```",
        "x = 1\n",
        "  x = 1",
        "``` x = 1 ```",
    ]
    theirs = openevolve(
        """
from openevolve.utils.code_utils import parse_full_rewrite
answer([parse_full_rewrite(case, "python") for case in DATA])
""",
        cases,
    )
    assert [extract_rewrite(case, language="python") for case in cases] == theirs


def test_the_word_behind_the_backticks_is_no_code() -> None:
    assert extract_rewrite("```py\nx = 1\n```", language="python") == "x = 1"
    assert extract_rewrite("```c++\nint a;\n```", language="cpp") == "int a;"
    assert extract_rewrite("```c++\nint a;\n```", language="c++") == "int a;"


@pytest.mark.parametrize("answer", ["```python\nx = 1\n", "```python\n\n```", "```"])
def test_cut_off_and_empty_rewrites_are_refused(answer: str) -> None:
    with pytest.raises(AnswerError) as caught:
        extract_rewrite(answer, language="python")
    assert caught.value.kind == FailureKind.NO_CODE


def test_markers_are_read_and_enforced_as_openevolve_does(openevolve: OpenEvolve) -> None:
    rng = random.Random(2)
    words = LINES + MARKERS
    pairs = [(_text(rng, words, 10), _text(rng, words, 10)) for _ in range(1500)]
    whole = "# EVOLVE-BLOCK-START\n{}\n# EVOLVE-BLOCK-END"
    for _ in range(300):
        old, new = (
            "\n".join(
                f"{_text(rng, LINES, 3)}\n{whole.format(_text(rng, LINES, 4))}"
                for _ in range(rng.randrange(1, 3))
            )
            for _ in range(2)
        )
        pairs.append((old, new))
    theirs = openevolve(
        """
from openevolve.utils.code_utils import _split_evolve_regions, enforce_evolve_blocks
from openevolve.utils.code_utils import parse_evolve_blocks
def one(old, new):
    try:
        child = enforce_evolve_blocks(old, new)
    except ValueError:
        child = None
    return _split_evolve_regions(old) is not None, parse_evolve_blocks(old), child
answer([one(*pair) for pair in DATA])
""",
        pairs,
    )
    num_refused = num_kept = 0
    for (old, new), (is_sound, blocks, child) in zip(pairs, theirs, strict=True):
        assert (find_marker_problem(old) is None) == is_sound, old
        if is_sound:
            ours = [[b.start_line, b.end_line, b.text] for b in evolve_blocks(old)]
            assert ours == blocks
        try:
            assert enforce_blocks(old, new) == child
            num_kept += child != new
        except AnswerError as error:
            assert error.kind == FailureKind.MARKERS_BROKEN and child is None
            num_refused += 1
    assert num_refused > 50 and num_kept > 50


def test_languages_are_guessed_as_openevolve_does(openevolve: OpenEvolve) -> None:
    cases = [
        "import os\n",
        "# note\nx = 1\n",
        "#include <a>\n",
        "public class A {}",
        "const a = 1",
        "fn main() {}",
        "SELECT 1",
        "  def f(): pass",
        "let mut x = 1;",
        "",
    ]
    theirs = openevolve(
        """
from openevolve.utils.code_utils import extract_code_language
answer([extract_code_language(case) for case in DATA])
""",
        cases,
    )
    assert [detect_language(case) for case in cases] == theirs


def test_normalised_code_ignores_what_nobody_sees() -> None:
    assert normalise("\na = 1  \r\n\tb\n\n\n") == "a = 1\n\tb"
    assert normalise("a = 1") != normalise("a =  1")


_LINE = st.text(alphabet="ab =#\t", max_size=5)


@given(st.lists(_LINE, min_size=1, max_size=8), st.data())
def test_a_block_of_the_programs_own_lines_is_always_found(lines: list[str], data: Any) -> None:
    start = data.draw(st.integers(0, len(lines) - 1))
    stop = data.draw(st.integers(start + 1, len(lines)))
    search = "\n".join(lines[start:stop])
    block = DiffBlock(search=search, replace="NEW")
    text, num = apply_blocks("\n".join(lines), [block])
    assert num == 1 and "NEW" in text.split("\n")
    assert text.count("\n") == len(lines) - 1 - (stop - start - 1)
