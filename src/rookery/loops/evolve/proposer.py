"""From a plan to a child program: the prompt, the model's answer, what is read from it.

    generated, child = await proposer.generate(7, plan)       # asks the model
    child = await proposer.read(7, plan, generated)           # an answer that was paid before

Prompts are built and answers read in threads: both may be long.

Whether a child is new by what it means: its embedding beside those of earlier programs.

    comparison = await novelty.compare(child, attempt=7, find=find_similar)
    if comparison.failure is not None: ...      # it repeats a program: no evaluation

A program that is at least `similarity_threshold` like an earlier one is shown to a model, which
says whether the two differ in what they do. What goes wrong on the way (the embedding server, the
judge) is counted, and the child counts as new: an evolution does not end for it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from rookery.concurrency import run_in_thread
from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    FleetSettingsError,
)
from rookery.loops.evolve.answers import AnswerFailure, AnswerRules, ChildProgram, read_answer
from rookery.loops.evolve.config import ModelConfig
from rookery.loops.evolve.program import ProgramRecord, ProgramStore, pack_vector, unpack_vector
from rookery.loops.evolve.prompts import Asked, Prompt, ShownPrograms
from rookery.loops.evolve.search_state import program_id, similarity_failure
from rookery.loops.evolve.stages import AttemptFailure, Evaluated, Generated
from rookery.loops.evolve.tuning import TUNE
from rookery.ports import Embedder, TextModel
from rookery.runtime.retry import Backoff
from rookery.search.programs.bandit import Arm
from rookery.search.programs.novelty import Repetition, code_hash
from rookery.search.programs.population import Plan
from rookery.search.programs.program import CodeSummary, summarize
from rookery.seeding import stream, stream_seed
from rookery.types import Message, TextReply, TextRequest

__all__ = [
    "UNCOMPARED",
    "Child",
    "Comparison",
    "Endpoint",
    "ModelFailed",
    "Novelty",
    "NoveltyJudge",
    "Proposer",
    "make_child",
    "read_verdict",
    "seed_of",
]


# One model of the ensemble as the loop asks it: waits while it is down, retries what failed.
#
#     endpoint = Endpoint(model, ModelConfig(name="small"), down_s=3600, on_waiting=print)
#     reply = await endpoint.reply(request)
#
# | what the model raises              | then                                                     |
# |------------------------------------|----------------------------------------------------------|
# | it refuses everybody               | the error ends the run: waiting does not help            |
# | (FleetSettingsError)               |                                                          |
# | it serves nobody (`...DownError`)  | one caller tries again, all others wait for it; no limit |
# |                                    | but `down_s`, after which the error ends the run         |
# | any other error of the request     | asked again, `retries` times; then ModelFailed           |


WHILE_DOWN = Backoff(first_s=1.0, longest_s=60.0)
"""Between two tries of a model that is down; doubles from the first to the longest."""
DEFAULT_MAX_TOKENS = 4096


class ModelFailed(Exception):
    """A request that the model did not answer, however often it was asked."""


class Endpoint:
    """Used by many callers at a time."""

    def __init__(
        self,
        model: TextModel,
        config: ModelConfig,
        *,
        down_s: float,
        on_waiting: Callable[[str], None],
    ) -> None:
        self._model = model
        self._config = config
        self._down_s = down_s
        self._on_waiting = on_waiting
        # Cleared by the caller that finds the model down, set again when that caller got a reply
        # or ended; all others wait for it.
        self._is_up = asyncio.Event()
        self._is_up.set()

    @property
    def is_down(self) -> bool:
        return not self._is_up.is_set()

    def request(self, *, system: str, user: str, seed: int) -> TextRequest:
        """A request with what the config says of this model."""
        messages = (Message(role="system", content=system), Message(role="user", content=user))
        return TextRequest(
            messages=messages,
            max_tokens=self._config.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=seed,
        )

    async def reply(self, request: TextRequest) -> TextReply:
        """One reply. Raises ModelFailed, or what the model raised when it was down too long."""
        num_tries = 0
        while True:
            await self._is_up.wait()
            try:
                return await self._model.reply(request)
            except FleetSettingsError:
                raise
            except (EngineDownError, FleetDownError) as error:
                if self._is_up.is_set():
                    reply = await self._wait_until_up(request, error)
                    if reply is not None:
                        return reply
            except (EngineError, FleetError) as error:
                num_tries += 1
                if num_tries > (self._config.retries or 0):
                    raise ModelFailed(str(error)) from error
                await asyncio.sleep(self._config.retry_delay or 0)

    async def _wait_until_up(
        self, request: TextRequest, error: EngineError | FleetError
    ) -> TextReply | None:
        """Ask again until the model serves. None: it does, but not this request."""
        self._is_up.clear()
        name = self._config.name or "The model"
        started, num_tries = time.monotonic(), 0
        try:
            while True:
                num_tries += 1
                wait_s = WHILE_DOWN.pause_s(num_tries)
                if time.monotonic() - started > self._down_s:
                    _give_up(error, self._down_s)
                self._on_waiting(f"{name} is down, asked again in {wait_s:g} s: {error}")
                await asyncio.sleep(wait_s)
                try:
                    return await self._model.reply(request)
                except FleetSettingsError:
                    raise
                except (EngineDownError, FleetDownError) as again:
                    error = again
                except (EngineError, FleetError):
                    return None
        finally:
            self._is_up.set()


def _give_up(error: EngineError | FleetError, down_s: float) -> NoReturn:
    raise type(error)(
        f"The model was down for {down_s:g} s (rookery.model_down_s), the run can be resumed: "
        f"{error}"
    ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A program that is to be evaluated: its record has no metrics yet."""

    program: ProgramRecord
    summary: CodeSummary
    code_hash: str


def _as_prompts(exchange: Mapping[str, str]) -> dict[str, object]:
    """As the documents of programs have them."""
    prompt = {
        "system": exchange["system"],
        "user": exchange["user"],
        "responses": [exchange["answer"]],
    }
    return {exchange["template"]: prompt}


def make_child(program: ProgramRecord) -> Child:
    """Takes milliseconds for a long program: call it in a thread."""
    return Child(
        program=program,
        summary=summarize(program.code),
        code_hash=code_hash(program.code, language=program.language),
    )


def seed_of(seed: int, *keys: int | str) -> int:
    """The seed of a request: APIs take no more than 31 bits."""
    return stream_seed(seed, *keys) & 0x7FFF_FFFF


class PromptBuilder(Protocol):
    """Asks for a child: `Prompts`, or for prompts a `Reflection`."""

    @property
    def num_top_programs(self) -> int: ...

    def build(
        self, parent: ProgramRecord, *, shown: ShownPrograms, attempt: int, asked: Asked
    ) -> Prompt: ...


NO_PROMPTS: Mapping[str, object] = {}


class Proposer:
    """Asks the arm that a plan names."""

    def __init__(
        self,
        *,
        store: ProgramStore,
        prompts: "PromptBuilder",
        rules: AnswerRules,
        arms: Mapping[str, Endpoint],
        seed: int,
        with_prompts: bool,
    ) -> None:
        """`with_prompts`: programs keep the prompt and the answer that they came from."""
        self._store = store
        self._prompts = prompts
        self._rules = rules
        self._arms = dict(arms)
        self._seed = seed
        self._with_prompts = with_prompts

    @property
    def is_down(self) -> bool:
        """Whether a model is waited for that serves nobody."""
        return any(arm.is_down for arm in self._arms.values())

    def add_arm(self, name: str, arm: Endpoint) -> None:
        """Plans may name it from now on."""
        self._arms[name] = arm

    async def generate(self, plan: Plan) -> tuple[Generated, Child | None]:
        """Ask for a child. A model that does not answer, or answers without a child, is a failure
        in Generated; a model that is down for too long raises."""
        if plan.operator == TUNE:
            return Generated(model=TUNE), await run_in_thread(self._template, plan)
        prompt = await run_in_thread(self._build, plan)
        # A run that goes on may no longer have the model that an attempt was planned with.
        arm = self._arms.get(plan.arm) or next(iter(self._arms.values()))
        seed = seed_of(self._seed, "answer", plan.attempt)
        request = arm.request(system=prompt.system, user=prompt.user, seed=seed)
        try:
            reply = await arm.reply(request)
        except ModelFailed as error:
            failure = AttemptFailure(kind="model", message=str(error))
            return Generated(model=plan.arm, failure=failure), None
        return await run_in_thread(self._keep, plan, prompt, reply)

    async def read(self, plan: Plan, generated: Generated) -> Child | None:
        """The child of an answer of an earlier session."""
        if plan.operator == TUNE:
            return await run_in_thread(self._template, plan)
        return await run_in_thread(self._read_kept, plan, generated.answer)

    def _template(self, plan: Plan) -> Child:
        """The child of a tuning, still with the numbers of its parent."""
        return self._child(plan, ChildProgram(code=self._base(plan).code, changes="Tuned numbers"))

    def _build(self, plan: Plan) -> Prompt:
        top = [self._store.get(id) for id in plan.top]
        num_previous = self._prompts.num_top_programs
        shown = ShownPrograms(
            previous=top[:num_previous],
            top=top,
            inspirations=[self._store.get(id) for id in plan.inspirations],
        )
        asked = Asked(operator=plan.operator, failures=plan.failures)
        return self._prompts.build(self._base(plan), shown=shown, attempt=plan.attempt, asked=asked)

    def _base(self, plan: Plan) -> ProgramRecord:
        """The program that the model is to change."""
        return self._store.get(plan.mends or plan.parent)

    def _keep(self, plan: Plan, prompt: Prompt, reply: TextReply) -> tuple[Generated, Child | None]:
        exchange = {
            "system": prompt.system,
            "user": prompt.user,
            "template": prompt.template,
            "answer": reply.text,
        }
        digest = self._store.put_document(exchange)
        child = self._read(plan, exchange)
        usage = reply.usage
        generated = Generated(
            answer=digest,
            model=reply.model,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            failure=child if isinstance(child, AttemptFailure) else None,
        )
        return generated, child if isinstance(child, Child) else None

    def _read_kept(self, plan: Plan, digest: str) -> Child | None:
        child = self._read(plan, self._store.get_document(digest))
        return child if isinstance(child, Child) else None

    def _read(self, plan: Plan, exchange: Mapping[str, str]) -> Child | AttemptFailure:
        program = read_answer(exchange["answer"], parent=self._base(plan), rules=self._rules)
        if isinstance(program, AnswerFailure):
            return AttemptFailure(kind=program.kind.value, message=program.message)
        prompts = _as_prompts(exchange) if self._with_prompts else {}
        return self._child(plan, program, prompts)

    def _child(
        self, plan: Plan, program: ChildProgram, prompts: Mapping[str, object] = NO_PROMPTS
    ) -> Child:
        return make_child(
            ProgramRecord(
                id=program_id(plan.attempt),
                code=program.code,
                language=self._rules.language,
                parent_id=plan.parent,
                generation=plan.generation,
                iteration=plan.attempt,
                island=plan.island,
                changes=program.changes,
                changes_description=program.changes_description,
                parent_metrics=self._store.get(plan.parent).metrics,
                prompts=prompts,
            )
        )


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
