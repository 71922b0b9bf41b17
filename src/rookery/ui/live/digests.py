"""Digests: the events of each loop, reduced to the data that its view draws.

    digest = DIGESTS["genome"](run)
    digest.update()                 # reads the new events
    digest.document(after=120)      # {"seq": 200, "facts": {...}, "lists": {"candidates": [...]}}

A digest keeps numbers and names. Texts are read only when shown.
"""

import heapq
import math
import time
from collections.abc import Mapping
from itertools import takewhile
from statistics import fmean
from typing import Any

from rookery.runs import Event, RunView

__all__ = ["DIGESTS", "Digest", "EvolveDigest", "GenomeDigest"]

Row = dict[str, Any]
SAID = 1_000
"""Characters kept of an error message; its event has the whole."""


class Digest:
    """Lists of rows, each row with an `id`, and a few facts; the base of every loop's digest."""

    kinds: tuple[str, ...] = ()

    def __init__(self, run: RunView) -> None:
        self._run = run
        self.seq = 0
        self._lists: dict[str, dict[str, Row]] = {}
        self._changed: dict[str, dict[str, int]] = {}
        """By list and id: seq of the event that last changed the row, newest last."""
        self.facts: Row = {}

    def update(self, *, seconds: float = math.inf) -> bool:
        """Read the events appended since the last call, in order, for about `seconds`. True if
        more remain."""
        newest = self._run.last()
        if newest is None or newest.seq == self.seq:
            return False
        until_s = time.monotonic() + seconds
        self.seq = self.read(after=self.seq, last=newest.seq, until_s=until_s)
        return self.seq < newest.seq

    def read(self, *, after: int, last: int, until_s: float) -> int:
        """Read the events in (after, last] until `until_s`; return the seq reached."""
        kinds = [self._run.events(kind, after=after) for kind in self.kinds]
        for event in heapq.merge(*kinds, key=lambda event: event.seq):
            if event.seq > last:
                break  # appended meanwhile: left for the next update
            self.take(event)
            self.seq = event.seq  # a damaged next event does not repeat this one
            if time.monotonic() > until_s:
                return event.seq
        return last

    def take(self, event: Event) -> None:
        """Process one event of `kinds`."""

    def put(self, name: str, id: str, seq: int, values: Mapping[str, Any]) -> None:
        """Add or change a row of a list."""
        self.rows(name).setdefault(id, {"id": id}).update({**values, "id": id})
        changed = self._changed.setdefault(name, {})
        changed.pop(id, None)
        changed[id] = seq

    def _changed_after(self, name: str, after: int) -> dict[str, int]:
        newest_first = reversed(self._changed.get(name, {}).items())
        return dict(takewhile(lambda one: one[1] > after, newest_first))

    def rows(self, name: str) -> dict[str, Row]:
        return self._lists.setdefault(name, {})

    def document(self, *, after: int = 0, most: int | None = None) -> dict[str, Any]:
        """The facts, and the rows that changed after event `after`: up to about `most`, earliest
        changes first."""
        new = {name: self._changed_after(name, after) for name in self._lists}
        last, is_more = self.seq, False
        if most is not None and sum(map(len, new.values())) > most:
            seqs = sorted(seq for changed in new.values() for seq in changed.values())
            if is_more := seqs[most - 1] < seqs[-1]:
                last = seqs[most - 1]
        lists = {
            name: [row for id, row in rows.items() if new[name].get(id, math.inf) <= last]
            if new[name]
            else []
            for name, rows in self._lists.items()
            if rows
        }
        return {"seq": last, "facts": self.facts, "lists": lists, "is_more": is_more}


class GenomeDigest(Digest):
    """Generations, candidates with their parents, select scores and the winner."""

    kinds = ("candidate", "generation", "phase", "winner")

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self.facts = {"winner": "", "num_tasks": 0, "select": {}}
        self._waiting: list[str] = []
        self._searched = 0

    def take(self, event: Event) -> None:
        payload = event.payload
        match event.kind:
            case "candidate":
                keys = ("operator", "parents", "score", "num_tasks", "error", "version")
                values = {key: payload.get(key) for key in keys}
                values["error"] = str(values["error"] or "")[:SAID]
                name = str(payload.get("id", event.key))
                self.put("candidates", name, event.seq, values)
                self._waiting.append(name)
                asked = max(self.facts["num_tasks"], payload.get("num_tasks") or 0)
                self.facts["num_tasks"] = asked
            case "generation":
                number = payload.get("generation", len(self.rows("generations")))
                for name in self._waiting:
                    self.put("candidates", name, event.seq, {"generation": number})
                self._waiting, self._searched = [], event.seq
                self.put("generations", str(number), event.seq, payload)
            case "phase" if event.key == "select":
                self.facts["select"] = self._read_select(event.seq)
            case "winner":
                self.facts["winner"] = str(payload.get("id", ""))

    def _read_select(self, end: int) -> dict[str, float]:
        """By version, the mean reward on the select tasks: rollouts after the last generation."""
        rewards: dict[str, list[float]] = {}
        for event in self._run.events("rollout", after=self._searched):
            if event.seq > end:
                break
            reward = event.payload.get("reward")
            if isinstance(reward, int | float):
                version = str(event.payload.get("model", "")).rpartition("@")[2]
                rewards.setdefault(version, []).append(float(reward))
        return {version: fmean(values) for version, values in rewards.items()}

    def duel(self, name: str = "") -> dict[str, Any]:
        """Rewards of a candidate and the best founder on the tasks that both answered.

        Without a name, the candidate is the winner, or the best so far.
        """
        candidates = self.rows("candidates")
        founders = [c for c in candidates.values() if c["operator"] == "founder"]
        founder = max(founders, key=_score, default=None)
        others = [c for c in candidates.values() if c["operator"] != "founder" and not c["error"]]
        best = candidates.get(name or self.facts["winner"]) or max(others, key=_score, default=None)
        if founder is None or best is None or founder is best:
            return {"founder": "", "candidate": "", "tasks": []}
        before, after = self._answers(founder["version"]), self._answers(best["version"])
        both = sorted(before.keys() & after.keys())
        rows = [[task, *before[task], *after[task]] for task in both]
        return {"founder": founder["id"], "candidate": best["id"], "tasks": rows}

    def _answers(self, version: object) -> dict[str, tuple[float, int]]:
        """By task, the reward of an adapter and the seq of the answer's event."""
        answers: dict[str, tuple[float, int]] = {}
        for event in self._run.keyed("rollout", f"{version}|"):
            reward = event.payload.get("reward")
            if isinstance(reward, int | float):
                # The first answer is measured; further ones are for pass@k.
                answers.setdefault(str(event.payload.get("task")), (float(reward), event.seq))
        return answers


class GrpoDigest(Digest):
    """Steps that can be read, and the mean reward of each checkpoint."""

    kinds = ("select", "batch", "step")

    def take(self, event: Event) -> None:
        if event.kind == "select":
            mean, is_best = event.payload.get("mean"), bool(event.payload.get("is_best"))
            self.put("selects", event.key, event.seq, {"mean": mean, "is_best": is_best})
        else:
            self.put("steps", event.key, event.seq, {})


class IcmDigest(Digest):
    kinds = ("decision",)

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._labels: dict[str, str] = {}
        """By chain: its labels after the newest decision."""

    def take(self, event: Event) -> None:
        chain, _, iteration = event.key.rpartition("/")
        labels = str(event.payload.get("labels", ""))
        previous = self._labels.get(chain, labels)
        self._labels[chain] = labels
        keys = ("utility", "num_frustrated", "is_accepted", "item", "temperature")
        values = {
            "seq": event.seq,
            "chain": chain,
            "iteration": int(iteration) if iteration.isdecimal() else 0,
            "num_labelled": len(labels) - labels.count("-"),
            "changed": [
                k for k, (a, b) in enumerate(zip(previous, labels, strict=False)) if a != b
            ],
            **{key: event.payload.get(key) for key in keys},
        }
        self.put("decisions", event.key, event.seq, values)


class EvolveDigest(Digest):
    kinds = ("first_program", "attempt")

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._num_decided = 0
        self.blobs: dict[str, str] = {}
        """By program: hash of the blob with its code."""

    def take(self, event: Event) -> None:
        if event.kind == "first_program":
            name = f"first{event.key}"
            origin = {"number": 0, "island": 0, "generation": 0, "parent": ""}
            self.put("programs", name, event.seq, origin)
            self._evaluate(name, event.seq, event.payload)
            self._decide(name, event.seq, event.payload.get("failure"), "committed")
            return
        number, data = event.payload.get("number", 0), event.payload.get("data", {})
        name = f"p{number}"
        match event.payload.get("state"):
            case "planned":
                plan = data.get("plan", {})
                values = {key: plan.get(key) for key in ("island", "parent", "generation", "arm")}
                values |= {"number": number, "state": "open"}
                self.put("programs", name, event.seq, values)
            case "generated":
                counts = (data.get("prompt_tokens"), data.get("completion_tokens"))
                num_tokens = sum(count for count in counts if isinstance(count, int))
                values = {"tokens": num_tokens, "model": str(data.get("model") or "")}
                self.put("programs", name, event.seq, values)
            case "evaluated":
                self._evaluate(name, event.seq, data)
            case "committed" | "failed" as state:
                self._decide(name, event.seq, data.get("failure"), state)

    def _evaluate(self, name: str, seq: int, data: Mapping[str, Any]) -> None:
        metrics = data.get("metrics") or {}
        shown = {k: v for k, v in metrics.items() if isinstance(v, int | float | str)}
        self.put("programs", name, seq, {"metrics": shown, "score": _combined(metrics)})
        self.blobs[name] = str(data.get("program") or "")

    def _decide(self, name: str, seq: int, failure: Any, state: str) -> None:
        self._num_decided += 1
        why = None
        if isinstance(failure, Mapping):
            why = [str(failure.get("kind", "")), str(failure.get("message", ""))[:SAID]]
        values = {"state": "failed" if failure else state, "failure": why}
        self.put("programs", name, seq, values | {"decided": self._num_decided})

    def parent(self, name: str) -> str:
        return str(self.rows("programs").get(name, {}).get("parent") or "")


class AnswersDigest(Digest):
    """Tasks of an evaluation with their answers: by place in `models`, a list of [reward, whether
    it failed, seq of the event]. The first answer is measured."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._places: dict[str, int] = {}

    def read(self, *, after: int, last: int, until_s: float) -> int:
        keys = ("task", "model", "reward", "error")
        for seq, task, model, reward, error in self._run.fields("rollout", keys, after=after):
            if seq > last:
                break
            place = self._places.setdefault(str(model), len(self._places))
            self.put("tasks", str(task), seq, {})
            answers = self.rows("tasks")[str(task)].setdefault("answers", {})
            answers.setdefault(place, []).append([reward, bool(error), seq])
            self.seq = seq
            if time.monotonic() > until_s:
                last = seq
        self.facts = {"models": list(self._places)}
        return last


DIGESTS: dict[str, type[Digest]] = {
    "genome": GenomeDigest,
    "grpo": GrpoDigest,
    "icm": IcmDigest,
    "evolve": EvolveDigest,
    "eval": AnswersDigest,
    "league": AnswersDigest,
    "pipeline": AnswersDigest,
}


def _combined(metrics: Mapping[str, Any]) -> float | None:
    """`combined_score`, else the mean of the finite numbers; None without any."""
    named = metrics.get("combined_score")
    numbers = [named] if named is not None else list(metrics.values())
    finite = [
        float(value)
        for value in numbers
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    return fmean(finite) if finite else None


def _score(candidate: Row) -> float:
    value = candidate.get("score")
    return float(value) if isinstance(value, int | float) else -math.inf
