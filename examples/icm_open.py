"""Label reviews without labels with every step in sight: one port, pure search, no loop of ours.

Hardware: 2 CPU cores, about 2 minutes. Twelve reviews in six pairs of which exactly one is
positive; four of them begin with random labels. Expect all twelve labels right.

    python examples/icm_open.py
"""

import asyncio
import json

from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.loops.icm.prompts import load_encoder
from rookery.search.annealing import (
    AnnealingConfig,
    argmax_label,
    ask,
    begin,
    skip,
    start_labels,
    tell,
)
from rookery.search.labelling import (
    UNLABELLED,
    Constraints,
    Exclusive,
    Labels,
    TreeOrder,
    labelled_items,
)
from rookery.starters import DEMOS
from rookery.types import ScoreRequest, TokenIds

NUM_ITEMS = 12
ALPHA = 50.0
SEED = 0
SEARCH = AnnealingConfig(iterations=200, num_start=4)


class Model:
    """Label log-odds of an item given the other labels, each context asked for once."""

    def __init__(self, engine: EmbeddedEngine, reviews: list[str]) -> None:
        encode = load_encoder(resolve_model("smollm2").path).encode
        self._engine = engine
        self._labels = (encode(" True")[0], encode(" False")[0])
        # The line breaks belong to the review behind them: alone they would be another token.
        self._openings = [encode(f"Review: {review}\nPositive:") for review in reviews]
        self._queries = [encode(f"\n\nReview: {review}\nPositive:") for review in reviews]
        # One static tree: contexts of different targets share all the prefixes they can.
        self._order = TreeOrder([(i, i + 1) for i in range(0, len(reviews), 2)])
        self._known: dict[TokenIds, float] = {}

    def _context(self, labels: Labels, target: int) -> TokenIds:
        tokens: TokenIds = ()
        for item in self._order.of(target):
            if labels[item] != UNLABELLED:
                tokens += (*self._piece(tokens, item), self._labels[labels[item]])
        return tokens + self._piece(tokens, target)

    def _piece(self, before: TokenIds, item: int) -> TokenIds:
        return self._queries[item] if before else self._openings[item]

    async def odds(self, wanted: list[tuple[Labels, int]]) -> list[float]:
        """log p(True) - log p(False) of each, all that are new in one batch."""
        contexts = [self._context(labels, item) for labels, item in wanted]
        new = list(dict.fromkeys(c for c in contexts if c not in self._known))
        scores = await self._engine.score(
            [
                ScoreRequest(model=self._engine.base, tokens=c, start=len(c), labels=self._labels)
                for c in new
            ]
        )
        for context, score in zip(new, scores, strict=True):
            true, false = score.label_logprobs
            self._known[context] = true - false
        return [self._known[context] for context in contexts]

    async def utilities(self, labellings: tuple[Labels, ...]) -> list[float]:
        """Mean predictability of each labelling; constraints are kept, so none is broken."""
        wanted = [(labels, i) for labels in labellings for i in labelled_items(labels)]
        odds = iter(await self.odds(wanted))
        return [
            ALPHA
            * sum(next(odds) * (1 - 2 * labels[i]) for i in labelled_items(labels))
            / len(labelled_items(labels))
            for labels in labellings
        ]


async def main() -> None:
    rows = [json.loads(line) for line in (DEMOS / "reviews.jsonl").read_text().splitlines()]
    rows = rows[:NUM_ITEMS]
    pairs = [Exclusive(members=(i, i + 1), label=0, is_exact=True) for i in range(0, NUM_ITEMS, 2)]
    constraints = Constraints(pairs, num_items=NUM_ITEMS, num_labels=2)
    groups = [row["pair"] for row in rows]

    async with open_engine(EngineConfig(model="smollm2")) as engine:
        model = Model(engine, [row["review"] for row in rows])
        labels = start_labels(
            constraints, num_items=NUM_ITEMS, num_labels=2, config=SEARCH, seed=SEED
        )
        [utility] = await model.utilities((labels,))
        state = begin(labels, utility=utility)
        while state.iteration < SEARCH.iterations:
            item = ask(state, groups=groups, config=SEARCH, seed=SEED)
            [odds] = await model.odds([(state.labels, item)])
            label = argmax_label((odds, -odds))
            if label == state.labels[item]:
                state = skip(state)
                continue
            options = constraints.repairs(state.labels, item=item, label=label)
            tried = list(zip(options, await model.utilities(options), strict=True))
            state, decision = tell(state, tried, config=SEARCH, seed=SEED)
            if decision.is_accepted:
                shown = "".join("-TF"[x + 1] for x in state.labels)
                print(f"{decision.iteration:>4}  {shown}  U {state.utility:7.2f}")
        computed, asked = engine.stats.prompt_tokens, engine.stats.requested_tokens

    gold_rows = (DEMOS / "reviews_gold.jsonl").read_text().splitlines()
    gold = {row["id"]: row["label"] for row in map(json.loads, gold_rows)}
    found = ["True" if label == 0 else "False" for label in state.best_labels]
    right = sum(gold[row["id"]] == f for row, f in zip(rows, found, strict=True))
    print(f"{right} of {NUM_ITEMS} labels are right; {computed:,} of {asked:,} tokens computed")


if __name__ == "__main__":
    asyncio.run(main())
