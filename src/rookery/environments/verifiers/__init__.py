"""Environments of `verifiers` 0.4, played in an interpreter of their own.

config.py        what a run is told
player.py        plays tasks and sends groups to the gateway; runs where verifiers is
rookery_chat.py  one chat in that process, as a harness of verifiers

The last two import nothing of Rookery: its packages and those of verifiers need not agree.
"""

from rookery.environments.verifiers.config import VerifiersConfig

__all__ = ["VerifiersConfig"]
