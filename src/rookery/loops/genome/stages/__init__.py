"""The ways to search. A stage starts from everything measured so far and measures more.

    stages: [{type: ga, generations: 8}, {type: es, steps: 5}]

A new stage is a file with its config and function, a line in the union and one in the dict.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from rookery.loops.genome.stages.context import StageContext
from rookery.loops.genome.stages.es import CmaesStage, EsStage, run_cmaes, run_es
from rookery.loops.genome.stages.ga import GaStage, RandomStage, run_ga, run_random
from rookery.loops.genome.stages.surrogate import SurrogateStage, run_surrogate

__all__ = [
    "STAGES",
    "CmaesStage",
    "EsStage",
    "GaStage",
    "RandomStage",
    "StageConfig",
    "StageContext",
    "SurrogateStage",
]

StageConfig = Annotated[
    GaStage | EsStage | CmaesStage | RandomStage | SurrogateStage, Field(discriminator="type")
]

STAGES: Mapping[str, Callable[[Any, StageContext], Awaitable[list[str]]]] = {
    "cmaes": run_cmaes,
    "es": run_es,
    "ga": run_ga,
    "random": run_random,
    "surrogate": run_surrogate,
}
