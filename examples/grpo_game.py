"""Train a policy in a game of several turns: a tiny model adds, and may try again when it is wrong.

Hardware: 1 CPU core, about 2 minutes. Expect about 0.64 before and about 0.81 after.

    python examples/addition.py && python examples/grpo_game.py
"""

import rookery
from rookery.environments import Chat
from rookery.types import Task


async def play(task: Task, chat: Chat) -> dict[str, float]:
    """The whole reward for the first try, half of it for the second."""
    for reward in (1.0, 0.5):
        reply = await chat(str(task.prompt))
        if reply == task.reference:
            return {"reward": reward, "turns": len(chat.completions)}
    return {"reward": 0.0, "turns": len(chat.completions)}


if __name__ == "__main__":
    outcome = rookery.run_grpo("configs/grpo_game.yaml", seed=0)
    for row in outcome.report.rows:
        print(f"{row.name:<12} {row.mean:.3f} ({row.low:.3f} to {row.high:.3f})")
