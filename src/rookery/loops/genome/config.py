"""What a genome run is told: the config, with every default the vetted setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import EngineChoice, engine_from_folder, local_model
from rookery.loops.comparison import ReportConfig
from rookery.loops.genome.final_report import FinalConfig
from rookery.loops.genome.founders import FileInit, InitConfig
from rookery.loops.genome.stages import GaStage, RandomStage, StageConfig, SurrogateStage
from rookery.runs.trackers import TrackerName
from rookery.search.candidate import COMBINATIONS
from rookery.search.merit import Merit
from rookery.search.racing import RaceConfig
from rookery.tasks.taskset import TasksetConfig, from_folder
from rookery.weights.merge import (
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
)
from rookery.weights.mutate import GaussianConfig

__all__ = ["MERGES", "MUTATIONS", "GenomeConfig"]

MERGES: Mapping[str, MergeConfig] = {
    "linear": LinearConfig(),
    "sum": LinearConfig(normalise=False),
    "ties": TiesConfig(),
    "dare": DareConfig(),
    "dare_ties": DareTiesConfig(),
    "layerwise": LayerwiseConfig(),
    "layers": LayerwiseConfig(unit="layer"),
    "mixture": LayerwiseConfig(mode="mix", unit="layer"),
}
"""The crossovers that operators can name; a config may change them or add its own."""

MUTATIONS: Mapping[str, GaussianConfig] = {"gaussian": GaussianConfig()}


class GenomeConfig(Config):
    """One evolution of LoRA adapters."""

    engine: EngineChoice = EngineConfig()
    """What answers: the embedded engine, or a fleet of vLLM servers."""
    tokenizer: str = ""
    """A model folder or Hugging Face id; empty: the engine's model. Needed with servers by URL."""
    init: InitConfig
    """The adapters to begin with."""
    tasksets: tuple[TasksetConfig, ...] = Field(min_length=1)
    """What is searched, selected and reported on."""
    stages: tuple[StageConfig, ...] = (
        RandomStage(count=10),
        SurrogateStage(generations=8, population=5),
    )
    """How to search, one after another: by default random sums of the founders, then sums that a
    model of all answers so far expects to be good."""
    race: RaceConfig = RaceConfig()
    """Dropping candidates that can no longer survive; `enabled: false` measures all on all."""
    merit: Merit = "mixed"
    """What candidates are compared by in the search, in races and in the choice: `certainty`, the
    probability of the right choice, which has less noise than whether it is the likeliest; its
    logarithm, `log_certainty`, which counts a confident mistake for more; `reward`; or `mixed`,
    the mean of the three, which is good where certainty says little too. Tasks without choices
    count by their reward. Floors and reports use rewards."""
    floors: dict[str, float | Literal["founder"]] = Field(default_factory=dict)
    """"Do not get worse on this taskset": a mean, or `founder` for the best founder's."""
    rank: int | None = Field(default=None, ge=1)
    """The children's rank; null takes the founders' largest."""
    merges: dict[str, MergeConfig] = Field(default_factory=dict)
    """Changes and additions to the crossovers by name."""
    mutations: dict[str, GaussianConfig] = Field(default_factory=dict)
    """Changes and additions to the mutations by name."""
    merge_device: Literal["cpu", "cuda"] = "cpu"
    """Where children are made. `cuda`, the first GPU here, is for servers on this machine: whole
    layers (`ties`, `dare`) keep its cores busy for seconds, which the servers need. It takes about
    2 GB there beside them. The last bits of a child depend on it."""
    finals: FinalConfig = FinalConfig()
    report: ReportConfig = ReportConfig()
    """`{samples: 8}` draws answers to each report task besides, for pass@k: at the temperature of
    the taskset's `sampling`, or at 1 where that is greedy."""
    track: tuple[TrackerName, ...] = ()
    """What draws the curves of the run: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    seed: int = 0
    """All random numbers follow from it."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        taken = sorted(COMBINATIONS & set(self.merges))
        if taken:
            raise ValueError(f"merges has {taken[0]!r}, a name of the search's own: write another")
        for stage in self.stages:
            if isinstance(stage, GaStage):
                _require(stage.merges, {*MERGES, *self.merges}, "crossover")
                _require(stage.mutations, {*MUTATIONS, *self.mutations}, "mutation")
        return self

    def from_folder(self, folder: Path) -> Self:
        """The config with the paths in it taken from the folder of its file."""
        init = self.init
        if isinstance(init, FileInit):
            paths = tuple((folder / path.expanduser()).resolve() for path in init.paths)
            init = init.model_copy(update={"path": paths if len(paths) > 1 else paths[0]})
        tasksets = tuple(from_folder(taskset, folder) for taskset in self.tasksets)
        return self.model_copy(
            update={
                "engine": engine_from_folder(self.engine, folder),
                "tokenizer": local_model(self.tokenizer, folder),
                "init": init,
                "tasksets": tasksets,
            }
        )


def _require(names: set[str], known: set[str], what: str) -> None:
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(
            f"{what} {unknown[0]!r} is not known; write one of {', '.join(sorted(known))}"
        )
