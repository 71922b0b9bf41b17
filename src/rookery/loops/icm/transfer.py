"""Whether the labels of one batch mean in another what they mean there.

Batches are searched each by itself, so that one may end with a concept and the next with its
opposite, both as coherent as can be. Items of one batch are shown with their labels, and those of
the other are asked for behind them.
"""

from rookery.concurrency import run_in_thread
from rookery.loops.icm.baselines import calibrated, most_likely, surest
from rookery.loops.icm.batch import Batch
from rookery.loops.icm.objective import normalised
from rookery.search.labelling import UNLABELLED, Labels, labelled_items

__all__ = ["transfer"]

MAX_SHOWN = 32
"""Labels to show at most; never more than half of a batch, so that a query fits behind them."""


async def transfer(one: Batch, other: Batch) -> Labels:
    """The likeliest consistent labels of the other batch behind the surest ones of the first."""
    num_labels = one.problem.num_labels
    number = max(1, min(MAX_SHOWN, len(one.items) // 2) // num_labels)
    shots = surest(one.best.labels, one.best.assessment.margins, num_each=number)
    shown = labelled_items(shots)
    items = [*(one.items[place] for place in shown), *other.items]
    labels = (*(shots[place] for place in shown), *[UNLABELLED] * len(other.items))
    contexts = [(labels, len(shown) + place) for place in range(len(other.items))]
    scorer = await run_in_thread(other.open_scorer, items)
    reads = await scorer.score(contexts)
    known = [None if read is None else normalised(read) for read in reads]
    return most_likely(calibrated(known), other.problem.constraints)
