"""Games for the tests."""

import asyncio
import os
import sys

from rookery.environments import Chat
from rookery.errors import RookeryError
from rookery.types import Message, Task

LOWEST, HIGHEST = 4, 96
HIGHER, LOWER = "w4", "w5"


async def guess(task: Task, chat: Chat) -> dict[str, float]:
    """Guess a number of the tiny model's vocabulary: a token each. Nearer is better."""
    if task.id in os.environ.get("FAILING_TASKS", "").split():
        raise ValueError("no game today")
    secret = int(str(task.reference))
    reply = await chat(str(task.prompt))
    first = _number(reply)
    last = first
    while chat.turns_left and last != secret:
        last = _number(await chat(HIGHER if last < secret else LOWER))
    distance = abs(last - secret) / (HIGHEST - LOWEST)
    return {"reward": 1.0 - distance, "is_right": last == secret}


def _number(reply: str) -> int:
    """What was guessed; anything else is the lowest number."""
    words = [word for word in reply.split() if word.startswith("w")]
    return int(words[0][1:]) if words else LOWEST


async def two_words(task: Task, chat: Chat) -> float:
    first = await chat([{"role": "system", "content": "s"}, Message(role="user", content="a")])
    second = await chat(Message(role="user", content=first))
    return float(len(first) + len(second)) + 0 * len(task.id)


async def endless(_: Task, chat: Chat) -> float:
    while True:
        await chat("again")


async def waits(_: Task, chat: Chat) -> float:
    await chat("once")
    await asyncio.Event().wait()
    return 1.0


async def silent(_task: Task, _chat: Chat) -> float:
    return 1.0


async def at_once(_: Task, chat: Chat) -> float:
    await asyncio.gather(chat("a"), chat("b"))
    return 1.0


async def swallows(_: Task, chat: Chat) -> float:
    try:
        await chat("a")
    except RookeryError:
        return 0.0
    return 1.0


async def says_nonsense(_: Task, chat: Chat) -> float:
    await chat({"text": "a"})
    return 1.0


async def returns_text(_: Task, chat: Chat) -> str:
    return await chat("a")


async def returns_huge(_: Task, chat: Chat) -> int:
    await chat("a")
    return 10**5000


async def leaves(_: Task, chat: Chat) -> float:
    await chat("a")
    sys.exit(3)


async def returns_nameless(_: Task, chat: Chat) -> dict[str, float]:
    await chat("a")
    return {"reward": 1.0, "moves//legal": 1.0}


async def returns_no_reward(_: Task, chat: Chat) -> dict[str, float]:
    await chat("a")
    return {"score": 1.0}


async def returns_nan(_: Task, chat: Chat) -> float:
    await chat("a")
    return float("nan")


def plain(_task: Task, _chat: Chat) -> float:
    return 1.0


async def counts(task: Task, chat: Chat) -> float:
    """The prompt is how many turns are played, and how often the event loop is passed to others
    between them; a negative number waits without end."""
    turns, wait = map(int, str(task.prompt).split())
    if wait < 0:
        await asyncio.Event().wait()
    for _ in range(turns):
        await chat("a")
        for _ in range(wait):
            await asyncio.sleep(0)
    return float(len(chat.completions))
