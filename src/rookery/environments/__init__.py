"""Tasks of several turns: a game that talks to the model, and what the exchange is worth.

chat.py           what a game calls for the model's next reply; drawn tokens are never encoded again
game.py           a Python function as a game: its limits, its reward, its failures
game_sampler.py   groups of games to train on, and models measured by games
atropos/          environments of Atropos: the gateway that they send groups to
verifiers/        environments of verifiers, played as Atropos's are
"""

from rookery.environments.chat import Chat, Conversation
from rookery.environments.game import Game, GameConfig
from rookery.environments.game_sampler import GameEvaluator, GameSampler

__all__ = ["Chat", "Conversation", "Game", "GameConfig", "GameEvaluator", "GameSampler"]
