"""Tutorial pages as code: their blocks, the notebooks made from them, and what a block must print.

    python docs/notebooks.py    # writes docs/tutorials/*.ipynb; tests/unit/test_docs.py compares

A `bash` or `python` block is run, in the order of the page, in one folder. A block with a title is
a file of that name. A `text` block behind a block that is run shows what it prints: a line `...`
stands for anything, spaces, line ends, colours and rules of tables do not count, and behind
`<!-- numbers vary -->` a number stands for any number (its sign counts). All other blocks are there
to be read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "Block", "is_shown", "notebook", "read_page"]

PAGES = Path(__file__).parent / "tutorials"
_FENCE = re.compile(
    r"^(?P<varies><!-- numbers vary -->\n)?```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<source>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """Text between two blocks of code (`prose`), a file, or code with what it must print."""

    kind: str
    source: str
    title: str = ""
    shown: str = ""
    varies: bool = False


def read_page(text: str) -> list[Block]:
    """All blocks in order; what a block shows stays in the prose behind it, too."""
    blocks: list[Block] = []
    place = 0
    for match in _FENCE.finditer(text):
        kind, title, source = match["kind"], match["title"] or "", match["source"]
        is_code = bool(title) or kind in ("bash", "python")
        if is_code:
            blocks += [Block("prose", text[place : match.start()]), Block(kind, source, title)]
            place = match.end()
        elif kind == "text" and blocks and not blocks[-1].title and not blocks[-1].shown:
            last = blocks.pop()
            blocks.append(Block(last.kind, last.source, "", source, bool(match["varies"])))
    return [*blocks, Block("prose", text[place:])]


def is_shown(block: Block, printed: str) -> bool:
    """Whether a block printed what its page shows, part after part."""
    place = 0
    printed = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", printed)
    printed = re.sub("[\u2500-\u257f]+", " ", printed)
    for part in re.split(r"^\.\.\.$", block.shown, flags=re.MULTILINE):
        words = [_pattern(word, varies=block.varies) for word in part.split()]
        found = re.compile(r"\s+".join(words)).search(printed, place)
        if found is None:
            return False
        place = found.end()
    return True


def _pattern(word: str, *, varies: bool) -> str:
    if not varies:
        return re.escape(word)
    texts = [re.escape(text) for text in _NUMBER.split(word)]
    return _NUMBER.pattern.join(texts)


def notebook(text: str) -> str:
    """The page as an .ipynb file without outputs."""
    cells = list(_cells(text))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps(document | {"nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


def _cells(text: str) -> Iterator[dict[str, object]]:
    for place, block in enumerate(read_page(text)):
        source = block.source.strip("\n")
        if not source:
            continue
        name = {"id": f"cell-{place}", "metadata": {}}
        if block.kind == "prose":
            yield {"cell_type": "markdown", **name, "source": source.splitlines(keepends=True)}
            continue
        if block.title:
            source = f"%%writefile {block.title}\n{source}"
        elif block.kind == "bash":
            source = f"%%bash\n{source}"
        lines = source.splitlines(keepends=True)
        yield {"cell_type": "code", **name, "execution_count": None, "outputs": [], "source": lines}


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        if page.name != "index.md":
            page.with_suffix(".ipynb").write_text(notebook(page.read_text()))
