"""The icm loop: prompt tokens and seconds of one evaluation, with three ways to ask.

    python benchmarks/icm.py                              # all that is here; six minutes, no GPU
    python benchmarks/icm.py --claims truthfulqa.json     # the same on your claims
    python benchmarks/icm.py --parts engine --model smollm2 --sizes 16

    nothing shared   every context is computed whole, as without a prefix cache
    id order         the other items in the order of their ids, prefix cache
    tree             a separate order per item along one tree, prefix cache

`counts` needs no model: it counts a whole evaluation, and one after a change of one label. `engine`
and `vllm` count with the embedded engine and a vLLM server on a model of random weights, whose
counts equal those of any model with these tokens: `small` (two narrow layers), `smollm2-shape` or
`llama-8b-shape` (the sizes of SmolLM2-135M and Llama-3.1-8B), with room for 16,384 tokens; or any
folder. Rounds and ways share no cached prefix.
Above `--slow` items only the tree is timed. vLLM is that of the interpreter ROOKERY_VLLM_PYTHON.

On a GPU, three minutes each:

    ROOKERY_VLLM_PYTHON=$(which python) python benchmarks/icm.py --parts vllm --sizes 128 \\
        --slow 128 --rounds 3 --model smollm2          # or --model llama-8b-shape

Whole searches: benchmarks/icm_search.py.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from rookery.embedded import EngineConfig, open_engine, resolve_model
from rookery.fleet import FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.http.probe import read_metrics
from rookery.fleet.servers.settings import visible_gpus
from rookery.loops.icm.items import DataConfig, Item
from rookery.loops.icm.prompts import BatchPrompts, load_encoder
from rookery.ports import Sampler
from rookery.search.labelling import IdOrder, Labels, Order, PrefixCache, TreeOrder
from rookery.types import ModelRef, ScoreRequest, TokenIds

PROMPT = "Question: {{ question }}\nClaim: {{ claim }}\nI think this claim is"
WAYS = ("nothing shared", "id order", "tree")
SHAPES = {
    "small": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    },
    "smollm2-shape": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    },
    "llama-8b-shape": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
CONTEXT_TOKENS = 16_384
FIRST_TOKEN = 10_000
CACHE_TOKENS = 450_000
"""Tokens that an 8B model caches on one GPU of 80 GB."""
NUM_CHANGES = 24
"""Randomly drawn items, each changed alone."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claims", type=Path, help="a .json list with question and choice")
    parser.add_argument("--parts", nargs="+", default=["counts", "engine", "vllm"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--slow", type=int, default=64, help="time all three ways up to here")
    parser.add_argument("--rounds", type=int, default=1, help="timed so often; the median counts")
    parser.add_argument("--model", default="small", help="small, smollm2-shape, or a folder")
    parser.add_argument("--tokenizer", default="smollm2", help="a folder that holds tokenizer.json")
    arguments = parser.parse_args()
    tokenizer = Path(arguments.tokenizer)
    if not tokenizer.is_dir():
        tokenizer = resolve_model(arguments.tokenizer).path
    asyncio.run(run(arguments, tokenizer))


async def run(arguments: argparse.Namespace, tokenizer: Path) -> None:
    problems = [make_problem(arguments.claims, size, tokenizer) for size in arguments.sizes]
    if "counts" in arguments.parts:
        count_tokens(problems)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model in SHAPES:
            has_weights = "engine" in arguments.parts
            model = str(make_model(Path(folder), model, tokenizer, has_weights=has_weights))
        elif {"engine", "vllm"} & {*arguments.parts}:
            model = str(resolve_model(model).path)
        if "engine" in arguments.parts:
            print(f"\nThe embedded engine, {arguments.model}")
            async with embedded(model) as counted:
                await time_ways(problems, counted, slow=arguments.slow, rounds=arguments.rounds)
        if "vllm" in arguments.parts and not os.environ.get("ROOKERY_VLLM_PYTHON"):
            print("\nROOKERY_VLLM_PYTHON names no interpreter that has vLLM: left out.")
        elif "vllm" in arguments.parts:
            print(f"\nvLLM on the {'GPU' if visible_gpus() else 'CPU'}, {arguments.model}")
            async with server(model, is_random=arguments.model in SHAPES) as counted:
                await time_ways(problems, counted, slow=arguments.slow, rounds=arguments.rounds)


@dataclass(frozen=True, slots=True)
class Problem:
    """One evaluation of a complete labelling."""

    size: int
    labels: TokenIds
    orders: dict[str, list[TokenIds]]
    """By way: contexts in the order of their requests."""
    changed: Callable[[str], float]
    """Returns the tokens that a way computes after a change of one label."""

    def contexts(self, way: str, *, round_: int = 0) -> list[TokenIds]:
        """Contexts whose first tokens belong to one way, size and round: caches share nothing."""
        first = FIRST_TOKEN + 2000 * round_ + self.size
        if way == WAYS[0]:
            return [(first + i, *tokens[1:]) for i, tokens in enumerate(self.orders[way])]
        first += 1000 + WAYS.index(way) * self.size
        return [(first, *tokens[1:]) for tokens in self.orders[way]]


def make_problem(path: Path | None, size: int, tokenizer: Path) -> Problem:
    items = read_claims(path, count=size)
    prompts = make_prompts(items, tokenizer)
    numbered = contexts_of(prompts, IdOrder(size))
    tree = contexts_of(prompts, TreeOrder(groups_of(items)))
    orders = dict(zip(WAYS, (numbered, numbered, tree), strict=True))
    return Problem(size, prompts.label_tokens, orders, partial(count_change, prompts, items))


def read_claims(path: Path | None, *, count: int) -> list[Item]:
    """Read claims, or make some of about the same length: 47 tokens, four per question."""
    if path is not None:
        rows = json.loads(path.read_text())[:count]
    else:
        rows = [made_claim(index) for index in range(count)]
    return [
        Item(
            id=str(index),
            text=f"Question: {row['question']}\nClaim: {row['choice']}\nI think this claim is",
            group=row["question"],
            fields={},
        )
        for index, row in enumerate(rows)
    ]


def made_claim(index: int) -> dict[str, str]:
    towns = ("Ostrava", "Bergen", "Lugano", "Toledo", "Aarhus", "Galway", "Uppsala", "Trento")
    town, question = towns[index // 4 % 8], index // 4
    return {
        "question": f"How many bridges crossed the river in {town} in the year {1600 + question}?",
        "choice": f"There were {2 + index % 4} bridges across the river in {town} at that time.",
    }


def make_prompts(items: Sequence[Item], tokenizer: Path) -> BatchPrompts:
    data = DataConfig(path=Path("claims.json"), prompt=PROMPT)
    return BatchPrompts(items, encoder=load_encoder(tokenizer), data=data)


def groups_of(items: Sequence[Item]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.group, []).append(index)
    return list(groups.values())


def contexts_of(
    prompts: BatchPrompts, order: Order, *, changed: int | None = None
) -> list[TokenIds]:
    labels: Labels = tuple((i % 2) ^ (i == changed) for i in range(len(prompts.items)))
    return [prompts.context(labels, item, order=order.of(item)) for item in order.leaves]


def count_tokens(problems: Sequence[Problem]) -> None:
    print("One evaluation from nothing: prompt tokens that a prefix cache leaves to compute")
    print(f"{'items':>6} {'way':>14} {'to the token':>13} {'16-blocks':>10} {'32-blocks':>10} "
          f"{'fewer':>7} {'one changed':>12} {'fewer':>7}")  # fmt: skip
    for problem in problems:
        for way in WAYS:
            contexts = problem.contexts(way)
            naive = sum(map(len, contexts))
            counts = [computed(contexts, block=block) for block in (1, 16, 32)]
            after = problem.changed(way)
            print(f"{problem.size:>6} {way:>14} {counts[0]:>13,} {counts[1]:>10,} "
                  f"{counts[2]:>10,} {naive / counts[1]:>6.1f}x {after:>12,.0f} "
                  f"{naive / after:>6.1f}x", flush=True)  # fmt: skip


def count_change(prompts: BatchPrompts, items: Sequence[Item], way: str) -> float:
    """Mean tokens to compute after a change of one item, in 16-token blocks."""
    size = len(items)
    order: Order = TreeOrder(groups_of(items)) if way == WAYS[2] else IdOrder(size)
    cache = PrefixCache(block_tokens=16, capacity_tokens=CACHE_TOKENS)
    for tokens in contexts_of(prompts, order):
        cache.add(tokens)
    totals = []
    for item in Random(0).sample(range(size), min(size, NUM_CHANGES)):
        contexts = contexts_of(prompts, order, changed=item)
        is_shared = way != WAYS[0]
        totals.append(sum(cache.add(t) if is_shared else len(t) for t in contexts))
    return sum(totals) / len(totals)


def computed(contexts: Sequence[TokenIds], *, block: int) -> int:
    cache = PrefixCache(block_tokens=block)
    return sum(cache.add(tokens) for tokens in contexts)


@dataclass(frozen=True, slots=True)
class Counted:
    """A sampler, and its counts of requested and computed prompt tokens since the start."""

    sampler: Sampler
    model: ModelRef
    count: Callable[[], Awaitable[tuple[int, int]]]


@asynccontextmanager
async def embedded(model: str) -> AsyncIterator[Counted]:
    async def count() -> tuple[int, int]:
        return engine.stats.requested_tokens, engine.stats.prompt_tokens

    async with open_engine(EngineConfig(model=model, cache_gib=16.0)) as engine:
        yield Counted(engine, engine.base, count)


@asynccontextmanager
async def server(model: str, *, is_random: bool = False) -> AsyncIterator[Counted]:
    is_on_cpu = not visible_gpus()
    blocks = ("--block-size", "32") if is_on_cpu else ()
    launch = LaunchConfig(
        model=model,
        python=os.environ["ROOKERY_VLLM_PYTHON"],
        replicas=1,
        dtype="float32" if is_on_cpu else "bfloat16",
        max_loras=0,
        enforce_eager=True,
        args=(*blocks, *(("--load-format", "dummy") if is_random else ())),
    )
    async with open_fleet(FleetConfig(launch=launch)) as fleet:
        client = fleet.pool.replicas[0].client

        async def count() -> tuple[int, int]:
            metrics = await read_metrics(client)
            assert metrics is not None
            return metrics.prefix_queries, metrics.prefix_queries - metrics.prefix_hits

        yield Counted(fleet, fleet.base, count)


async def time_ways(
    problems: Sequence[Problem], counted: Counted, *, slow: int, rounds: int
) -> None:
    """Print the median time of the rounds; counts are equal in all of them."""
    print(f"{'items':>6} {'way':>14} {'asked':>11} {'computed':>11} {'seconds':>9} "
          f"{'tokens':>8} {'time':>7}")  # fmt: skip
    warm = problems[-1].contexts(WAYS[0], round_=-1)[:4]
    await score(counted, warm, problems[-1].labels)
    for problem in problems:
        first: tuple[int, float] | None = None
        for way in WAYS:
            if way != WAYS[-1] and problem.size > slow:
                continue
            before = await counted.count()
            seconds = median(
                [
                    await score(counted, problem.contexts(way, round_=number), problem.labels)
                    for number in range(rounds)
                ]
            )
            after = await counted.count()
            asked, done = ((a - b) // rounds for a, b in zip(after, before, strict=True))
            first = first or (done, seconds)
            is_whole = problem.size <= slow
            gains = f"{first[0] / done:>7.1f}x {first[1] / seconds:>6.1f}x" if is_whole else ""
            print(f"{problem.size:>6} {way:>14} {asked:>11,} {done:>11,} {seconds:>9.2f} {gains}",
                  flush=True)  # fmt: skip


async def score(counted: Counted, contexts: Sequence[TokenIds], labels: TokenIds) -> float:
    requests = [
        ScoreRequest(model=counted.model, tokens=tokens, start=len(tokens), labels=labels)
        for tokens in contexts
    ]
    start = time.perf_counter()
    await counted.sampler.score(requests)
    return time.perf_counter() - start


def make_model(folder: Path, shape: str, tokenizer: Path, *, has_weights: bool) -> Path:
    """Make a model folder of a shape with the tokenizer's vocabulary. vLLM makes weights itself."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(words),
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        **SHAPES[shape],
    )
    path = folder / shape
    if has_weights:
        LlamaForCausalLM(config).save_pretrained(path)
    else:
        config.save_pretrained(path)
    words.save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
