"""The rollouts of a run, so that nothing is asked twice and a failed answer stays failed.

log = RolloutLog(run)                    # what the run's events hold
rollout = log.find(key, task, model)     # None: not asked yet
log.add(rollouts)                        # in a thread; durable before it returns
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rookery.runs import FORMER, Event, NewEvent, Run
from rookery.types import Completion, ModelRef, Rollout, Task

__all__ = ["RolloutLog", "set_scores_aside"]

ROLLOUT = "rollout"


def set_scores_aside(run: Run, *, further: Collection[str], only_failed: bool) -> None:
    """Have rollouts scored again from their answers, all or the failed ones, and events of the
    `further` kinds, which follow from rewards, made again."""

    def keep(event: Event) -> bool:
        return only_failed and event.kind == ROLLOUT and event.payload["reward"] is not None

    def key(event: Event) -> str:
        return _answer_key(event.key) if event.kind == ROLLOUT else event.key

    run.set_aside((ROLLOUT, *further), keep=keep, key=key)


def _answer_key(key: str) -> str:
    """What another scorer finds an answer by. A key ends with the scorer and the number of the
    answer: see `Asking.key`."""
    rest, _, index = key.rpartition("|")
    return f"{rest.rpartition('|')[0]}|{index}"


class RolloutLog:
    """Rollouts found again by (weights, task, way of asking), the failed ones too.

    With a run they are its events and stay on disk: memory does not grow with their number.
    """

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self._adding = threading.Lock()
        self._memory: dict[str, Mapping[str, Any]] = {}
        """Holds them when there is no run."""
        self.has_answers = run is not None and run.last(f"{FORMER}{ROLLOUT}") is not None
        """Whether rollouts were set aside, to be scored again."""

    def __len__(self) -> int:
        return len(self._memory) if self._run is None else self._run.counts().get(ROLLOUT, 0)

    def find(self, key: str, task: Task, model: ModelRef) -> Rollout | None:
        payload = self._payload(key)
        if payload is None:
            return None
        completion = payload["completion"]
        return Rollout(
            task=task,
            completion=None if completion is None else _read_completion(completion, model),
            reward=payload["reward"],
            error=payload["error"],
            metrics=payload.get("metrics", {}),
        )

    def find_answer(self, key: str, model: ModelRef) -> tuple[Completion, float | None] | None:
        """The answer, and its certainty, of a rollout that is to be scored again."""
        event = None if self._run is None else self._run.get(f"{FORMER}{ROLLOUT}", _answer_key(key))
        if event is None or event.payload["completion"] is None:
            return None
        certainty = event.payload.get("metrics", {}).get("certainty")
        return _read_completion(event.payload["completion"], model), certainty

    def add(self, rollouts: Sequence[tuple[str, ModelRef, Rollout, int]]) -> None:
        """Store a block of rollouts, all or none: a resumed run decides by what this one saw.

        Waits for the disk: not for an event loop, but for any number of threads. Of two answers to
        one question the first is kept.
        """
        with self._adding:
            news = {
                key: {
                    "model": model.served_name,
                    "task": rollout.task.id,
                    "reward": rollout.reward,
                    "error": rollout.error,
                    "completion": _write_completion(rollout.completion),
                    **({"metrics": dict(rollout.metrics)} if rollout.metrics else {}),
                    "num_tokens": num_tokens,
                }
                for key, model, rollout, num_tokens in rollouts
                if self._payload(key) is None
            }
            if self._run is None:
                self._memory |= news
            elif news:
                self._run.append_many_blocking(
                    [NewEvent(kind=ROLLOUT, payload=new, key=key) for key, new in news.items()]
                )

    def _payload(self, key: str) -> Mapping[str, Any] | None:
        if self._run is None:
            return self._memory.get(key)
        event = self._run.get(ROLLOUT, key)
        return None if event is None else event.payload


def _write_completion(completion: Completion | None) -> dict[str, object] | None:
    if completion is None:
        return None
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
    }


def _read_completion(payload: Mapping[str, object], model: ModelRef) -> Completion:
    return Completion(
        model=model,
        tokens=tuple(payload["tokens"]),  # type: ignore[arg-type]
        logprobs=tuple(payload["logprobs"]),  # type: ignore[arg-type]
        text=str(payload["text"]),
        finish_reason="stop" if payload["finish_reason"] == "stop" else "length",
    )
