"""Configs: files, overrides, and the sentence that answers each mistake."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from rookery.config import (
    Config,
    check_url,
    load_config,
    parse_config,
    parse_overrides,
    read_document,
)
from rookery.errors import ConfigError
from rookery.paths import expanded


class Tree(Config):
    type: Literal["tree"] = "tree"
    height: int = 1


class Bird(Config):
    type: Literal["bird"] = "bird"
    wing_span: float = Field(default=1.0, gt=0)
    """Metres."""


class Owl(Config):
    type: Literal["owl"] = "owl"
    ears: int = Field(default=2, ge=0)


Animal = Annotated[Bird | Owl, Field(discriminator="type")]


class Forest(Config):
    name: str = "wood"
    seed: int = 0
    is_old: bool = False
    rate: float = 0.5
    limit: int | None = None
    note: str | None = None
    path: Path = Path("here")
    tree: Tree = Tree()
    animals: tuple[Animal, ...] = ()
    guests: dict[str, Animal] = Field(default_factory=dict)
    floors: dict[str, float | Literal["founder"]] = Field(default_factory=dict)
    words: tuple[str, ...] = ()
    kind: Literal["wet", "dry"] = "wet"

    @model_validator(mode="after")
    def _is_possible(self) -> "Forest":
        if self.seed == 13:
            raise ValueError("seed 13 is unlucky: write 12 or 14")
        return self


def write(folder: Path, text: str, name: str = "forest.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def complaint(folder: Path, text: str, *overrides: str, name: str = "forest.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Forest, write(folder, text, name), overrides=overrides)
    return str(caught.value).removeprefix(f"{folder / name} is not a valid config: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "seed: 3\ntree: {height: 9}\nanimals: [{type: owl, ears: 1}]\n"),
        ("a.yml", "seed: 3\ntree:\n  height: 9\nanimals:\n  - {type: owl, ears: 1}\n"),
        ("a.toml", 'seed = 3\ntree.height = 9\n[[animals]]\ntype = "owl"\nears = 1\n'),
        (
            "a.json",
            '{\n\t"seed": 3,\n\t"tree": {"height": 9},\n\t"animals": [{"type": "owl", "ears": 1}]}',
        ),
    ],
)
def test_every_format_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    config = load_config(Forest, write(tmp_path, text, name))
    assert config == Forest(seed=3, tree=Tree(height=9), animals=(Owl(ears=1),))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed", "3"], {"seed": 3}),
        (["--seed=3"], {"seed": 3}),
        (["seed=3"], {"seed": 3}),
        (["--seed", "-3"], {"seed": -3}),
        (["--is-old"], {"is_old": True}),
        (["--is-old", "--seed", "3"], {"is_old": True, "seed": 3}),
        (["--is_old", "no"], {"is_old": False}),
        (["--rate", "1e-3"], {"rate": 0.001}),
        (["--limit", "4", "--limit", "null"], {"limit": None}),
        (["--tree.height", "7"], {"tree": {"height": 7}}),
        (["--words", "[a, b]"], {"words": ("a", "b")}),
        (["--animals", "[{type: bird, wing_span: 2}]"], {"animals": (Bird(wing_span=2.0),)}),
        (["--guests.a-b.type", "bird", "--guests.a-b.wing-span=3"],
         {"guests": {"a-b": Bird(wing_span=3.0)}}),
        (["--floors.label-kind", "founder", "--floors.x_y", "0.5"],
         {"floors": {"label-kind": "founder", "x_y": 0.5}}),
    ],
)  # fmt: skip
def test_overrides(words: list[str], expected: dict[str, object]) -> None:
    assert load_config(Forest, overrides=words) == Forest.model_validate(expected)


@pytest.mark.parametrize("text", ["123", "1e3", "no", "2026-03-01", "2026-99-99", "a: b", "[x", ""])
def test_text_stays_text(text: str) -> None:
    """A folder may be called `123`, a run `2026-03-01` and a model `no`."""
    config = load_config(Forest, overrides=[f"--name={text}", f"--path={text}", f"--note={text}"])
    assert config.name == text and config.path == Path(text)
    assert config.note == (text or None)


def test_quotes_make_text_of_a_null() -> None:
    assert load_config(Forest, overrides=["--note", "'null'"]).note == "null"
    assert load_config(Forest, overrides=["--note", "null"]).note is None
    assert load_config(Forest, overrides=["--name", "null"]).name == "null"


def test_overrides_reach_into_lists_and_lie_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\nanimals: [{type: owl}, {type: bird}]\ntree:\n")
    config = load_config(
        Forest,
        path,
        overrides=["--animals.0.ears", "1", "animals.1={type: owl}", "--tree.height", "4"],
    )
    assert config == Forest(seed=1, animals=(Owl(ears=1), Owl()), tree=Tree(height=4))


def test_parse_overrides_keeps_order_and_text() -> None:
    words = ["--a.b", "3", "c-d=x=y", "--flag", "--e=--f"]
    assert parse_overrides(words) == [
        ("a.b", "3"), ("c-d", "x=y"), ("flag", "true"), ("e", "--f"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed"], "Got 'seed': an override is `--section.key value`."),
        (["--", "3"], "Got '--': an override is `--section.key value`."),
        (["--=3"], "Got '--=3': an override is `--section.key value`."),
        (["--tree..height=3"], "Got '--tree..height=3': an override is `--section.key value`."),
        (["--seed.x", "3"], "--seed.x: seed is 5, not a section."),
        (["--words.0.x", "3"], "--words.0.x: words.0 is 'a', not a section."),
        (["--words.1", "b"], "--words.1: words has 1 item: write words.0, or the list whole."),
        (["--words.x", "b"], "--words.x: words has 1 item: write words.0, or the list whole."),
        (["--animals.3", "b"],
         "--animals.3: animals has 2 items: write animals.0 to animals.1, or the list whole."),
        (["--animals", "[]", "--animals.0.ears", "1"],
         "--animals.0.ears: animals is an empty list: give the list whole."),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be_laid_over(tmp_path: Path, words: list[str], message: str) -> None:
    text = "seed: 5\nwords: [a]\nanimals: [{type: owl}, {type: bird}]"
    assert complaint(tmp_path, text, *words) == message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sede: 3", "sede is not a key. Did you mean seed?"),
        ("tree: {heigth: 3}", "tree.heigth is not a key. Did you mean height?"),
        ("animals: [{type: bird, wingspan: 3}]",
         "animals.0.wingspan is not a key. Did you mean wing_span?"),
        ("animals: [{type: owl}, {type: owl, wing_span: 3}]",
         "animals.1.wing_span is not a key. Allowed: ears, type."),
        ("guests: {type: {type: owl, eers: 3}}",
         "guests.type.eers is not a key. Did you mean ears?"),
        ("xylophone: 3",
         "xylophone is not a key. Allowed: animals, floors, guests, is_old, kind, limit, name, "
         "note, path, rate, seed, tree, words."),
        ("animals: [{type: brid}]",
         "animals.0.type is \"brid\"; it should be 'bird' or 'owl'. Did you mean bird?"),
        ("animals: [{type: x}]", "animals.0.type is \"x\"; it should be 'bird' or 'owl'."),
        ("animals: [{ears: 3}]", "animals.0.type is missing; it should be 'bird' or 'owl'."),
        ("animals: [3]", "animals.0 is 3; it should be a section of `key: value` pairs."),
        ("tree: yes", "tree is true; it should be a section of `key: value` pairs."),
        ("guests: 3", "guests is 3; it should be a section of `key: value` pairs."),
        ("words: w4", 'words is "w4"; it should be a list: write [..., ...].'),
        ("seed: x",
         'seed is "x"; it should be a valid integer, unable to parse string as an integer.'),
        ("seed: null", "seed is null; it should be a valid integer."),
        ("kind: damp", "kind is \"damp\"; it should be 'wet' or 'dry'."),
        ("animals: [{type: bird, wing_span: -1}]",
         "animals.0.wing_span is -1; it should be greater than 0."),
        ("animals: [{type: bird, wing_span: .inf}]",
         "animals.0.wing_span is Infinity; it should be a finite number."),
        ("rate: .nan", "rate is NaN; it should be a finite number."),
        ("seed: 13", "seed 13 is unlucky: write 12 or 14"),
        ("tree: {1: 2}", "tree.1 is not a key: keys are words."),
        ("1: 2", "1 is not a key: keys are words."),
        ("name: [" + ", ".join(["word"] * 40) + "]",
         "name is [" + '"word", ' * 9 + '"wor...; it should be a valid string.'),
    ],
)  # fmt: skip
def test_every_mistake_gets_its_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    assert complaint(tmp_path, text) == sentence


def test_a_mistake_in_a_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    (tmp_path / "forest.yaml").write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=r"^The command line: sede is not a key. Did you mean"):
        load_config(Forest, tmp_path / "forest.yaml", overrides=["--sede", "4"])
    with pytest.raises(ConfigError, match=r'^The command line: guests.a.type is "owll"; it should'):
        load_config(Forest, tmp_path / "forest.yaml", overrides=["--guests.a.type", "owll"])
    (tmp_path / "forest.yaml").write_text("sed: 3\n")
    with pytest.raises(ConfigError, match=r"forest.yaml is not a valid config:"):
        load_config(Forest, tmp_path / "forest.yaml", overrides=["--sede", "4"])


def test_several_mistakes_get_a_line_each(tmp_path: Path) -> None:
    text = complaint(tmp_path, "sede: 3\nrate: fast\nfloors: {a: high}\n")
    assert text.splitlines() == [
        f"{tmp_path / 'forest.yaml'} is not a valid config:",
        '  rate is "fast"; it should be a valid number, unable to parse string as a number.',
        '  floors.a is "high"; it should be a valid number, unable to parse string as a number.',
        "  floors.a is \"high\"; it should be 'founder'.",
        "  sede is not a key. Did you mean seed?",
    ]


def test_missing_values_and_the_command_line_as_origin() -> None:
    class Needy(Config):
        what: str

    with pytest.raises(ConfigError, match=r"^the command line is not a valid config: what is miss"):
        load_config(Needy)
    with pytest.raises(ConfigError, match=r"^it is not a valid config: what is missing: field"):
        parse_config(Needy, {}, origin="it")


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "seed: 3")
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "forrest.yaml")
    assert str(caught.value) == (
        f"There is no config file {tmp_path / 'forrest.yaml'}. "
        f"Did you mean {tmp_path / 'forest.yaml'}?"
    )
    with pytest.raises(ConfigError, match=r"There is no config file \S+/no/such\.yaml\.$"):
        read_document(tmp_path / "no" / "such.yaml")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"- 1\n", r"a\.yaml holds list; a config is a mapping: write `key: value`\."),
        ("a.json", b"3", r"a\.json holds int; a config is a mapping"),
        ("a.yaml", b"a: [", r"a\.yaml does not parse: .* found '<stream end>' in line 1"),
        ("a.json", b'{"a": 1,}', r"a\.json does not parse: .*line 1 column 9"),
        ("a.toml", b"a = ", r"a\.toml does not parse: Invalid value"),
        ("a.yaml", b"a: !!python/object:os.system {}", r"a\.yaml does not parse: .*constructor"),
        ("a.yaml", b"a: " + b"9" * 5000, r"a\.yaml does not parse: Exceeds the limit"),
        ("a.yaml", b"[" * 5000, r"a\.yaml does not parse: it is nested too deeply\."),
        ("a.json", b"[" * 100_000, r"a\.json does not parse: it is nested too deeply\."),
        ("a.yaml", b"seed: 1\nname: x\nseed: 2\n", r"does not parse: .*key 'seed' .* line 3"),
        ("a.json", b'{"a": {"b": 1, "b": 2}}', r"does not parse: the key 'b' is repeated\."),
        ("a.yaml", b"\xff\xfe\x00", r"a\.yaml cannot be read: .*decode"),
        ("a.yaml", b"a: &a [*a]", r"a\.yaml has more than 1,000 values, with what its aliases"),
        ("a.yaml", b"a: &a [1, 1]\nb: [" + b"*a, " * 500 + b"]", r"a\.yaml has more than 1,000"),
        ("a.txt", b"seed: 3", r"a\.txt is neither \.yaml, \.yml, \.json nor \.toml: rename it\."),
    ],
)
def test_files_that_are_no_config(
    tmp_path: Path, name: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.config.MOST_VALUES", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_document(tmp_path / name)


@pytest.mark.parametrize("name", ["n" * 300, "~no-such-user/x", "a\0b", "\ud800"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"(is not a path|cannot be read): "):
        expanded(name, tmp_path)


def test_paths_are_taken_from_a_folder_but_for_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert expanded("a/b", tmp_path) == tmp_path / "a/b"
    assert expanded("~/b", tmp_path) == Path("/home/ada/b")


@pytest.mark.parametrize(
    "url", ["http://h:70000", "http://[::1", "h:8000", "http://", "http://h h"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url is .*[wW]rite http://"):
        check_url(url, named="url is")


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder: give .* such as \S+/config\.yaml\.$"):
        read_document(tmp_path)


def test_merge_keys_of_yaml_are_no_double_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "x: &x {height: 3}\ntree: {<<: *x, height: 4}\n")
    assert read_document(path)["tree"] == {"height": 4}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*Forest.model_fields, "type", "ears", "height", "0", ""]) | SCALARS,
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(document=st.dictionaries(st.sampled_from(list(Forest.model_fields)), DOCUMENTS, max_size=4))
def test_no_document_ends_otherwise(document: dict[str, object]) -> None:
    try:
        assert isinstance(parse_config(Forest, document, origin="x"), Forest)
    except ConfigError as error:
        assert str(error).startswith("x is not a valid config:")


PARTS = st.sampled_from([*Forest.model_fields, "0", "1", "x", "type", "wing-span", ""])
KEYS = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
WORDS = st.builds("--{}={}".format, KEYS, st.text(max_size=6)) | KEYS.map("--{}".format)


@given(words=st.lists(WORDS | st.text(max_size=4), max_size=4))
def test_no_override_ends_otherwise(words: list[str]) -> None:
    try:
        assert isinstance(load_config(Forest, overrides=words), Forest)
    except ConfigError as error:
        assert str(error)
