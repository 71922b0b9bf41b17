"""icm on a real model: the search beside zero-shot, bootstrap and golden few-shot, and engine use.

    python benchmarks/icm_real.py DATA --url http://127.0.0.1:8001 --model FOLDER
    python benchmarks/icm_real.py DATA --model FOLDER --items 128       # the embedded engine

DATA holds `truthfulqa_256/truthfulqa_train.json` (question, choice, label) and
`gsm8k/example_model_solutions.jsonl`. Claims have no constraint; of the solutions of a problem,
equal final answers are right or wrong together. Each row has a share of true labels with its 95 %
interval, first for all ways without a search, then for the search and its baselines with the
utility U. The verdict and the engine's use follow: the share of the time with requests in flight,
their mean number, and the CPU seconds of this process per second.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from icm_small_model import (
    claims_config,
    label_by_search,
    label_plainly,
    limited,
    solutions_config,
)

from rookery.embedded import EngineConfig
from rookery.engines import open_engine
from rookery.fleet import FleetConfig
from rookery.loops.icm import IcmConfig, Labeller, load_encoder
from rookery.loops.icm.baselines import BaselinesConfig
from rookery.ports import Sampler
from rookery.types import Completion, SampleRequest, Score, ScoreRequest


class BusySampler:
    """Sampler that records how long and how many requests are in flight."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._num_in_flight = 0
        self._since = self._began = time.perf_counter()
        self._cpu = time.process_time()
        self._busy_s = self._request_s = 0.0
        self.num_requests = 0

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        return await self._sampler.sample(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self._count(len(requests))
        self.num_requests += len(requests)
        try:
            return await self._sampler.score(requests)
        finally:
            self._count(-len(requests))

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        self._busy_s += (now - self._since) * (self._num_in_flight > 0)
        self._request_s += (now - self._since) * self._num_in_flight
        self._since, self._num_in_flight = now, self._num_in_flight + change

    def __str__(self) -> str:
        wall = time.perf_counter() - self._began
        return (
            f"{wall:.1f} s, {self.num_requests:,} requests, in flight {self._busy_s / wall:.0%} of "
            f"the time, {self._request_s / wall:.0f} on average, "
            f"CPU {(time.process_time() - self._cpu) / wall:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True, help="a folder, or smollm2")
    parser.add_argument("--url", nargs="*", default=[], help="servers; none: the embedded engine")
    parser.add_argument("--parts", nargs="+", default=["claims", "solutions"])
    parser.add_argument("--items", type=int, default=256)
    parser.add_argument("--batch", type=int, help="searched together; all, if not given")
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--chains", type=int, default=3)
    parser.add_argument("--speculate", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


async def run(options: argparse.Namespace) -> None:
    engine_config = (
        FleetConfig(urls=tuple(options.url))
        if options.url
        else EngineConfig(model=options.model, cache_gib=16.0)
    )
    with tempfile.TemporaryDirectory() as place:
        configs = {
            "claims": claims_config(options.data / "truthfulqa_256" / "truthfulqa_train.json"),
            "solutions": solutions_config(
                options.data / "gsm8k" / "example_model_solutions.jsonl", Path(place)
            ),
        }
        async with open_engine(engine_config) as engine:
            for name in options.parts:
                busy = BusySampler(engine)
                labeller = Labeller(
                    sampler=busy,
                    model=engine.base,
                    encoder=load_encoder(options.model),
                    context_tokens=engine.context_tokens,
                )
                print(f"\n{name}: {options.items} items", flush=True)
                config = sized(configs[name], options)
                await label_plainly(config, labeller)
                await label_by_search(config, labeller, Path(place) / name)
                print(f"  engine: {busy}", flush=True)


def sized(config: IcmConfig, options: argparse.Namespace) -> IcmConfig:
    search = config.search.model_copy(update={"iterations": options.iterations})
    return limited(config, options.items, batch=options.batch).model_copy(
        update={
            "search": search,
            "num_chains": options.chains,
            "speculate": options.speculate,
            "baselines": BaselinesConfig(inverted=False),
        }
    )


if __name__ == "__main__":
    main()
