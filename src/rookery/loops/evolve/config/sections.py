"""The sections `prompt`, `database`, `evaluator` and `evolution_trace`, with 0.4's defaults."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from rookery.config import Config
from rookery.runs.trackers import TrackerName

__all__ = [
    "DEFAULT_API_BASE",
    "LEAST_MEMORY_MB",
    "BudgetConfig",
    "DatabaseConfig",
    "EvaluatorConfig",
    "LlmConfig",
    "ModelConfig",
    "PromptConfig",
    "RookeryConfig",
    "SandboxSettings",
    "Section",
    "TraceConfig",
    "TuneConfig",
]

# A section of OpenEvolve's config: types are exact, as they are there.


class Section(Config):
    """Text is never read as a number, a number never as a flag; a whole number is a float too."""

    model_config = ConfigDict(strict=True)


# The `llm` section: which models answer, and how they are asked.


DEFAULT_API_BASE = "https://api.openai.com/v1"


class _Asking(Section):
    """What is said of one model, or in `llm` itself of all models that do not say it."""

    api_base: str | None = None
    """The URL of an OpenAI-compatible server, up to `/v1`."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """A key or `${VARIABLE}`. Without one OPENAI_API_KEY is used, and none if that is unset too.

    It is never written with the config.
    """
    provider: str | None = None
    """Only `openai`: any server with its API."""
    init_client: object = None
    system_message: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one answer."""
    retries: int | None = Field(default=None, ge=0)
    retry_delay: float | None = Field(default=None, ge=0)
    """Seconds between two tries."""
    random_seed: int | None = None
    reasoning_effort: str | None = None
    max_budget_usd: float | None = None
    max_ai_credits: float | None = None
    allow_all_tools: bool | None = None
    manual_mode: bool | None = None


class ModelConfig(_Asking):
    """One model of the ensemble."""

    name: str | None = None
    weight: float = Field(default=1.0, ge=0)
    """How often it is asked, beside the weights of the others."""


SHARED = (
    "provider",
    "api_base",
    "api_key",
    "temperature",
    "top_p",
    "max_tokens",
    "timeout",
    "retries",
    "retry_delay",
    "random_seed",
    "reasoning_effort",
    "manual_mode",
)
"""What a model takes from `llm` where it does not say it itself."""


class LlmConfig(_Asking):
    """The models, and what they share."""

    name: str | None = None
    weight: float = 1.0
    temperature: float | None = Field(default=0.7, ge=0)
    max_tokens: int | None = Field(default=4096, gt=0)
    timeout: float | None = Field(default=60, gt=0)
    retries: int | None = Field(default=3, ge=0)
    retry_delay: float | None = Field(default=5, ge=0)
    manual_mode: bool | None = False
    models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    evaluator_models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    """Models that judge programs (`evaluator.use_llm_feedback`); empty: those of `models`."""
    primary_model: str | None = None
    primary_model_weight: float | None = Field(default=None, ge=0)
    secondary_model: str | None = None
    secondary_model_weight: float | None = Field(default=None, ge=0)
    """0 leaves the second model out; unset is 0.2."""

    @property
    def ensemble(self) -> tuple[ModelConfig, ...]:
        """The models that propose programs, each with all that `llm` says for it."""
        return tuple(self.complete(model) for model in (*self.models, *self._named()))

    @property
    def judges(self) -> tuple[ModelConfig, ...]:
        """The models that judge programs."""
        return tuple(self.complete(model) for model in self.evaluator_models) or self.ensemble

    def with_models(self, *, primary: str | None, secondary: str | None) -> Self:
        """Named on the command line: `models` and `evaluator_models` no longer count."""
        named = {"primary_model": primary, "secondary_model": secondary}
        changes = {key: value for key, value in named.items() if value is not None}
        if not changes:
            return self
        return self.model_copy(update={**changes, "models": (), "evaluator_models": ()})

    def with_api_base(self, url: str) -> Self:
        """Named on the command line: every model is asked there, whatever its provider was."""
        server = {"api_base": url, "provider": None}
        models = tuple(model.model_copy(update=server) for model in self.models)
        judges = tuple(model.model_copy(update=server) for model in self.evaluator_models)
        return self.model_copy(update={**server, "models": models, "evaluator_models": judges})

    def _named(self) -> list[ModelConfig]:
        models = []
        if self.primary_model:
            weight = self.primary_model_weight or 1.0
            models.append(ModelConfig(name=self.primary_model, weight=weight))
        if self.secondary_model and self.secondary_model_weight != 0:
            weight = self.secondary_model_weight or 0.2
            models.append(ModelConfig(name=self.secondary_model, weight=weight))
        return models

    def complete(self, model: ModelConfig) -> ModelConfig:
        """The model with all that `llm` says for it."""
        shared = {key: getattr(self, key) for key in SHARED if getattr(model, key) is None}
        return model.model_copy(update=shared)


# The section `rookery`: what OpenEvolve has no key for.


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


class TuneConfig(Config):
    """Numbers of a new best program are tuned (extra `cmaes`): no tokens, evaluations."""

    evaluations: int = Field(default=60, ge=4)
    """For each new best program."""
    seconds: float = Field(default=0.0, ge=0)
    """More evaluations, where so many seconds allow them: for programs that are scored fast."""


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
    baselines: tuple[
        Literal["best_of_n", "sequential", "best_of_n+tune", "sequential+tune"], ...
    ] = ()
    """Run beside the evolution, with as much to spend; `+tune`: with `tune`, where that is set."""
    tune: TuneConfig | None = None
    """Tune the numbers in the EVOLVE blocks of every new best Python program; null: not."""

    @model_validator(mode="after")
    def _tuning_is_possible(self) -> Self:
        tuned = [name for name in self.baselines if name.endswith("+tune")]
        if tuned and self.tune is None:
            raise ValueError(
                f"baselines name {tuned[0]!r}, and tune is not set: write "
                "tune: {evaluations: 60}, or the baseline without +tune."
            )
        if self.mode == "deterministic" and self.tune is not None and self.tune.seconds:
            raise ValueError(
                f"tune.seconds is {self.tune.seconds:g} and mode is deterministic: what a clock "
                "ends is not repeatable. Leave seconds out, and write more evaluations."
            )
        return self

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


SEARCH_KEYS = frozenset(
    {
        "archive_size",
        "diversity_reference_size",
        "elite_selection_ratio",
        "exploitation_ratio",
        "exploration_ratio",
        "feature_bins",
        "feature_dimensions",
        "migration_interval",
        "migration_rate",
        "num_islands",
        "population_size",
    }
)
"""OpenEvolve's keys that say how it searches: a file that sets one of them runs as it says."""
MAX_BINS = 1000
"""Of a feature dimension: with more, hardly two programs ever compete for a cell."""


class PromptConfig(Section):
    """What the model is told."""

    template_dir: Path | None = Field(default=None, strict=False)
    """A folder of `*.txt` templates and `fragments.json` over the defaults; beside the config, or
    else in the current folder."""
    system_message: str = "system_message"
    """The text itself, or the name of a template."""
    evaluator_system_message: str = "evaluator_system_message"
    programs_as_changes_description: bool = False
    """Show other programs by what the model says of their changes, not by their code."""
    system_message_changes_description: str | None = None
    initial_changes_description: str = ""
    num_top_programs: int = Field(default=3, ge=0)
    num_diverse_programs: int = Field(default=2, ge=0)
    use_template_stochasticity: bool = True
    template_variations: dict[str, list[str]] = Field(default_factory=dict)
    """`{word}` of a template to the texts of which each attempt draws one."""
    use_meta_prompting: bool = False
    meta_prompt_weight: float = 0.1
    include_artifacts: bool = True
    max_artifact_bytes: int = Field(default=20 * 1024, ge=0)
    """Of each artifact; counted in characters, as in OpenEvolve."""
    artifact_security_filter: bool = True
    suggest_simplification_after_chars: int | None = Field(default=500, ge=0)
    include_changes_under_chars: int | None = Field(default=100, ge=0)
    concise_implementation_max_lines: int | None = Field(default=10, ge=0)
    comprehensive_implementation_min_lines: int | None = Field(default=50, ge=0)
    diff_summary_max_line_len: int = Field(default=100, ge=4)
    diff_summary_max_lines: int = Field(default=30, ge=1)
    code_length_threshold: int | None = None
    """The old name of suggest_simplification_after_chars, read where that is null."""


class DatabaseConfig(Section):
    """The population: a grid per island, an archive, migration."""

    strategy: Literal["adaptive", "openevolve"] = "adaptive"
    """`adaptive`: operators compete for attempts, within the iterations that are left;
    `openevolve`: as OpenEvolve draws parents. Unset: `openevolve` if one of the keys that say how
    it searches is set, else `adaptive`."""
    db_path: str | None = None
    in_memory: bool = True
    log_prompts: bool = True
    """Keep prompts and answers in the checkpoints' programs."""
    population_size: int = Field(default=1000, ge=1)
    archive_size: int = Field(default=100, ge=1)
    num_islands: int = Field(default=5, ge=1)
    elite_selection_ratio: float = Field(default=0.1, ge=0, le=1)
    exploration_ratio: float = Field(default=0.2, ge=0, le=1)
    exploitation_ratio: float = Field(default=0.7, ge=0, le=1)
    diversity_metric: str = "edit_distance"
    feature_dimensions: tuple[str, ...] = Field(default=("complexity", "diversity"), strict=False)
    """`complexity`, `diversity`, `score`, or metrics of the evaluator."""
    feature_bins: int | dict[str, int] = 10
    diversity_reference_size: int = Field(default=20, ge=1)
    migration_interval: int = Field(default=50, ge=1)
    migration_rate: float = Field(default=0.1, ge=0, le=1)
    random_seed: int | None = 42
    artifacts_base_path: str | None = None
    artifact_size_threshold: int = Field(default=32 * 1024, ge=0)
    """Bytes up to which a checkpoint keeps an artifact inside of the program's file."""
    cleanup_old_artifacts: bool = True
    artifact_retention_days: int = 30
    max_snapshot_artifacts: int | None = 100
    novelty_llm: str | Literal[False] | None = None
    """Who says whether a program that is similar to another is new all the same: a model of `llm`;
    null: all of them by weight, as in OpenEvolve; false: nobody, what is similar is rejected."""
    embedding_model: str | None = None
    """Compares programs by what they mean; null: by their code alone."""
    embedding_api_base: str | None = None
    """Else OPENAI_EMBEDDING_BASE_URL."""
    similarity_threshold: float = 0.99
    """Cosine of two embeddings from which on a program is similar; 0 compares none."""

    @model_validator(mode="before")
    @classmethod
    def _choose_strategy(cls, document: Any) -> Any:
        """The choice is written with the config, so that a run goes on as it began."""
        if not isinstance(document, dict) or document.get("strategy") is not None:
            return document
        strategy = "openevolve" if SEARCH_KEYS & document.keys() else "adaptive"
        return {**document, "strategy": strategy}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        explored, exploited = self.exploration_ratio, self.exploitation_ratio
        if explored + exploited > 1 + 1e-9:
            raise ValueError(
                f"exploration_ratio is {explored:g} and exploitation_ratio is {exploited:g}; they "
                "are shares of the parents: together at most 1."
            )
        bins = self.feature_bins
        counts = bins.values() if isinstance(bins, dict) else (bins,)
        if not all(1 <= count <= MAX_BINS for count in counts):
            raise ValueError(f"feature_bins is {bins}; a dimension has 1 to {MAX_BINS} bins.")
        return self

    @property
    def is_compared(self) -> bool:
        """Whether programs are compared by embedding; no cosine is above 1."""
        return bool(self.embedding_model) and 0 < self.similarity_threshold <= 1


class EvaluatorConfig(Section):
    """How programs are scored."""

    timeout: float = Field(default=300, gt=0)
    """Seconds, for each stage."""
    max_retries: int = Field(default=3, ge=0)
    """More tries of an evaluator that raises, where `cascade_evaluation` is off."""
    memory_limit_mb: int | None = Field(default=None, ge=LEAST_MEMORY_MB)
    cpu_limit: float | None = Field(default=None, gt=0)
    cascade_evaluation: bool = True
    cascade_thresholds: tuple[float, ...] = Field(default=(0.5, 0.75, 0.9), strict=False)
    parallel_evaluations: int = Field(default=1, ge=1)
    distributed: bool = False
    """The same as `rookery.executor: ray`."""
    use_llm_feedback: bool = False
    llm_feedback_weight: float = 0.1
    enable_artifacts: bool = True
    """ENABLE_ARTIFACTS=false turns them off too."""
    max_artifact_storage: int = Field(default=100 * 1024 * 1024, ge=0)


class TraceConfig(Section):
    """The log of parents and children."""

    enabled: bool = False
    format: Literal["jsonl", "json", "hdf5"] = "jsonl"
    include_code: bool = False
    include_prompts: bool = True
    output_path: str | None = None
    buffer_size: int = Field(default=10, ge=1)
    compress: bool = False
