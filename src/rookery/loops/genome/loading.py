"""Candidates on their way into the engine: made in a thread, loaded, unloaded at the end.

    loader = CandidateLoader(engine, run=run)
    async with loader.load({"g001-c03": make}, phase="search") as arrivals:
        ref = await arrivals["g001-c03"]         # a ModelRef, or a LoadFailure

A candidate that cannot be made or loaded is recorded in the run, so that a resumed run finds it
failed as this one did.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from rookery.errors import (
    AdapterError,
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    RookeryError,
    RunError,
    boundary,
)
from rookery.ports import Adapters
from rookery.runs import Run
from rookery.types import Adapter, ModelRef

__all__ = [
    "Arrivals",
    "CandidateLoader",
    "LoadFailure",
    "check_repeated",
]

# A resumed run repeats its search; what does not come out as before is refused by name.
#
# check_repeated(run, "candidate", "g001-c03", {"version": adapter.version})


def check_repeated(run: Run, kind: str, key: str, values: Mapping[str, object]) -> None:
    """RunError unless these values are those that the run recorded, if it recorded any."""
    first = run.get(kind, key)
    if first is None:
        return
    for name, now in values.items():
        before = first.payload.get(name)
        if before != now:
            raise RunError(
                f"The run cannot be resumed here: {name} of {kind} {key} was {_show(before)} when "
                f"the run was made, and comes out as {_show(now)}. {_reason(first.payload)}"
            )


def _reason(payload: Mapping[str, object]) -> str:
    if payload.get("operator") == "founder":
        return "It is a founder: restore its files."
    return (
        "Children are computed again, and their last bits depend on the CPU, the version of torch "
        "and the number of threads: resume the run where it was made, or start a new one."
    )


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a candidate is not in the engine, and its version if it could be made."""

    error: str
    version: str | None


Arrivals = Mapping[str, asyncio.Task[ModelRef | LoadFailure]]
"""Each candidate by name: done when the engine has it, or never will."""


class CandidateLoader:
    """Brings candidates into one engine, and knows which could not be."""

    def __init__(self, adapters: Adapters, *, run: Run) -> None:
        self._adapters = adapters
        self._run = run
        self._making = asyncio.Lock()  # one at a time: making one takes every core there is

    @asynccontextmanager
    async def load(
        self, makers: Mapping[str, Callable[[], Adapter]], *, phase: str
    ) -> AsyncIterator[Arrivals]:
        """Make and load in the order given, while the block goes on.

        `phase` (search, select, report) tells apart what one candidate met at different times.
        """

        async def bring(name: str, make: Callable[[], Adapter]) -> ModelRef | LoadFailure:
            key = f"{phase}/{name}"
            known = self._run.get("failure", key)
            if known is not None:
                return LoadFailure(known.payload["error"], known.payload["version"])
            version = None
            try:
                async with self._making:
                    adapter = await asyncio.to_thread(_make, name, make)
                version = adapter.version
                if phase == "search":  # before anything is asked of it
                    check_repeated(self._run, "candidate", name, {"version": version})
                return await self._adapters.load(adapter)
            except (EngineDownError, FleetDownError):
                raise
            except (AdapterError, EngineError, FleetError) as error:
                failure = LoadFailure(str(error), version)
                payload = {"candidate": name, **asdict(failure)}
                await self._run.append("failure", payload, key=key)
                return failure

        arrivals = {name: asyncio.create_task(bring(name, make)) for name, make in makers.items()}
        try:
            yield arrivals
        finally:
            for arrival in arrivals.values():
                arrival.cancel()
            ended = await asyncio.gather(*arrivals.values(), return_exceptions=True)
            await self._unload([ref for ref in ended if isinstance(ref, ModelRef)])

    async def _unload(self, refs: list[ModelRef]) -> None:
        """Every one of them. A failure to unload is logged and not raised."""
        unloads = (self._adapters.unload(ref) for ref in refs)
        for result in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(result, RookeryError):
                logger.warning("An adapter could not be unloaded: %s", result)
            elif isinstance(result, BaseException):
                raise result


def _make(name: str, make: Callable[[], Adapter]) -> Adapter:
    """Whatever stops a candidate from being made is a failure of this candidate."""
    with boundary(AdapterError, f"Making {name}"):
        return make()
