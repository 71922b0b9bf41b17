"""Drawing tokens: against brute force, against probabilities, and at the edges."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rookery.embedded.sampling import (
    StopSearch,
    TextDeltas,
    draw,
    penalise,
    top_logprobs,
    uniform,
)
from rookery.types import KeptTokens, Penalties, SamplingParams


def kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities by the definitions: min-p, then top-k, then top-p of what is left."""
    scaled = logits.astype(np.float64) / params.temperature
    probs: np.ndarray = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k:
        for token in order[params.top_k :]:
            probs[token] = 0
    probs /= probs.sum()
    reached = 0.0
    for token in order:
        if reached >= params.top_p:
            probs[token] = 0
        reached += probs[token]
    probs /= probs.sum()
    return probs


def distinct_logits(seed: int, size: int) -> torch.Tensor:
    """Distinct values a step apart in random order, so that no truncation has to break a tie."""
    values = torch.linspace(-4.0, 4.0, size)
    return values[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]


def grid(num: int) -> list[float]:
    return [(i + 0.5) / num for i in range(num)]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 130, 10_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.901, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.37, 1.0]),
)


@given(params=PARAMS, seed=st.integers(0, 3), size=st.sampled_from([1, 2, 50, 128, 129, 300]))
def test_truncation_equals_brute_force(params: SamplingParams, seed: int, size: int) -> None:
    """Log-probabilities of what is drawn, at points all over [0, 1)."""
    logits = distinct_logits(seed, size)
    expected = kept(logits.numpy(), params)
    points = grid(40)
    draws = draw(logits.repeat(len(points), 1), [params] * len(points), points)
    ends = np.cumsum(expected)
    for drawn, point in zip(draws, points, strict=True):
        assert expected[drawn.token] > 0, "a token that truncation excludes"
        assert drawn.logprob == pytest.approx(math.log(expected[drawn.token]), abs=1e-4)
        low = ends[drawn.token] - expected[drawn.token]
        assert low - 1e-5 <= point <= ends[drawn.token] + 1e-5, "the inverse of the cumulative"


def test_greedy_takes_the_lowest_id_on_a_tie_and_needs_no_luck() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    greedy = SamplingParams(temperature=0, top_p=0.1, top_k=1, min_p=0.9)
    for point in (0.0, 0.999):
        first, second = draw(logits, [greedy] * 2, [point] * 2)
        assert (first.token, second.token) == (1, 0)
        assert second.logprob == pytest.approx(math.log(1 / 4))
        assert first.logprob == pytest.approx(float(torch.log_softmax(logits[0], 0)[1]))


@pytest.mark.parametrize("place", [0, 127, 128, 299])
@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_one_token_alone_is_always_drawn(place: int, point: float) -> None:
    logits = torch.full((1, 300), float("-inf"))
    logits[0, place] = -17.0
    for temperature in (0.0, 0.01, 1.0, 5.0):
        [drawn] = draw(logits, [SamplingParams(temperature=temperature)], [point])
        assert drawn.token == place and drawn.logprob == 0.0


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.full((1, 300), float("-inf"))
    possible = [3, 127, 128, 200, 256]
    logits[0, possible] = torch.tensor([1.0, 0.0, -20.0, 2.0, -1.0])
    points = [0.0, *grid(200), 1 - 2**-53]
    params = [SamplingParams()] * len(points)
    seen = {d.token for d in draw(logits.repeat(len(points), 1), params, points)}
    assert seen <= set(possible) and {3, 127, 200, 256} <= seen
    assert {d.token for d in draw(logits, [SamplingParams(top_k=2)], [0.99])} == {200}


@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_rounding_never_points_past_the_last_possible_token(point: float) -> None:
    """Sums of float32 probabilities fall short of 1 or exceed it: here in many rows of both."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2000, 300, generator=generator) * 3
    first = torch.randint(0, 150, (2000, 1), generator=generator)
    last = first + torch.randint(0, 150, (2000, 1), generator=generator)
    places = torch.arange(300)
    logits[(places < first) | (places > last)] = float("-inf")
    draws = draw(logits, [SamplingParams()] * 2000, [point] * 2000)
    expected = (last if point else first)[:, 0].tolist()
    for row, (drawn, edge) in enumerate(zip(draws, expected, strict=True)):
        assert logits[row, drawn.token] > float("-inf")
        assert drawn.token == edge, "the outermost token that has a probability"


def test_extreme_logits_stay_numbers() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [3e38, 0.0, 0.0], [-3e38, -3e38, -3e38]])
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        draws = draw(logits, [params] * 3, [0.3] * 3)
        assert [d.token for d in draws[:2]] == [0, 0]
        assert [d.logprob for d in draws[:2]] == [0.0, 0.0]
        assert math.isfinite(draws[2].logprob)


def test_a_row_without_numbers_is_seen_in_its_log_probability() -> None:
    logits = torch.tensor([[float("nan"), 1.0], [float("-inf"), float("-inf")], [0.0, 0.0]])
    broken, empty, sound = draw(logits, [SamplingParams()] * 3, [0.5] * 3)
    assert math.isnan(broken.logprob) and math.isnan(empty.logprob)
    assert sound.logprob == pytest.approx(math.log(0.5)), "its neighbours are unharmed"


def test_a_draw_does_not_depend_on_its_company() -> None:
    rows = torch.randn(12, 150, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, top_logprobs=n)
        for t, k, p, n in [(0, 0, 1, 0), (1, 0, 1, 2), (0.5, 5, 1, 0), (1, 0, 0.7, 3)] * 3
    ]
    uniforms = [uniform(1, i, 0) for i in range(12)]
    before = rows.clone()
    together = draw(rows, params, uniforms)
    assert torch.equal(rows, before), "the caller's logits are left alone"
    alone = [draw(rows[i : i + 1], params[i : i + 1], uniforms[i : i + 1])[0] for i in range(12)]
    assert together == alone
    backwards = draw(rows.flip(0), params[::-1], uniforms[::-1])
    assert together == backwards[::-1]


def test_the_likeliest_tokens_come_best_first() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0])
    norm = torch.logsumexp(logits, 0)
    assert top_logprobs(logits, norm, 0) == ()
    top = top_logprobs(logits, norm, 2)
    assert [token for token, _ in top] == [1, 2]
    assert top[0][1] == pytest.approx(float(3.0 - norm))
    assert len(top_logprobs(logits, norm, 99)) == 4
    [drawn] = draw(logits[None], [SamplingParams(top_logprobs=2, top_k=1)], [0.9])
    assert drawn.token == 1 and drawn.top[0] == (1, 0.0), "of the distribution drawn from"


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 10**6))
def test_uniform_is_in_range_and_a_function_of_its_counters(
    seed: int, sample: int, position: int
) -> None:
    value = uniform(seed, sample, position)
    assert 0.0 <= value < 1.0 and value == uniform(seed, sample, position)


def test_uniforms_are_even_and_do_not_follow_one_another() -> None:
    """Neighbouring counters, in any of the three directions, are independent."""
    cube = np.array([[[uniform(a, b, c) for c in range(16)] for b in range(16)] for a in range(16)])
    assert len(np.unique(cube)) == cube.size
    counts, _ = np.histogram(cube, bins=64, range=(0, 1))
    mean = cube.size / 64
    assert abs(((counts - mean) ** 2 / mean).sum() - 63) <= 4 * math.sqrt(2 * 63)
    centred = cube - 0.5
    for axis in range(3):
        pairs = centred * np.roll(centred, 1, axis=axis)
        assert abs(pairs.mean() * 12) < 4 / math.sqrt(cube.size)
    assert uniform(1, 11, 1) != uniform(11, 1, 1) != uniform(1, 1, 11), "counters do not run on"


@given(params=PARAMS, seed=st.integers(0, 3), size=st.sampled_from([1, 2, 50, 129]))
def test_what_was_drawn_from_is_told_when_it_is_asked(
    params: SamplingParams, seed: int, size: int
) -> None:
    logits = distinct_logits(seed, size)
    [silent] = draw(logits[None], [params], [0.5])
    assert silent.kept == b""
    [drawn] = draw(logits[None], [replace(params, return_kept=True)], [0.5])
    told = KeptTokens(ends=(len(drawn.kept) // 4,), data=drawn.kept)[0]
    left = tuple(int(token) for token in np.flatnonzero(kept(logits.numpy(), params)))
    assert told == (left if params.is_cut else ())
    assert drawn.token == silent.token and drawn.logprob == silent.logprob


def test_greedy_draws_have_nothing_cut_off() -> None:
    greedy = SamplingParams(temperature=0.0, top_k=2, return_kept=True)
    [drawn] = draw(distinct_logits(0, 10)[None], [greedy], [0.5])
    assert drawn.kept == b""


def test_penalties_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, generator=generator) * 3
    prompt, drawn = (1, 2, 3, 3), [3, 5, 5, 5]
    expected = logits.clone()
    for token in {*prompt, *drawn}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(drawn):
        expected[token] -= 0.25 * drawn.count(token) + 0.5
    changed = logits.clone()
    own = Penalties(repetition=1.5, presence=0.5, frequency=0.25)
    penalise(changed, own, prompt=prompt, drawn=drawn)
    assert torch.equal(changed, expected)
    penalise(changed := logits.clone(), Penalties(presence=2.0), prompt=prompt, drawn=[])
    assert torch.equal(changed, logits), "the prompt does not count"


# Stop strings found at the end of a growing text, exactly where decoding all of it finds them.


PIECES = [
    *(b" a", b"b", b"ab", b"\n", b"\n\n", b"<", b"END", b">"),
    *("\u00e9".encode(), "\u4e2d".encode()),
    *(bytes([byte]) for byte in "\U0001f600\u4e2d\u00e9".encode()),
]
SPECIAL = len(PIECES)
"""A token without a text."""


def of_bytes(tokens: Sequence[int]) -> str:
    """As byte-level tokenizers decode: a character may take several tokens."""
    return b"".join(PIECES[t] for t in tokens if t != SPECIAL).decode(errors="replace")


def stripped(tokens: Sequence[int]) -> str:
    """As SentencePiece does: a space at the very beginning is left out."""
    return of_bytes(tokens).removeprefix(" ")


def find_in_all(stops: Sequence[str], text: str) -> str | None:
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else None


TEXTS = ["\n\n", "\n", "<END>", "\u4e2d", "\U0001f600", "b b", "ab a", "\u00e9b", "a" * 40]
STOPS = st.lists(st.sampled_from(TEXTS), max_size=3)


@pytest.mark.parametrize("detokenize", [of_bytes, stripped])
@given(stops=STOPS, tokens=st.lists(st.integers(0, SPECIAL), max_size=300))
def test_it_finds_what_decoding_everything_finds(
    detokenize: Callable[[Sequence[int]], str], stops: list[str], tokens: list[int]
) -> None:
    search = StopSearch(stops, detokenize=detokenize)
    for num in range(1, len(tokens) + 1):
        found = search.find(tokens[:num])
        assert found == find_in_all(stops, detokenize(tokens[:num]))
        if found is not None:
            return


@pytest.mark.parametrize("detokenize", [of_bytes, stripped])
@given(stops=STOPS, tokens=st.lists(st.integers(0, SPECIAL), min_size=1, max_size=100))
def test_deltas_are_the_text_and_never_part_of_a_stop_string(
    detokenize: Callable[[Sequence[int]], str], stops: list[str], tokens: list[int]
) -> None:
    search = StopSearch(stops, detokenize=detokenize)
    deltas = TextDeltas(stops, detokenize=detokenize)
    told = ""
    for num in range(1, len(tokens) + 1):
        found = search.find(tokens[:num])
        if found is None and num == len(tokens):
            found = detokenize(tokens)
        told += deltas.add(tokens[:num], ended=found)
        assert deltas.num_tokens == num
        if found is not None:
            assert told == found
            return
        assert detokenize(tokens).startswith(told), "nothing that a later token changes"


def test_text_comes_as_soon_as_it_is_certain() -> None:
    deltas = TextDeltas(["<END>"], detokenize=of_bytes)
    smile = [PIECES.index(bytes([byte])) for byte in "\U0001f600".encode()]
    tokens, told = [0, *smile, 5, 6, 5, 1], []
    for num in range(1, len(tokens) + 1):
        told.append(deltas.add(tokens[:num]))
    assert told == [" a", "", "", "", "\U0001f600", "", "", "<END", "<b"]


@pytest.mark.parametrize("last", [0, 10])
def test_the_cost_of_a_step_does_not_grow(last: int) -> None:
    lengths: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return of_bytes(tokens)

    search = StopSearch(["<END>"], detokenize=counted)
    deltas = TextDeltas(["<END>"], detokenize=counted)
    text: list[int] = []
    for i in range(3000):
        text.append(last + i % 3)
        search.find(text)
        deltas.add(text)
    assert max(lengths) < 200 and sum(lengths) / 3000 < 300
