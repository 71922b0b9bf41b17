"""Whether a child is new by what it means: its embedding beside those of earlier programs.

    comparison = await novelty.compare(child, attempt=7, find=find_similar)
    if comparison.failure is not None: ...      # it repeats a program: no evaluation

A program that is at least `similarity_threshold` like an earlier one is shown to a model, which
says whether the two differ in what they do. What goes wrong on the way (the embedding server, the
judge) is counted, and the child counts as new: an evolution does not end for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rookery.concurrency import run_in_thread
from rookery.errors import EngineError, FleetError, FleetSettingsError
from rookery.loops.evolve.program import ProgramStore, pack_vector, unpack_vector
from rookery.loops.evolve.proposer import Child, Endpoint, ModelFailed, seed_of
from rookery.loops.evolve.search_state import similarity_failure
from rookery.loops.evolve.stages import AttemptFailure, Evaluated
from rookery.ports import Embedder
from rookery.search.programs.bandit import Arm
from rookery.search.programs.novelty import Repetition
from rookery.seeding import stream
from rookery.types import TextReply

__all__ = ["UNCOMPARED", "Comparison", "Novelty", "NoveltyJudge", "read_verdict"]

MAX_ERROR_CHARS = 300

SYSTEM = """You compare two programs. Say whether the second one does something else than the first.

A different algorithm, data structure, order of steps, constant or parameter makes it different.
Other names, layout, comments or a rearrangement without effect do not.

Begin your answer with the word NOVEL if they differ, or NOT_NOVEL if they do not. Then give the
reason in one sentence."""

USER = """First program:
```{language}
{earlier}
```

Second program:
```{language}
{child}
```

Does the second program differ in what it does? Begin with NOVEL or NOT_NOVEL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of comparing a program."""

    embedding: str = ""
    """As `pack_vector` writes it; empty when there is none."""
    error: str = ""
    """Why it could not be compared as asked; empty when it could."""
    failure: AttemptFailure | None = None
    """That it repeats an earlier program."""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    """Of the judge; None when it does not report them."""

    def note_on(self, child: Child) -> Child:
        """The child with its embedding, which its document keeps."""
        if not self.embedding:
            return child
        program = replace(child.program, embedding=unpack_vector(self.embedding))
        return replace(child, program=program)

    def note_in(self, evaluated: Evaluated) -> Evaluated:
        """What was measured of the program, with this."""
        return replace(
            evaluated,
            embedding=self.embedding,
            embedding_error=self.error,
            prompt_tokens=_sum(evaluated.prompt_tokens, self.prompt_tokens),
            completion_tokens=_sum(evaluated.completion_tokens, self.completion_tokens),
        )


UNCOMPARED = Comparison()
"""Of a run without an embedding model."""


class NoveltyJudge:
    """The models that say whether two programs differ: one of them is asked by its weight."""

    def __init__(
        self, arms: tuple[Arm, ...], *, endpoints: Mapping[str, Endpoint], seed: int
    ) -> None:
        self._arms = arms
        self._endpoints = endpoints
        self._seed = seed

    async def ask(self, child: Child, *, earlier: str, attempt: int) -> TextReply:
        """Raises ModelFailed."""
        total = sum(arm.weight for arm in self._arms)
        shares = [arm.weight / total for arm in self._arms]
        drawn = stream(self._seed, "novelty", attempt).choice(len(self._arms), p=shares)
        endpoint = self._endpoints[self._arms[int(drawn)].name]
        program = child.program
        user = USER.format(language=program.language, earlier=earlier, child=program.code)
        seed = seed_of(self._seed, "novelty", attempt)
        return await endpoint.reply(endpoint.request(system=SYSTEM, user=user, seed=seed))


class Novelty:
    """Embeds programs and compares them."""

    def __init__(
        self, embedder: Embedder, *, store: ProgramStore, judge: NoveltyJudge | None
    ) -> None:
        """Without a judge a program that is similar to another repeats it."""
        self._embedder = embedder
        self._store = store
        self._judge = judge

    async def embed(self, code: str) -> Comparison:
        """The embedding of a program, or why there is none."""
        try:
            vector = await self._embedder.embed(code)
            return Comparison(embedding=await run_in_thread(pack_vector, vector))
        except FleetSettingsError:
            raise
        except (EngineError, FleetError, ValueError) as error:
            return Comparison(error=_shorten(f"No embedding: {error}"))

    async def compare(
        self, child: Child, *, attempt: int, find: Callable[[str], Repetition | None]
    ) -> Comparison:
        """`find` is asked for the program that is most like this one, if it is like enough."""
        embedded = await self.embed(child.program.code)
        similar = find(embedded.embedding) if embedded.embedding else None
        if similar is None:
            return embedded
        if self._judge is None:
            return replace(embedded, failure=similarity_failure(similar))
        earlier = await run_in_thread(self._store.get, similar.of)
        try:
            reply = await self._judge.ask(child, earlier=earlier.code, attempt=attempt)
        except ModelFailed as error:
            return replace(embedded, error=_shorten(f"No judge of novelty: {error}"))
        return _judged(embedded, similar, reply)


def read_verdict(text: str) -> bool | None:
    """Whether an answer says NOVEL; None when it says neither. The first of the two counts."""
    words = text.upper().replace("NOT NOVEL", "NOT_NOVEL")
    first = words.find("NOVEL")
    return None if first < 0 else not words[:first].endswith("NOT_")


def _judged(embedded: Comparison, similar: Repetition, reply: TextReply) -> Comparison:
    is_new, usage = read_verdict(reply.text), reply.usage
    judged = replace(
        embedded,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
    )
    if is_new is None:
        answer = " ".join(reply.text.split())
        return replace(judged, error=_shorten(f"The judge of novelty answered {answer!r}"))
    return judged if is_new else replace(judged, failure=similarity_failure(similar))


def _shorten(sentence: str) -> str:
    return sentence[:MAX_ERROR_CHARS]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
