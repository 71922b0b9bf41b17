"""The replica that requests of one affinity go to while it is not busier than the others.

    homes = AffinityHomes()
    homes.find(affinity, now_s)                  # None: it has none yet
    homes.settle(affinity, replica, now_s)

A home is a preference for the sake of the prefix cache, never a condition: it is left where other
replicas would be idle, and forgotten when its replica is lost or nobody has asked for a while.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

from rookery.fleet.routing.load import ReplicaLoad

__all__ = ["AffinityHomes"]

MAX_HOMES = 4096
"""Affinities remembered at most; those used least recently are forgotten first."""
HOME_S = 60.0
"""An affinity that nobody used for this long is over, or its prefixes have been evicted."""


class AffinityHomes:
    """Affinity -> replica, least recently used first."""

    def __init__(self) -> None:
        self._homes: OrderedDict[Hashable, tuple[ReplicaLoad, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, affinity: Hashable, now_s: float) -> ReplicaLoad | None:
        """Its home, used now; None when it has none, or its replica is shut."""
        home = self._homes.get(affinity)
        if home is None:
            return None
        if not home[0].is_open:
            del self._homes[affinity]
            return None
        self.settle(affinity, home[0], now_s)
        return home[0]

    def settle(self, affinity: Hashable, replica: ReplicaLoad, now_s: float) -> None:
        self._homes[affinity] = (replica, now_s)
        self._homes.move_to_end(affinity)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def forget_unused(self, now_s: float) -> None:
        while self._homes:
            affinity, (_, used_s) = next(iter(self._homes.items()))
            if now_s - used_s <= HOME_S:
                return
            del self._homes[affinity]

    def with_fewest(self, replicas: Iterable[ReplicaLoad]) -> list[ReplicaLoad]:
        """Those of the replicas that are home to the fewest affinities."""
        counts = Counter(replica.name for replica, _ in self._homes.values())
        found = list(replicas)
        least = min((counts[replica.name] for replica in found), default=0)
        return [replica for replica in found if counts[replica.name] == least]
