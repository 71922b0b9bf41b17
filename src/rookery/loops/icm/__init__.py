"""icm: labels data that has no labels, by internal coherence.

config.py        what a run is told
loop.py          the loop
items.py         items, their groups and batches; the true labels, for the report alone
prompts.py       items as tokens: demonstrations and queries that join exactly
constraints.py   constraints over fields of the items
objective.py     U = alpha * P - I
label_scorer.py  label log-probabilities: each context once, by content, durable
chain.py         one search: the paper's annealing
batch.py         items that are labelled together, and what their searches found
baselines.py     what needs no search: zero-shot, few-shot, bootstrap, the inverted seed
decisions.py     decisions as events
transfer.py      whether labels of one batch mean the same in another
verdict.py       what the labels are worth
labellings.py    all ways to label, the search's own first
report.py        the result beside its baselines
exports.py       files for training
"""

from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.items import read_gold, read_items
from rookery.loops.icm.loop import IcmResult, Labeller, check_batches, label
from rookery.loops.icm.prompts import load_encoder

__all__ = [
    "IcmConfig",
    "IcmResult",
    "Labeller",
    "check_batches",
    "label",
    "load_encoder",
    "read_gold",
    "read_items",
]
