import pytest

from rookery.search.programs.novelty import (
    NoveltyConfig,
    NoveltyIndex,
    Repetition,
    code_hash,
)

SQUARE = "def f(x):\n    return x * x\n"


@pytest.mark.parametrize(
    ("other", "language", "is_same"),
    [
        ("# EVOLVE-BLOCK-START\ndef f( x ):  # square\n\n  return (x*x)", "python", True),
        ("def f(x):\n    return x * y\n", "python", False),
        ("def f(x):\n    return 'x  *  x'\n", "python", False),
        ("def  f(x):\n\treturn x * x", "rust", True),
        ("def f(x):\n    return x * x // 1", "rust", False),
    ],
)
def test_layout_and_comments_do_not_make_a_program_new(
    other: str, language: str, is_same: bool
) -> None:
    same = code_hash(other, language=language) == code_hash(SQUARE, language=language)
    assert same == is_same


@pytest.mark.parametrize("code", ["def f(:", "x = '\0'", "(" * 5000, "-" * 50_000 + "1", "\ud800"])
def test_python_that_cannot_be_parsed_is_compared_by_its_text(code: str) -> None:
    assert code_hash(code, language="python") == code_hash(f" {code}\n", language="python")
    assert code_hash(code, language="python") != code_hash(f"{code} 1", language="python")


def test_what_is_repeated_is_named() -> None:
    index = NoveltyIndex(NoveltyConfig(similarity_threshold=0.9))
    index.add("a", code="c1", embedding=[1.0, 0.0])
    index.add("b", code="c2", embedding=[0.0, 2.0])
    assert index.find(code="c1") == Repetition(kind="code", of="a")
    similar = index.find(code="c9", embedding=[0.1, 5.0])
    assert similar is not None
    assert (similar.kind, similar.of) == ("embedding", "b")
    assert 0.99 < similar.similarity < 1
    assert index.find(code="c9", embedding=[1.0, 1.0]) is None
    index.add("c", code="c1")
    assert index.find(code="c1") == Repetition(kind="code", of="a")


def test_embeddings_of_the_newest_are_compared() -> None:
    index = NoveltyIndex(NoveltyConfig(num_compared=3, similarity_threshold=0.999))
    vectors = {f"p{k}": [float(k == place) for place in range(5)] for k in range(5)}
    for id, vector in vectors.items():
        index.add(id, code=id, embedding=vector)
    repeated = [index.find(embedding=vector) for vector in vectors.values()]
    assert [found and found.of for found in repeated] == [None, None, "p2", "p3", "p4"]
    index.add("p5", embedding=[1.0, 1.0, 0.0, 0.0, 0.0])
    assert index.find(embedding=vectors["p2"]) is None


def test_programs_that_were_added_later_can_be_left_out() -> None:
    config = NoveltyConfig(num_compared=2, num_later=3, similarity_threshold=0.999)
    index = NoveltyIndex(config)
    vectors = {f"p{k}": [float(k == place) for place in range(6)] for k in range(6)}
    for number, (id, vector) in enumerate(vectors.items()):
        assert index.num_embedded == number
        index.add(id, embedding=vector)
    found = {
        num_known: [id for id, v in vectors.items() if index.find(embedding=v, num_known=num_known)]
        for num_known in (0, 3, 4, 5, 6, 99)
    }
    # p0 is no longer kept.
    assert found == {
        0: [],
        3: ["p1", "p2"],
        4: ["p2", "p3"],
        5: ["p3", "p4"],
        6: ["p4", "p5"],
        99: ["p4", "p5"],
    }


def test_an_embedding_of_another_length_is_like_none() -> None:
    index = NoveltyIndex(NoveltyConfig())
    assert index.can_compare([1.0])
    index.add("a", embedding=[1.0, 0.0])
    assert not index.can_compare([1.0])
    assert index.find(embedding=[1.0]) is None


@pytest.mark.parametrize("vector", [[0.0, 0.0], [float("nan")], [[1.0]]])
def test_an_embedding_without_direction_is_refused(vector: list[float]) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        NoveltyIndex(NoveltyConfig()).add("a", embedding=vector)
