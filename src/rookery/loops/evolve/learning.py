"""Learning of the proposer (`rookery.learn`): adapters trained on the run's answers join as arms.

    every N iterations:
        choose the answers whose child improved its parent, weighted by their group
        train an adapter of the engine's model on them                 # Learner.train
        add it to the arms; the bandit judges all arms anew            # search/programs/bandit.py

A deterministic search waits for a training, so that its arm joins at a fixed iteration. A steady
search goes on meanwhile. A finished training is an event of the run. An interrupted one is repeated
with the same answers.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from rookery.errors import RookeryError
from rookery.loops.evolve.config import LearnConfig
from rookery.loops.evolve.config_sections import FEWEST_ROWS
from rookery.loops.evolve.program import ProgramStore
from rookery.loops.evolve.search_state import Answered, Learned, SearchState
from rookery.ports import TextModel
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread

__all__ = ["Learner", "Learning", "Lesson", "Trained", "choose_answers"]

LEARNED = "learned"
"""Event kind of a training, and folder of the adapters."""
_LEARNED = TypeAdapter(Learned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One training row."""

    system: str
    user: str
    answer: str
    weight: float
    """Weight of the row, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained adapter."""

    write: Callable[[Path], object]
    """Writes the adapter to a folder."""
    num_rows: int
    num_tokens: int
    num_answer_tokens: int
    """Tokens of answers, which the loss covers."""
    seconds: float
    loss: float


class Learner(Protocol):
    """Trains and serves adapters of the engine's model."""

    async def train(self, lessons: Sequence[Lesson], *, name: str, seed: int) -> Trained:
        """Train an adapter. The same lessons and seed give the same adapter."""
        ...

    def open(self, folder: Path, *, name: str) -> TextModel:
        """Open the adapter in the folder. It is loaded at its first request."""
        ...

    async def retire(self, name: str) -> None:
        """Unload an adapter after its last request. A later request loads it again."""
        ...


def choose_answers(answers: Sequence[Answered]) -> list[tuple[Answered, float]]:
    """Return the answers to learn from, with weights.

    A group is the answers to one program and the program itself, whose gain is 0. An answer's
    weight is its lead over the group's mean gain, divided by the group's best gain, because gains
    shrink as a search goes on. Answers at or below the mean are dropped.
    """
    groups: dict[str, list[float]] = {}
    for answered in answers:
        groups.setdefault(answered.base, [0.0]).append(answered.gain)
    best = {base: max(gains) for base, gains in groups.items()}
    mean = {base: fsum(gains) / len(gains) for base, gains in groups.items()}
    return [
        (answered, (answered.gain - mean[answered.base]) / best[answered.base])
        for answered in answers
        if answered.gain > mean[answered.base]
    ]


class Learning:
    """The trainings of one search."""

    def __init__(
        self,
        config: LearnConfig,
        learner: Learner,
        *,
        run: Run,
        store: ProgramStore,
        state: SearchState,
        add_arm: Callable[[str, TextModel], None],
        say: Callable[[str], None],
        seed: int,
    ) -> None:
        """Read the run's events: call this in a thread. `add_arm` registers a model for plans."""
        self._config = config
        self._learner = learner
        self._run = run
        self._store = store
        self._state = state
        self._add_arm = add_arm
        self._say = say
        self._seed = seed
        self._recorded = [_LEARNED.validate_python(one.payload) for one in run.events(LEARNED)]
        """Trainings of earlier processes, in the order in which their arms joined."""
        self._last = 0
        """Number of the last training begun."""
        self._task: asyncio.Task[tuple[Learned, Trained | None]] | None = None

    async def advance(
        self, *, has_left: bool, limit_s: float | None, on_end: Callable[[], None]
    ) -> None:
        """Begin a training that is due, and let a finished adapter join. Call before each step.

        `has_left` says that attempts remain to be planned. `on_end` is called when a background
        training has ended.
        """
        while self._recorded and self._recorded[0].num_decided == self._state.num_decided:
            learned = self._recorded.pop(0)
            self._last = learned.number
            await self._join(learned)
        if self._task is None and has_left and self._is_due():
            self._last = self._state.num_decided // self._config.every
            work = self._train(self._last, tuple(self._state.answers))
            self._task = asyncio.create_task(work, name="training")
            self._task.add_done_callback(lambda _: on_end())
            if self._state.lag is not None:
                await asyncio.wait([self._task], timeout=limit_s)
                if not self._task.done():
                    await self.close()
        if self._task is not None and self._task.done():
            learned, trained = self._task.result()
            self._task = None
            await self._record(learned, trained)

    async def close(self) -> None:
        """Cancel an unfinished training. A resumed run repeats it."""
        if self._task is not None and not self._task.done():
            self._say(f"the training {self._last} was under way at the end and is left out")
            self._task.cancel()
            await asyncio.wait([self._task])
        self._task = None

    def _is_due(self) -> bool:
        """Return True at a new multiple of `every`, once all recorded trainings have joined."""
        number, rest = divmod(self._state.num_decided, self._config.every)
        return number > self._last and rest == 0 and not self._recorded

    async def _train(
        self, number: int, answers: Sequence[Answered]
    ) -> tuple[Learned, Trained | None]:
        chosen = (await run_in_thread(choose_answers, answers))[-self._config.rows :]
        learned = Learned(
            number=number,
            num_decided=0,
            num_answers=len(answers),
            num_groups=len({answered.base for answered, _ in chosen}),
        )
        if len(chosen) < FEWEST_ROWS:
            error = f"{len(chosen)} answers to learn; a training needs {FEWEST_ROWS}."
            return replace(learned, error=error), None
        self._say(f"training {learned.name} on {len(chosen)} answers of the run")
        lessons = await run_in_thread(lambda: [self._lesson(*each) for each in chosen])
        try:
            trained = await self._learner.train(lessons, name=learned.name, seed=self._seed)
        except RookeryError as error:
            return replace(learned, error=str(error)), None
        return replace(
            learned,
            num_rows=trained.num_rows,
            num_tokens=trained.num_tokens,
            num_answer_tokens=trained.num_answer_tokens,
            seconds=trained.seconds,
            loss=trained.loss,
        ), trained

    def _lesson(self, answered: Answered, weight: float) -> Lesson:
        exchange = self._store.get_document(answered.answer)
        return Lesson(
            system=exchange["system"],
            user=exchange["user"],
            answer=exchange["answer"],
            weight=weight,
        )

    async def _record(self, learned: Learned, trained: Trained | None) -> None:
        """Record a training durably before its adapter joins. Unrecorded ones are repeated."""
        retires = () if learned.error else self._find_retired()
        learned = replace(learned, num_decided=self._state.num_decided, retires=retires)
        if trained is not None:
            name = f"{LEARNED}/{learned.name}"
            await run_in_thread(partial(self._run.write_folder, name, trained.write))
        payload = _LEARNED.dump_python(learned, mode="json")
        await self._run.append(LEARNED, payload, key=str(learned.number))
        self._say(
            f"{learned.name} is not trained: {learned.error}"
            if learned.error
            else f"{learned.name} joins: {learned.num_tokens} tokens, {learned.seconds:.1f} s"
        )
        await self._join(learned)

    def _find_retired(self) -> tuple[str, ...]:
        """Return the earlier adapters to retire: all but the one with the best rate."""
        names = {learned.name for learned, _ in self._state.learned}
        arms = [arm for arm in self._state.database.arms if arm.name in names and arm.weight > 0]
        arms.sort(key=lambda arm: arm.rate or 0.0)
        return tuple(arm.name for arm in arms[:-1])

    async def _join(self, learned: Learned) -> None:
        if not learned.error:
            folder = self._run.path / LEARNED / learned.name
            self._add_arm(learned.name, self._learner.open(folder, name=learned.name))
        self._state.tell_learned(learned)
        for name in learned.retires:
            await self._learner.retire(name)
