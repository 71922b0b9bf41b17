"""OpenEvolve 0.4's own database on the landscapes of `evolve_search.py`; run by its Python.

python benchmarks/evolve_search_openevolve.py JOBS.json > scores.json

A job is [landscape, proposer, number of attempts, in flight, seed]. This module
replaces its workers: it takes islands in turn, shows top programs and inspirations, migrates after
a child, and keeps failed programs with score 0.
"""

import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

from evolve_landscapes import LANDSCAPES, PROPOSERS, Program, Request, simulate

__all__: list[str] = []

NUM_TOP, NUM_DIVERSE = 3, 2


class OpenEvolveSearch:
    """A Search over `openevolve.database.ProgramDatabase` with its defaults."""

    def __init__(self, *, seed: int) -> None:
        from openevolve.config import DatabaseConfig
        from openevolve.database import ProgramDatabase

        random.seed(seed)
        self._database = ProgramDatabase(DatabaseConfig(random_seed=seed, log_prompts=False))
        self._num_islands = self._database.config.num_islands
        self._parents: dict[int, Any] = {}
        self._ids: dict[str, int] = {}
        """Our id by code, because migration copies programs under new ids."""

    def ask(self, attempt: int) -> Request:
        island = (attempt - 1) % self._num_islands
        parent, inspirations = self._database.sample_from_island(
            island_id=island, num_inspirations=NUM_DIVERSE
        )
        self._parents[attempt] = parent
        programs = self._database.programs
        members = [programs[id] for id in self._database.islands[island] if id in programs]
        members.sort(key=lambda one: one.metrics.get("combined_score", 0.0), reverse=True)
        shown = [*members[: NUM_TOP + NUM_DIVERSE], *inspirations]
        return Request(base=self._ids[parent.code], shown=[self._ids[one.code] for one in shown])

    def tell(self, program: Program, *, is_repeated: bool) -> None:
        from openevolve.database import Program as Kept

        parent = self._parents.pop(program.id, None)
        if is_repeated:
            return
        self._ids.setdefault(program.code, program.id)
        metrics = {"combined_score": program.score} if program.score is not None else {"error": 0.0}
        island = (program.id - 1) % self._num_islands if parent is not None else 0
        kept = Kept(
            id=str(program.id),
            code=program.code,
            parent_id=parent.id if parent is not None else None,
            generation=parent.generation + 1 if parent is not None else 0,
            metrics=metrics,
        )
        self._database.add(kept, iteration=program.id, target_island=island)
        if parent is not None:
            self._database.increment_island_generation(island_idx=island)
            if self._database.should_migrate():
                self._database.migrate_programs()


def main() -> None:
    logging.disable(logging.CRITICAL)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    scores = [
        simulate(
            OpenEvolveSearch(seed=seed),
            LANDSCAPES[landscape],
            PROPOSERS[proposer],
            num_attempts=num_attempts,
            in_flight=in_flight,
            seed=seed,
        )
        for landscape, proposer, num_attempts, in_flight, seed in jobs
    ]
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
