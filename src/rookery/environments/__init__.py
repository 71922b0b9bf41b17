"""Tasks of several turns: a game that talks to the model, and what the exchange is worth.

chat.py           what a game calls for the model's next reply; drawn tokens are never encoded again
game.py           a Python function as a game; groups of games to train on, and to measure models by
atropos.py        how a training gets its groups from environments of Atropos and verifiers
verifiers/        what plays those of verifiers, in an interpreter of its own
"""

from rookery.environments.chat import Chat, Conversation
from rookery.environments.game import Game, GameConfig, GameEvaluator, GameSampler

__all__ = ["Chat", "Conversation", "Game", "GameConfig", "GameEvaluator", "GameSampler"]
