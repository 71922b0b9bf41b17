"""The section `rookery`: what OpenEvolve has no key for."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rookery.config import Config
from rookery.runs.trackers import TrackerName

__all__ = ["LEAST_MEMORY_MB", "BudgetConfig", "RookeryConfig", "SandboxSettings"]


LEAST_MEMORY_MB = 16
"""The least that a sandbox takes."""


class BudgetConfig(Config):
    """The run ends before it would spend more; null: no limit."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of prompts and answers together."""
    max_usd: float | None = Field(default=None, gt=0)
    usd_per_million_prompt_tokens: float | None = Field(default=None, ge=0)
    usd_per_million_answer_tokens: float | None = Field(default=None, ge=0)
    max_hours: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_prices(self) -> Self:
        prices = (self.usd_per_million_prompt_tokens, self.usd_per_million_answer_tokens)
        if self.max_usd is not None and None in prices:
            raise ValueError(
                "max_usd needs prices: write usd_per_million_prompt_tokens and "
                "usd_per_million_answer_tokens, 0 for what costs nothing"
            )
        return self


class SandboxSettings(Config):
    """What a generated program may use."""

    backend: Literal["auto", "bubblewrap", "sandlock", "none"] = "auto"
    """`none` is what `--unsafe` says: the program runs with all that you may do."""
    isolate: Literal["auto", "always", "never"] = "auto"
    """Whether a program runs in another process than its evaluator, where it cannot forge its
    score. `auto`: unless the evaluator needs the first program in its own process."""
    memory_mb: int = Field(default=4096, ge=LEAST_MEMORY_MB)
    """Of all processes of a program together."""
    startup_s: float = Field(default=120.0, gt=0)
    """How long the evaluator's imports may take."""
    cpu_s: float | None = Field(default=None, gt=0)
    processes: int = Field(default=64, gt=0)
    scratch_mb: int = Field(default=1024, gt=0)
    output_mb: int = Field(default=64, gt=0)
    network: bool = False
    devices: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """Environment variables that are passed on."""
    read_paths: tuple[str, ...] = ()


class RookeryConfig(Config):
    """Where and how an evolution runs."""

    in_flight: int = Field(default=16, gt=0)
    """Model calls at a time."""
    workers: int | None = Field(default=None, gt=0)
    """Evaluations at a time; null: `evaluator.parallel_evaluations`."""
    executor: Literal["local", "ray", "modal"] | None = None
    """null: `ray` if `evaluator.distributed`, else `local`."""
    address: str | None = None
    """Of a Ray cluster; null starts one."""
    mode: Literal["steady", "deterministic"] = "steady"
    lag: int | None = Field(default=None, gt=0)
    """deterministic: attempt k sees what attempts up to k - lag found; null: in_flight."""
    model_down_s: float = Field(default=6 * 3600, gt=0)
    """How long a model that serves nobody is waited for, before the run ends to be resumed."""
    target_score: float | None = None
    """The run ends when a program's fitness reaches it."""
    confirm: int = Field(default=0, ge=0)
    """Times that a new best program is scored again before it counts."""
    budget: BudgetConfig = BudgetConfig()
    sandbox: SandboxSettings = SandboxSettings()
    baselines: tuple[Literal["best_of_n", "sequential"], ...] = ()
    """Run beside the evolution, with as much to spend."""
    pareto: tuple[str, ...] = ()
    """Metrics of which none is traded against another; empty: fitness alone."""
    bandit: bool = False
    """Ask more often the models whose children are better, not by fixed weights."""
    first_programs: tuple[str, ...] = ()
    """Further programs to start from; beside the config."""
    engine: dict[str, Any] | None = None
    """An engine of ours as a proposer, as other loops name it: `{model: smollm2}` in this process,
    `{type: fleet, ...}` for vLLM servers. Its models are `base` and those of `adapters`; entries of
    `llm.models` with these names say their weights."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """PEFT folders that the engine loads, each a model of its own; beside the config."""
    tokenizer: str = ""
    """The model's folder or id, for servers given by URL."""
    track: tuple[TrackerName, ...] = ()
    """What draws the curves of the run: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    checkpoint: str | None = None
    """A checkpoint folder, of OpenEvolve or ours, whose population is the first one."""

    @property
    def engine_models(self) -> tuple[str, ...]:
        """The names of the models that the engine serves."""
        return () if self.engine is None else ("base", *self.adapters)
