"""Accepted works that are not done, counted per tenant."""

from collections import Counter
from collections.abc import Iterator

from rookery.service.work import Command

__all__ = ["Pending"]


class Pending:
    """By id, in order of their acceptance."""

    def __init__(self) -> None:
        self._works: dict[str, Command] = {}
        self._seqs: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.num_bytes = 0
        """Of all their bodies."""

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Command]:
        return iter(list(self._works.values()))

    def __contains__(self, work_id: str) -> bool:
        return work_id in self._works

    def __getitem__(self, work_id: str) -> Command:
        return self._works[work_id]

    def get(self, work_id: str) -> Command | None:
        return self._works.get(work_id)

    def count(self, tenant: str) -> int:
        return self._counts[tenant]

    def num_bytes_of(self, tenant: str) -> int:
        """Of a tenant's bodies."""
        return self._bytes[tenant]

    @property
    def num_tenants(self) -> int:
        """Who wait."""
        return len(self._counts)

    def add(self, work: Command) -> None:
        self._works[work.id] = work
        self._counts[work.tenant] += 1
        self._bytes[work.tenant] += len(work.body)
        self.num_bytes += len(work.body)

    def set_durable(self, work_id: str, seq: int) -> None:
        """Note the journal's number of a work, which stays in the journal while it is pending."""
        if work_id in self._works:
            self._seqs[work_id] = seq

    def seq(self, work_id: str) -> int | None:
        """Its number in the journal; None when it is done, or not durable."""
        return self._seqs.get(work_id)

    def remove(self, work_id: str) -> bool:
        """It is done; False when it was before."""
        work = self._works.pop(work_id, None)
        self._seqs.pop(work_id, None)
        if work is None:
            return False
        self._counts[work.tenant] -= 1
        self._bytes[work.tenant] -= len(work.body)
        if not self._counts[work.tenant]:
            del self._counts[work.tenant], self._bytes[work.tenant]
        self.num_bytes -= len(work.body)
        return True
