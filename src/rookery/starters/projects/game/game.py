"""A game of several turns: the messages to the model, and the reward."""

from rookery.environments import Chat
from rookery.types import Task


async def play(task: Task, chat: Chat) -> dict[str, float]:
    """Ask; if the answer is wrong, ask once more for half of the reward."""
    reply, worth = await chat(str(task.prompt)), 1.0
    if not is_right(task, reply) and chat.turns_left:
        reply, worth = await chat("That is not right. Answer with the name of a city alone."), 0.5
    brief = 0.2 / max(1, len(reply.split()))  # a signal to learn from when no answer is right
    return {"reward": 0.8 * worth * is_right(task, reply) + brief, "turns": len(chat.completions)}


def is_right(task: Task, reply: str) -> bool:
    return str(task.reference).lower() in reply.lower()
