"""Tasks of several turns: a game that talks to the model, and what the exchange is worth.

conversation.py   the tokens of one exchange: what was drawn is never encoded again
chat.py           what a game calls to get the model's next reply
game.py           a Python function as a game: its limits, its reward, its failures
rounds.py         games that wait for one another, so that replies are drawn together
game_sampler.py   groups of games to train on
game_evaluator.py models measured by games
"""

from rookery.environments.chat import Chat, Conversation
from rookery.environments.game import Game, GameConfig
from rookery.environments.game_sampler import GameEvaluator, GameSampler

__all__ = ["Chat", "Conversation", "Game", "GameConfig", "GameEvaluator", "GameSampler"]
