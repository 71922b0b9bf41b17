"""The taskset `even_tokens`; of each task every fourth rollout fails."""

from collections import Counter

import verifiers.v1 as vf
from even_tokens import Even  # type: ignore[import-not-found]

CALLS: Counter[str] = Counter()


class Failing(Even):  # type: ignore[misc]
    """The reward function fails for it."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def share(self, trace: vf.Trace) -> float:
        CALLS[str(self.data.prompt)] += 1
        if CALLS[str(self.data.prompt)] % 4 == 0:
            raise RuntimeError("planted")
        found: float = await super().share(trace)
        return found


class FailingTasks(vf.Taskset[Failing, vf.TasksetConfig]):  # type: ignore[misc]
    """Four prompts."""

    def load(self) -> list[Failing]:
        return [Failing(vf.TaskData(prompt=f"w{7 + number} w9")) for number in range(4)]


__all__ = ["FailingTasks"]
