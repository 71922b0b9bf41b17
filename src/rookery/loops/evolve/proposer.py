"""From a plan to a child program: the prompt, the model's answer, the child, its novelty.

    generated, child = await proposer.generate(plan)       # asks the model
    child = await proposer.read(plan, generated)           # an answer that was paid before
    comparison = await novelty.compare(child, attempt=7, find=find_similar)
    if comparison.failure is not None: ...      # it repeats a program: no evaluation

Prompts and answers may be long, so threads build and read them.

`Novelty` compares a child's embedding with those of earlier programs. If one is at least
`similarity_threshold`, a model judges whether the two differ in what they do. If the embedding
server or the judge fails, the failure is counted and the child counts as new, so that it does not
end an evolution.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    FleetSettingsError,
)
from rookery.loops.evolve.answers import AnswerFailure, AnswerRules, ChildProgram, read_answer
from rookery.loops.evolve.config import ModelConfig
from rookery.loops.evolve.program import (
    SOURCE,
    ProgramRecord,
    ProgramStore,
    pack_vector,
    unpack_vector,
)
from rookery.loops.evolve.prompts import Asked, Prompt, ShownPrograms
from rookery.loops.evolve.search_state import program_id, similarity_failure
from rookery.loops.evolve.stages import AttemptFailure, Evaluated, Generated
from rookery.loops.evolve.tuning import TUNE
from rookery.ports import Embedder, TextModel
from rookery.runtime.concurrency import run_in_thread
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


WHILE_DOWN = Backoff(first_s=1.0, longest_s=60.0)
"""Pause between two tries of a model that is down; doubles up to the longest."""
DEFAULT_MAX_TOKENS = 4096


class ModelFailed(Exception):
    """A model did not answer a request within its retries."""


class Endpoint:
    """One model of the ensemble: waits while it is down and retries failed requests. Concurrent.

        endpoint = Endpoint(model, ModelConfig(name="small"), down_s=3600, on_waiting=print)
        reply = await endpoint.reply(request)

    | error of the model                 | reaction                                                |
    |------------------------------------|---------------------------------------------------------|
    | it refuses all requests            | the error ends the run: waiting does not help           |
    | (FleetSettingsError)               |                                                         |
    | it is down (`...DownError`)        | one caller retries, all others wait; after `down_s`     |
    |                                    | the error ends the run                                  |
    | any other error of the request     | `retries` retries, then ModelFailed                     |
    """

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
        # Cleared by the caller that finds the model down, until it gets a reply or ends.
        self._is_up = asyncio.Event()
        self._is_up.set()

    @property
    def is_down(self) -> bool:
        return not self._is_up.is_set()

    def request(self, *, system: str, user: str, seed: int) -> TextRequest:
        """Build a request with the model's settings."""
        messages = (Message(role="system", content=system), Message(role="user", content=user))
        return TextRequest(
            messages=messages,
            max_tokens=self._config.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=seed,
        )

    async def reply(self, request: TextRequest) -> TextReply:
        """Return one reply. Raises ModelFailed, or the model's error if it was down too long."""
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
        """Retry until the model is up. None: it is up, but failed this request."""
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
    """A program to evaluate. Its record has no metrics yet."""

    program: ProgramRecord
    summary: CodeSummary
    code_hash: str


def _as_prompts(exchange: Mapping[str, str]) -> dict[str, object]:
    """Convert to the form of a program's document."""
    prompt = {
        "system": exchange["system"],
        "user": exchange["user"],
        "responses": [exchange["answer"]],
    }
    return {exchange["template"]: prompt}


def make_child(program: ProgramRecord) -> Child:
    """Build a child. Takes milliseconds for a long program: call it in a thread."""
    return Child(
        program=program,
        summary=summarize(program.code),
        code_hash=code_hash(program.code, language=program.language),
    )


def seed_of(seed: int, *keys: int | str) -> int:
    """Return the seed of a request. APIs take at most 31 bits."""
    return stream_seed(seed, *keys) & 0x7FFF_FFFF


class PromptBuilder(Protocol):
    """Builds requests for a child: `Prompts`, or a `Reflection` for prompts."""

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
        """`with_prompts` keeps prompt and answer in a program's record."""
        self._store = store
        self._prompts = prompts
        self._rules = rules
        self._arms = dict(arms)
        self._seed = seed
        self._with_prompts = with_prompts

    @property
    def is_down(self) -> bool:
        """True while requests wait for a model that is down."""
        return any(arm.is_down for arm in self._arms.values())

    def add_arm(self, name: str, arm: Endpoint) -> None:
        """Make an arm available to plans."""
        self._arms[name] = arm

    async def generate(self, plan: Plan) -> tuple[Generated, Child | None]:
        """Ask for a child. If the model does not answer or its answer gives no child, Generated has
        a failure. If the model is down too long, its error is raised."""
        if plan.operator == TUNE:
            return Generated(model=TUNE), await run_in_thread(self._template, plan)
        prompt = await run_in_thread(self._build, plan)
        # A resumed run may lack the planned model.
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
        """Read the child from a recorded answer."""
        if plan.operator == TUNE:
            return await run_in_thread(self._template, plan)
        return await run_in_thread(self._read_kept, plan, generated.answer)

    def _template(self, plan: Plan) -> Child:
        """Return the child of a tuning, still with its parent's numbers."""
        parent = self._store.get(plan.parent)
        child = self._child(plan, ChildProgram(code=parent.code, changes="Tuned numbers"))
        source = {SOURCE: parent.source} if parent.source != parent.code else {}
        return replace(child, program=replace(child.program, metadata=source))

    def _build(self, plan: Plan) -> Prompt:
        top = [self._shown(id) for id in plan.top]
        num_previous = self._prompts.num_top_programs
        shown = ShownPrograms(
            previous=top[:num_previous],
            top=top,
            inspirations=[self._shown(id) for id in plan.inspirations],
        )
        asked = Asked(operator=plan.operator, failures=plan.failures)
        return self._prompts.build(self._base(plan), shown=shown, attempt=plan.attempt, asked=asked)

    def _base(self, plan: Plan) -> ProgramRecord:
        """Return the program that the model is asked to change."""
        return self._shown(plan.mends or plan.parent)

    def _shown(self, id: str) -> ProgramRecord:
        """Return a program without the tables of its tuning: a model edits what computes them."""
        program = self._store.get(id)
        return replace(program, code=program.source)

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
    """The result of comparing a program with earlier ones."""

    embedding: str = ""
    """Embedding as `pack_vector` writes it; empty without one."""
    error: str = ""
    """Reason why the comparison failed; empty if it did not."""
    failure: AttemptFailure | None = None
    """Set if the program repeats an earlier one."""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    """Tokens of the judge; None if it does not report them."""

    def note_on(self, child: Child) -> Child:
        """Add the embedding to the child's record."""
        if not self.embedding:
            return child
        program = replace(child.program, embedding=unpack_vector(self.embedding))
        return replace(child, program=program)

    def note_in(self, evaluated: Evaluated) -> Evaluated:
        """Add embedding, error and tokens to the evaluation."""
        return replace(
            evaluated,
            embedding=self.embedding,
            embedding_error=self.error,
            prompt_tokens=_sum(evaluated.prompt_tokens, self.prompt_tokens),
            completion_tokens=_sum(evaluated.completion_tokens, self.completion_tokens),
        )


UNCOMPARED = Comparison()
"""The comparison of a run without an embedding model."""


class NoveltyJudge:
    """Models that judge whether two programs differ. Each request goes to one, drawn by weight."""

    def __init__(
        self, arms: tuple[Arm, ...], *, endpoints: Mapping[str, Endpoint], seed: int
    ) -> None:
        self._arms = arms
        self._endpoints = endpoints
        self._seed = seed

    async def ask(self, child: Child, *, earlier: str, attempt: int) -> TextReply:
        """Ask for a verdict. Raises ModelFailed."""
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
        """Without a judge, any program similar to another is rejected."""
        self._embedder = embedder
        self._store = store
        self._judge = judge

    async def embed(self, code: str) -> Comparison:
        """Embed a program. A failure is returned as `error`."""
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
        """Compare a child. `find` returns the most similar program above the threshold."""
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
    """Return True for NOVEL, False for NOT_NOVEL, None for neither. The first word counts."""
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
