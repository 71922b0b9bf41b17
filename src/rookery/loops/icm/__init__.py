"""icm: labels for unlabelled data, by internal coherence.

config.py        the config of a run
loop.py          the loop and its progress
items.py         items, their groups and batches; the true labels, for the report alone
prompts.py       items as tokens: demonstrations and queries that join exactly
objective.py     constraints over fields of the items, and U = alpha * P - I
label_scorer.py  label log-probabilities: each context once, by content, durable
chain.py         one search: the paper's annealing; batches of items, and decisions as events
baselines.py     labels without a search: zero-shot, few-shot, bootstrap; the inverted seed
verdict.py       the quality of the labels; how far they support one another
report.py        the result beside its baselines
exports.py       files for training
"""

from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.items import read_gold, read_items
from rookery.loops.icm.loop import IcmInputs, Labeller, check_batches, label
from rookery.loops.icm.prompts import load_encoder

__all__ = [
    "IcmConfig",
    "IcmInputs",
    "Labeller",
    "check_batches",
    "label",
    "load_encoder",
    "read_gold",
    "read_items",
]
