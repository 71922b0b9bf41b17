"""A taskset of verifiers: say even numbers."""

import verifiers.v1 as vf


class Even(vf.Task[vf.TaskData]):  # type: ignore[misc]
    """One prompt; words with even numbers are worth a point."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def share(self, trace: vf.Trace) -> float:
        words = (trace.last_reply or "").split()
        even = [word for word in words if word[-1:].isdigit() and int(word[-1]) % 2 == 0]
        return len(even) / 8


class EvenTasks(vf.Taskset[Even, vf.TasksetConfig]):  # type: ignore[misc]
    """Four prompts."""

    def load(self) -> list[Even]:
        return [Even(vf.TaskData(prompt=f"w{7 + number} w9")) for number in range(4)]


__all__ = ["EvenTasks"]
