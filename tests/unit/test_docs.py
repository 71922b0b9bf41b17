"""The documentation: pages that are in the nav, events that are listed, a reference that builds."""

import ast
import importlib.util
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from notebooks import PAGES, Block, is_shown, notebook, read_page

import rookery
from rookery.compose import KINDS
from rookery.compose.league.entrants import LeagueConfig
from rookery.compose.pipeline import PipelineConfig
from rookery.compose.serve import ServeConfig
from rookery.config import Config, parse_config
from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, RookeryConfig
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.icm.config import IcmConfig
from rookery.search.population import PopulationConfig
from rookery.starters import DEMOS
from rookery.tasks.taskset import HfConfig, JsonlConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "rookery"
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")]
LONGEST_LINE, LONGEST_SENTENCE, MEAN_SENTENCE, LONGEST_PAGE = 120, 30, 20, 150


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kinds(tree: ast.Module) -> Iterator[str]:
    """The kinds of events that a file writes, as texts or as its own constants."""
    constants: dict[str, object] = {}
    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        pair = (node.targets[0], node.value)
        names, values = (getattr(side, "elts", [side]) for side in pair)
        constants |= {
            getattr(name, "id", ""): getattr(value, "value", None)
            for name, value in zip(names, values, strict=False)
        }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        kinds = [word.value for word in call.keywords if word.arg == "kind" and name == "NewEvent"]
        if name in {"append", "append_blocking"} and len(call.args) == 2:
            kinds = call.args[:1]
        for kind in kinds:
            value = constants.get(getattr(kind, "id", ""), getattr(kind, "value", None))
            if isinstance(value, str):
                yield value


def test_the_page_of_events_lists_those_that_are_written() -> None:
    listed = set(re.findall(r"^\| `([a-z_/]+)`", (DOCS / "reference/events.md").read_text(), re.M))
    folders = ("loops", "rollout", "runs", "compat", "compose")
    files = [path for folder in folders for path in (SOURCE / folder).rglob("*.py")]
    written = {kind for path in files for kind in _kinds(ast.parse(path.read_text()))}
    # Written under names of other files.
    assert listed == written | {"attempt", "run/created", "run/opened", "run/finished"}


def test_every_command_is_in_the_reference(reference: ModuleType) -> None:
    page = reference.on_page_markdown("<!-- generated: commands -->")
    for words in ("demo grpo", "genome run", "evolve check", "fleet up", "runs resume", "ui"):
        assert re.search(rf"^###? rookery {words}$", page, re.MULTILINE), words
    assert "| `--runs-dir` | path | `runs` | Where runs are kept. |" in page


def test_config_keys_have_type_default_and_sentence(reference: ModuleType) -> None:
    page = reference.on_page_markdown("<!-- generated: configs -->")
    assert "| `urls` | list of text | `[]` | Servers that run already. |" in page
    assert str(ROOT) not in page
    anchors = re.findall(r"\{ #(\S+) \}", page)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(anchors)
    rows = [re.split(r"(?<!\\)\|", line) for line in page.splitlines() if line.startswith("| `")]
    assert {len(row) for row in rows} == {6}
    assert [row for row in rows if not row[4].strip()] == []  # a key without a sentence


def test_every_kind_of_run_has_its_keys_and_every_function_its_page(
    reference: ModuleType,
) -> None:
    page = reference.on_page_markdown("<!-- generated: configs -->")
    assert [kind for kind in KINDS if f"\n## {kind} {{" not in page] == []
    shown = re.findall(r"^::: (\S+)", (DOCS / "api/rookery.md").read_text(), re.MULTILINE)
    functions = {name for name in rookery.__all__ if name[0].islower()}
    assert {path.rpartition(".")[2] for path in shown} >= functions - {"ui"}
    modules = {path.stem for path in (SOURCE / "reports").glob("[a-z]*.py")}
    assert set(re.findall(r"reports\.(\w+)", (DOCS / "api/reports.md").read_text())) == modules


def test_parts_are_those_of_the_code(reference: ModuleType) -> None:
    page = reference.on_page_markdown("<!-- generated: parts -->")
    for name in ("grpo", "numeric", "dare_ties", "gaussian"):
        assert f"\n| `{name}` | " in page


def test_routes_are_those_of_the_applications(reference: ModuleType) -> None:
    page = reference.on_page_markdown("<!-- generated: routes -->")
    for route in ("POST /api/v1/sample", "POST /v1/chat/completions", "GET /metrics", "GET /batch"):
        assert f"\n| `{route}` | " in page
    assert not re.search(r"^\| `[^|]*\| +\|", page, re.MULTILINE)  # a route without a sentence


def test_every_page_is_in_the_nav_and_in_the_list_for_models() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    shown = set(re.findall(r"[\w/]+\.md", str(nav)))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert shown == pages
    listed = set(re.findall(r"\(([\w/]+\.md)\)", (DOCS / "llms.txt").read_text()))
    assert listed == {page for page in pages if not page.startswith("api/")}


def test_what_pages_install_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for path in [*TEXTS, ROOT / "Makefile"]:
        text = path.read_text()
        named = re.findall(r"(?:rookery|whl|[ \"]\.)\[([a-z,]+)\]", text)
        assert {extra for names in named for extra in names.split(",")} <= extras, path
        assert set(re.findall(r"rookery-(\S+?)-py3", text)) <= {project["version"]}, path


def test_nothing_installs_rookery_from_the_index() -> None:
    """The index has another project of this name."""
    for path in [*TEXTS, *SOURCE.rglob("*.py")]:
        assert not re.search(r"install '?rookery\b(?!.* @ )", path.read_text()), path


def test_the_sentences_of_troubleshooting_are_those_of_the_code() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    seen = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(seen) >= 20
    for sentence in seen:
        for part in sentence.split("..."):
            assert part.strip() in text, f"{sentence}: no code says {part!r}"


def _sentences(text: str) -> list[str]:
    """The sentences of a page: no code, tables, headings or comments; a name in code is a word."""
    text = re.sub(r"^( *)```.*?^\1```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?", r"\1", text)
    text = re.sub(r"^ *(#|\||:::|    ).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(-|\*|>|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split()).replace("**", "")
        found += re.split(r"(?<=[.!?])[\"')*]* +(?=[^a-z]|vLLM|torch|grpo)", joined)
    return [sentence for sentence in found if re.search(r"\w", sentence)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_and_sentences_are_short(path: Path) -> None:
    """A row of a table is one line by its nature; all else is wrapped."""
    text = path.read_text()
    rows = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in rows if len(line) > LONGEST_LINE] == []
    lengths = {sentence: len(sentence.split()) for sentence in _sentences(text)}
    assert [s for s, length in lengths.items() if length > LONGEST_SENTENCE] == []
    assert sum(lengths.values()) <= MEAN_SENTENCE * max(len(lengths), 1)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_imports_and_names_is_there(path: Path) -> None:
    """Blocks are only compiled where no other test runs them; their imports and files are real."""
    text = path.read_text()
    keys = RookeryConfig.model_fields
    named = re.findall(r"`(rookery\.\w+[\w.]*)", text)
    imported = [
        f"{module}.{name.split(' as ')[0]}"
        for module, names in re.findall(r"^ *from (rookery[\w.]*) import (\w.*)$", text, re.M)
        for name in names.partition("  #")[0].split(", ")
    ]
    for name in [*imported, *(n for n in named if n.split(".")[1] not in keys)]:
        assert pkgutil.resolve_name(name) is not None
    files = re.findall(r"`((?:src|tests|benchmarks|examples|configs|docker)/[\w./]+)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


_LOOP = {"engine": {"model": "smollm2"}, "tasksets": [{"type": "jsonl", "path": "rows.jsonl"}]}
_ITEMS = {"path": "items.jsonl", "prompt": "{{ item }} is", "labels": ["a", "b"]}
CONFIGS: list[tuple[type[Config], dict[str, object]]] = [
    (GenomeConfig, {**_LOOP, "init": {"type": "file", "path": "founders"}}),
    (GrpoConfig, {**_LOOP, "steps": 1}),
    (IcmConfig, {"engine": {"model": "smollm2"}, "data": _ITEMS}),
    (EvolveConfig, {}),
    (LeagueConfig, {}),
    (PipelineConfig, {}),
    (ServeConfig, {}),
    (PopulationConfig, {}),
    (JsonlConfig, {"path": "rows.jsonl"}),
    (HfConfig, {}),
]
"""Each config that a page shows a part of, and the required keys that the part may leave out."""


def _is_config(document: dict[str, object]) -> bool:
    for config, required in CONFIGS:
        with suppress(ConfigError):
            parse_config(config, {**required, **document}, origin="the page")
            return True
    return False


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configs_of_a_page_are_read_by_a_command(path: Path) -> None:
    for _, block in re.findall(r"^( *)```yaml.*\n((?:.*\n)*?)\1```$", path.read_text(), re.M):
        assert _is_config(yaml.safe_load(textwrap.dedent(block))), block


def test_a_misspelt_key_is_no_config() -> None:
    assert _is_config({"seed": 1}) and not _is_config({"sead": 1})


PEERS = ("TRL", "verl", "mergekit and GENOME", "The ICM repository")


def _stand_ins(section: str) -> Iterator[str]:
    """What the last column of its tables has in code: keys, values and whole settings."""
    page = (DOCS / "coming_from.md").read_text()
    [text] = re.findall(rf"^##+ {section}\n((?:(?!##).*\n)*)", page, re.M)
    for row in re.findall(r"^\|.*\|$", text, re.M):
        yield from re.findall(r"`([^`]+)`", row.split("|")[-2])


def _setting(code: str) -> dict[str, object]:
    """`loss.type: gspo` as the config has it."""
    path, _, value = code.partition(": ")
    first, *inner = path.split(".")
    return {first: _setting(f"{'.'.join(inner)}: {value}") if inner else yaml.safe_load(value)}


@pytest.mark.parametrize("section", PEERS)
def test_what_stands_for_a_key_of_a_peer_is_read(section: str, reference: ModuleType) -> None:
    pages = [
        reference.on_page_markdown(f"<!-- generated: {name} -->") for name in ("configs", "parts")
    ]
    words = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", "".join(pages)))))
    codes = list(_stand_ins(section))
    assert len(codes) > 5
    fleet = {"engine": {"type": "fleet", "launch": {"model": "m"}}, "full": True}
    for code in codes:
        if ": " in code and not code.startswith("{"):
            given = yaml.safe_load(code.join("{}")) if ", " in code else _setting(code)
            assert _is_config(given) or _is_config({**fleet, **given}), code
        elif re.fullmatch(r"\.?[a-z_*]+(\.[a-z_*]+)*", code):
            assert {*code.split(".")} - {"*", ""} <= words, code


def test_pages_are_short() -> None:
    """Tables of numbers and of peers' names are long by their nature."""
    tables = ("benchmarks.md", "coming_from.md", "results.md")
    long = [path for path in TEXTS if len(path.read_text().splitlines()) > LONGEST_PAGE]
    assert [path for path in long if path.name not in tables] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def _errors(tree: ast.Module) -> Iterator[str]:
    """The sentences that a file raises; a value in them is a word."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name.endswith(("Error", "Refusal")):
            for given in call.args:
                parts = getattr(given, "values", [given])
                texts = [part.value if isinstance(part, ast.Constant) else "X" for part in parts]
                yield from re.split(r"(?<=[.!?])\s+", "".join(map(str, texts)))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """The sentences that describe modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for part in body if isinstance(body, list) else []:
            text = getattr(getattr(part, "value", None), "value", None)
            if isinstance(part, ast.Expr) and isinstance(text, str):
                yield from re.split(r"(?<=[.;])\s+(?=[A-Z])", text.strip())


def test_errors_and_docstrings_have_a_plain_subject() -> None:
    """None begins with a relative clause, or with "Of"; errors are short."""
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    errors = [sentence for tree in trees for sentence in _errors(tree)]
    described = [sentence for tree in trees for sentence in _docstrings(tree)]
    assert len(errors) > 500 and len(described) > 5000
    assert [said for said in errors if len(said.split()) > LONGEST_SENTENCE] == []
    unclear = r"(What|Who|Whoever|Whatever|Those|Of)\b"
    assert [said for said in errors + described if re.match(unclear, said)] == []


TUTORIALS = sorted(page for page in PAGES.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_its_notebook_in_step(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 150
    assert f"({page.stem}.ipynb)" in text and f"({page.name})" in (PAGES / "index.md").read_text()
    made = page.with_suffix(".ipynb").read_text()
    assert made == notebook(text), "python docs/notebooks.py writes it again"
    blocks = [block for block in read_page(text) if block.kind != "prose"]
    assert any(block.shown for block in blocks)
    for block in blocks:
        if block.kind == "python":
            compile(block.source, f"{page.name} {block.title}", "exec")
        elif block.kind == "yaml":
            assert yaml.safe_load(block.source)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("gsm8k", ROOT / "configs/grpo_gsm8k.yaml"), ("evolve_adapters", DEMOS / "genome.yaml")],
)
def test_a_tutorial_shows_the_config_that_was_measured(name: str, measured: Path) -> None:
    blocks = read_page((PAGES / f"{name}.md").read_text())
    [shown] = [block.source for block in blocks if block.kind == "yaml"]
    assert yaml.safe_load(shown) == yaml.safe_load(measured.read_text())


PAGE = """\
# A page

```yaml title="a.yaml"
x: 1
```

Then:

```bash
cat a.yaml
```

You should see:

<!-- numbers vary -->
```text
gain +0.5 (+0.1 to +1,000)
...
end
```

```yaml
only: read
```
"""


def test_blocks_of_a_page_are_files_and_code_with_what_it_prints() -> None:
    blocks = [block for block in read_page(PAGE) if block.kind != "prose"]
    shown = "gain +0.5 (+0.1 to +1,000)\n...\nend\n"
    assert blocks == [
        Block("yaml", "x: 1\n", "a.yaml"),
        Block("bash", "cat a.yaml\n", "", shown, True),
    ]
    assert '"%%writefile a.yaml\\n",' in notebook(PAGE)
    assert "You should see" in notebook(PAGE) and "only: read" in notebook(PAGE)


@pytest.mark.parametrize(
    ("printed", "varies", "expected"),
    [
        ("gain  +0.7\n(+0.2 to +3) more\nend", True, True),
        ("gain +0.7 (-0.2 to +3)\nend", True, False),
        ("gain +0.7 (+0.2 to +3)", True, False),
        ("end gain +0.7 (+0.2 to +3)", True, False),
        ("gain +0.7 (+0.2 to +3)\nend", False, False),
        ("gain +0.5 (+0.1 to +1,000) end", False, True),
        ("\x1b[1mgain\x1b[0m +0.5 (+0.1 to \x1b[1;36m+1,000\x1b[0m) end", False, True),
    ],
)
def test_what_a_block_prints_is_compared(printed: str, varies: bool, expected: bool) -> None:
    block = Block("bash", "", "", "gain +0.5 (+0.1 to +1,000)\n...\nend\n", varies)
    assert is_shown(block, printed) is expected
