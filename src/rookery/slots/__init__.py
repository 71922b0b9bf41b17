"""A torch causal LM with N adapter slots, mixed in one batch, forward and backward.

Tokens of all sequences are the rows of one tensor, without padding. Each row uses a slot or none.
"""

from rookery.slots.attention import Attend, CausalAttend
from rookery.slots.fixed_text import FixedText
from rookery.slots.linear import SlottedLinear
from rookery.slots.loading import find_device, load_model
from rookery.slots.model import ModelShape, SlotBank, SlottedModel
from rookery.slots.rows import Segment, SlotRows

__all__ = [
    "Attend",
    "CausalAttend",
    "FixedText",
    "ModelShape",
    "Segment",
    "SlotBank",
    "SlotRows",
    "SlottedLinear",
    "SlottedModel",
    "find_device",
    "load_model",
]
