"""Tasks of several turns: a game talks to the model and returns a reward.

chat.py           the model's replies in a game; sampled tokens are never encoded again game.py
a Python function as a game; groups of games for training, and evaluations by games atropos.py
configs of Atropos and verifiers environments verifiers/        plays the environments of verifiers,
in their own interpreter
"""

from rookery.environments.chat import Chat, Conversation
from rookery.environments.game import Game, GameConfig, GameEvaluator, GameSampler

__all__ = ["Chat", "Conversation", "Game", "GameConfig", "GameEvaluator", "GameSampler"]
