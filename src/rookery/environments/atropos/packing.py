"""Which groups make the next batch: exactly so many sequences, of whole groups.

As `run-api` deals them: groups of one size are put into packs of as many sequences as the largest
group has, whole packs fill the batch in the order in which they came, and an environment with a
`min_batch_allocation` gets at least that part of it. Groups of a size that makes no such pack,
which `run-api` never deals, are packs by themselves, unless no batch can be made with them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

__all__ = ["complete_groups", "pick_batch"]

Sized = tuple[int | None, int]
"""A group: its environment, and how many sequences it has."""


def pick_batch(
    queue: Sequence[Sized], *, num_sequences: int, minimums: Mapping[int, float] | None = None
) -> list[int]:
    """The places of the groups that make a batch, empty when there is none yet.

    Groups of sizes 4 2 2 4 and batches of 8: places 0, 1, 2 (a pack of two groups of 2).
    """
    if sum(size for _, size in queue) < num_sequences:
        return []
    for has_others in (True, False):
        packed = _packed(queue, by_environment=bool(minimums), has_others=has_others)
        if places := _picked(queue, packed, num_sequences=num_sequences, minimums=minimums):
            return places
    return []


def _picked(
    queue: Sequence[Sized],
    packed: Sequence[int],
    *,
    num_sequences: int,
    minimums: Mapping[int, float] | None,
) -> list[int]:
    if not minimums:
        return _fill([], packed, queue, num_sequences)
    needed = _needed(minimums, num_sequences=num_sequences, queue=queue, packed=packed)
    if needed is None:
        return []
    places: defaultdict[int | None, list[int]] = defaultdict(list)
    for place in packed:
        places[queue[place][0]].append(place)
    first: list[int] = []
    total = 0
    for environment, least in needed.items():
        taken = 0
        for place in places[environment]:
            size = queue[place][1]
            if taken < least and total + size <= num_sequences:
                first.append(place)
                taken += size
                total += size
    return _fill(first, sorted(packed), queue, num_sequences)


def _fill(
    first: Sequence[int], packed: Sequence[int], queue: Sequence[Sized], num_sequences: int
) -> list[int]:
    """More groups up to the whole batch; empty when it cannot be made exactly."""
    begun = sum(queue[place][1] for place in first)
    taken = set(first)
    others = [place for place in packed if place not in taken]
    chosen, total = list(first), begun
    for place in others:
        if total == num_sequences:
            break
        size = queue[place][1]
        if total + size <= num_sequences:
            chosen.append(place)
            total += size
    if total == num_sequences:
        return chosen
    # Sizes that do not divide a batch: others of them may.
    left = num_sequences - begun
    found = complete_groups([queue[place][1] for place in others], left)
    return [*first, *(others[place] for place in found)] if found else []


def _packed(queue: Sequence[Sized], *, by_environment: bool, has_others: bool) -> list[int]:
    """The places of the groups that are in whole packs, pack by pack; with those of a size that
    makes none, or without."""
    largest = max((size for _, size in queue), default=0)
    open_packs: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    packed: list[int] = []
    for place, (environment, size) in enumerate(queue):
        if largest % size and not has_others:
            continue
        pack = open_packs[environment if by_environment else None, size]
        pack.append(place)
        if len(pack) * size == largest or largest % size:
            packed += pack
            pack.clear()
    return packed


def _needed(
    minimums: Mapping[int, float],
    *,
    num_sequences: int,
    queue: Sequence[Sized],
    packed: Sequence[int],
) -> dict[int, int] | None:
    """Sequences that each environment must have; None when one of them has no pack."""
    needed = {env: int(num_sequences * part) for env, part in minimums.items()}
    needed = {env: least for env, least in needed.items() if least > 0}
    available = {queue[place][0] for place in packed}
    if not needed.keys() <= available:
        return None
    total = sum(needed.values())
    if total <= num_sequences:
        return needed
    smallest = {
        env: min(queue[place][1] for place in packed if queue[place][0] == env) for env in needed
    }
    return {
        env: max(smallest[env], int(least * num_sequences / total)) for env, least in needed.items()
    }


def complete_groups(sizes: Sequence[int], target: int) -> list[int]:
    """The places of groups that have `target` sequences together, the oldest first; empty when no
    choice of them does. Sizes 3 2 1 and 4: places 0 and 2."""
    oldest: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if total + size <= target:
            oldest.append(place)
            total += size
    if total == target:
        return oldest
    if sum(sizes) < target:
        return []
    # Bit t of a number: the groups before a place, or some of them, have t sequences.
    reached, within = [1], (2 << target) - 1
    for size in sizes:
        reached.append((reached[-1] | reached[-1] << size) & within)
        if reached[-1] >> target:
            break
    else:
        return []
    chosen: list[int] = []
    for place in reversed(range(len(reached) - 1)):
        if not reached[place] >> target & 1:
            chosen.append(place)
            target -= sizes[place]
    return chosen[::-1]
