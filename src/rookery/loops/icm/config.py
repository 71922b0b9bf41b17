"""Config of a labelling: its items, its search, its baselines."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import SamplerChoice, engine_from_folder, local_model
from rookery.loops.icm.baselines import BASELINE_READS, BaselinesConfig
from rookery.loops.icm.exports import ExportsConfig
from rookery.loops.icm.items import DataConfig
from rookery.loops.icm.objective import ConstraintConfig, ObjectiveConfig, fields_of
from rookery.paths import expanded
from rookery.runs.budget import BudgetConfig
from rookery.runs.trackers import TrackerName
from rookery.search.annealing import AnnealingConfig
from rookery.train.sft import SftConfig

__all__ = ["IcmConfig", "IterateConfig"]


class IterateConfig(Config):
    """Training on the labels of some batches before the next ones are labelled."""

    num_batches: int = Field(default=1, ge=1)
    """Number of batches labelled with one adapter before the next adapter is trained."""
    sft: SftConfig = SftConfig()
    """Training of each adapter on all labels so far, always from a new adapter or `init_from`."""

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its path resolved against the folder of its file."""
        if self.sft.init_from is None:
            return self
        path = expanded(self.sft.init_from, folder).resolve()
        return self.model_copy(update={"sft": self.sft.model_copy(update={"init_from": path})})


class IcmConfig(Config):
    """Config of one labelling of one file of items."""

    engine: SamplerChoice = EngineConfig()
    """The engine that answers: embedded, or a fleet of vLLM servers."""
    tokenizer: str = ""
    """A model folder or Hugging Face id. Empty: the engine's model. Required for servers by URL."""
    data: DataConfig
    constraints: tuple[ConstraintConfig, ...] = ()
    """Constraints on the items' form. Without any, small models give every item one label."""
    objective: ObjectiveConfig = ObjectiveConfig()
    search: AnnealingConfig = AnnealingConfig()
    batch_size: int = Field(default=256, ge=2)
    """Items labelled together, each a demonstration for the others. All must fit the context."""
    num_chains: int = Field(default=3, ge=1)
    """Searches of each batch from different start labels; the best counts. One alone ends in the
    inverse concept about one time in ten. The last of several starts from bootstrap's labels."""
    parallel: int = Field(default=4, ge=1)
    """Maximum number of concurrent chains, over all batches."""
    speculate: int = Field(default=1, ge=1)
    """Iterations whose requests are sent in one call, on the guess that none changes a label. For
    engines that one evaluation does not fill. It costs tokens and changes no decision."""
    iterate: IterateConfig | None = None
    """Label a few batches, train an adapter on them, label the next with it. null: no training."""
    baselines: BaselinesConfig = BaselinesConfig()
    exports: ExportsConfig = ExportsConfig()
    track: tuple[TrackerName, ...] = ()
    """Trackers that draw the run's curves: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    budget: BudgetConfig = BudgetConfig()
    """Limits that may end searches early. Reading an item counts as one answer token. Searches
    share equally what the baselines leave."""
    seed: int = 0
    """Seed of all random numbers of the run."""

    @model_validator(mode="after")
    def _takes_adapters(self) -> Self:
        if self.iterate is not None and self.engine.type == "external":
            raise ValueError(
                "iterate trains adapters, which an external API does not take: use an engine of "
                "type embedded, fleet or service"
            )
        return self

    def reads_of_search(self, *, num_items: int, num_batches: int) -> int | None:
        """Return the reads that the budget leaves to each search, at least one. None: no limit."""
        most = self.budget.max_answer_tokens
        if most is None:
            return None
        num_searches = num_batches * (self.num_chains + self.baselines.inverted)
        return max(1, (most - BASELINE_READS * num_items) // num_searches)

    @model_validator(mode="after")
    def _hides_gold(self) -> Self:
        gold = self.data.gold
        if gold is None:
            return self
        read = {self.data.group, self.data.id}.union(*map(fields_of, self.constraints))
        if gold.field in read:
            raise ValueError(
                f"the field {gold.field!r} holds the true labels (data.gold) and a group, an id or "
                "a constraint reads it: the search must not see them"
            )
        return self

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its paths resolved against the folder of its file."""
        iterate = self.iterate
        return self.model_copy(
            update={
                "engine": engine_from_folder(self.engine, folder),
                "tokenizer": local_model(self.tokenizer, folder),
                "data": self.data.from_folder(folder),
                "iterate": None if iterate is None else iterate.from_folder(folder),
            }
        )
