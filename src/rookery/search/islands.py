"""Islands: groups of candidates that search apart and send their best around a ring.

    islands = settle(ids, config=IslandsConfig(num_islands=4))
    for move in migrations(islands, scores, config=config, generation=generation): ...
    islands = migrate(islands, scores, config=config, generation=generation)

They hold ids, not candidates: adapters and programs alike. A migrant stays at home as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.search.selection import elites

__all__ = ["Islands", "IslandsConfig", "Migration", "is_due", "migrate", "migrations", "settle"]


class IslandsConfig(Config):
    """Groups that search apart."""

    num_islands: int = Field(default=1, ge=1)
    """How many groups; 1 is no islands."""
    interval: int = Field(default=5, ge=1)
    """Generations between migrations."""
    num_migrants: int = Field(default=1, ge=1)
    """How many of an island's best go to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """The ids on each island: `Islands(members=(("a", "c"), ("b", "d")))`."""

    members: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Who goes from where to where, best first."""

    source: int
    target: int
    ids: tuple[str, ...]


def settle(ids: Sequence[str], *, config: IslandsConfig) -> Islands:
    """Deal the ids out in turn: island k gets ids k, k + K, k + 2 K, ..."""
    if len(ids) < config.num_islands:
        raise ConfigError(
            f"Got {len(ids)} candidates for {config.num_islands} islands: each needs one. "
            "Lower num_islands or start with more candidates."
        )
    return Islands(
        members=tuple(tuple(ids[k :: config.num_islands]) for k in range(config.num_islands))
    )


def is_due(generation: int, *, config: IslandsConfig) -> bool:
    """Whether migration follows this generation: with interval 5 after 5, 10, 15, ..."""
    return config.num_islands > 1 and generation > 0 and generation % config.interval == 0


def migrations(
    islands: Islands,
    scores: Mapping[str, float | None],
    *,
    config: IslandsConfig,
    generation: int,
) -> tuple[Migration, ...]:
    """The moves along the ring k -> k + 1, all judged before the first one is made.

    A failed candidate never migrates; nor does one that lives on the target already, whose place
    goes to the next best. () when no migration is due.
    """
    if not is_due(generation, config=config):
        return ()
    moves = []
    for source, home in enumerate(islands.members):
        target = (source + 1) % len(islands.members)
        there = set(islands.members[target])
        eligible = [id for id in home if id not in there and scores[id] is not None]
        best = elites([scores[id] for id in eligible], count=config.num_migrants)
        if best:
            moves.append(
                Migration(source=source, target=target, ids=tuple(eligible[i] for i in best))
            )
    return tuple(moves)


def migrate(
    islands: Islands,
    scores: Mapping[str, float | None],
    *,
    config: IslandsConfig,
    generation: int,
) -> Islands:
    """The islands after migration, each as large as before: migrants push out the worst.

    An island's best stays whoever arrives.
    """
    members = list(islands.members)
    for move in migrations(islands, scores, config=config, generation=generation):
        home = islands.members[move.target]
        room = max(1, len(home) - len(move.ids))
        kept = set(_best(home, scores, count=room))
        stay = tuple(id for id in home if id in kept)
        members[move.target] = stay + move.ids[: max(0, len(home) - len(stay))]
    return Islands(members=tuple(members))


def _best(ids: Sequence[str], scores: Mapping[str, float | None], *, count: int) -> tuple[str, ...]:
    """The best `count` ids, failed ones last."""
    values = [scores[id] for id in ids]
    alive = elites(values, count=count) if any(value is not None for value in values) else ()
    failed = [index for index, value in enumerate(values) if value is None]
    return tuple(ids[index] for index in (*alive, *failed)[:count])
