"""Sections of the evolve config: OpenEvolve 0.4's, with its defaults, and `rookery`."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, model_validator

from rookery.config import Config
from rookery.runs import budget
from rookery.runs.trackers import TrackerName

__all__ = [
    "DEFAULT_API_BASE",
    "FEWEST_ROWS",
    "LEAST_MEMORY_MB",
    "DatabaseConfig",
    "EvaluatorSection",
    "EvolveBudgetConfig",
    "LearnConfig",
    "LlmConfig",
    "ModelConfig",
    "PromptConfig",
    "RookeryConfig",
    "SandboxSettings",
    "Section",
    "TasksConfig",
    "TraceConfig",
    "TuneConfig",
]


class Section(Config):
    """A section with OpenEvolve's exact types: text is never read as a number, nor a number as a
    flag. A whole number is a valid float."""

    model_config = ConfigDict(strict=True)


DEFAULT_API_BASE = "https://api.openai.com/v1"


class _ModelSettings(Section):
    """Settings of one model, or in `llm` itself the defaults for all models."""

    api_base: str | None = None
    """URL of an OpenAI-compatible server, up to `/v1`."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """API key, or `${VARIABLE}`. Default: OPENAI_API_KEY, if set. Never written with the config."""
    provider: str | None = None
    """`openai`, for any server with its API. No other value is supported."""
    init_client: object = None
    """No effect."""
    system_message: str | None = None
    """No effect: use `prompt.system_message`."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; null: the server's default."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the most likely tokens of this total probability; null: the server's default."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens per answer."""
    timeout: float | None = Field(default=None, gt=0)
    """Time limit for one answer, in seconds."""
    retries: int | None = Field(default=None, ge=0)
    """Number of retries of a failed request."""
    retry_delay: float | None = Field(default=None, ge=0)
    """Seconds between two tries."""
    random_seed: int | None = None
    """Seed of the requests; null: derived from the run's seed."""
    reasoning_effort: str | None = None
    """Passed on to reasoning models."""
    max_budget_usd: float | None = None
    """No effect: for OpenEvolve's command-line providers, which Rookery lacks."""
    max_ai_credits: float | None = None
    """No effect: for OpenEvolve's command-line providers, which Rookery lacks."""
    allow_all_tools: bool | None = None
    """No effect: for OpenEvolve's command-line providers, which Rookery lacks."""
    manual_mode: bool | None = None
    """Not supported: true is refused."""


class ModelConfig(_ModelSettings):
    """One model of the ensemble."""

    name: str | None = None
    """Name of the model on its server."""
    weight: float = Field(default=1.0, ge=0)
    """Relative frequency of requests to this model."""


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
"""Keys that a model takes from `llm` unless it sets them."""


class LlmConfig(_ModelSettings):
    """The models and their shared settings."""

    name: str | None = None
    """No effect: name models in `models`."""
    weight: float = 1.0
    """No effect: give weights in `models`."""
    temperature: float | None = Field(default=0.7, ge=0)
    """Sampling temperature; null: the server's default."""
    max_tokens: int | None = Field(default=4096, gt=0)
    """Maximum tokens per answer."""
    timeout: float | None = Field(default=60, gt=0)
    """Time limit for one answer, in seconds."""
    retries: int | None = Field(default=3, ge=0)
    """Number of retries of a failed request."""
    retry_delay: float | None = Field(default=5, ge=0)
    """Seconds between two tries."""
    manual_mode: bool | None = False
    """Not supported: true is refused."""
    models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    evaluator_models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    """Models that judge programs (`evaluator.use_llm_feedback`). Empty: those that propose them."""
    primary_model: str | None = None
    """Name of the main model."""
    primary_model_weight: float | None = Field(default=None, ge=0)
    """Relative frequency of requests to the main model; unset: 1."""
    secondary_model: str | None = None
    """Name of a second model."""
    secondary_model_weight: float | None = Field(default=None, ge=0)
    """Relative frequency of requests to the second model; unset: 0.2. 0 leaves it out."""

    @property
    def ensemble(self) -> tuple[ModelConfig, ...]:
        """The models that propose programs, with defaults from `llm` filled in."""
        return tuple(self.complete(model) for model in (*self.models, *self._named()))

    @property
    def judges(self) -> tuple[ModelConfig, ...]:
        """The models that judge programs, with defaults from `llm` filled in."""
        return tuple(self.complete(model) for model in self.evaluator_models) or self.ensemble

    def with_models(self, *, primary: str | None, secondary: str | None) -> Self:
        """Return the section with models of the command line, which replace all others."""
        named = {"primary_model": primary, "secondary_model": secondary}
        changes = {key: value for key, value in named.items() if value is not None}
        if not changes:
            return self
        return self.model_copy(update={**changes, "models": (), "evaluator_models": ()})

    def with_api_base(self, url: str) -> Self:
        """Return the section with all models at the URL of the command line, without providers."""
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
        """Fill in the model's missing settings from `llm`."""
        shared = {key: getattr(self, key) for key in SHARED if getattr(model, key) is None}
        return model.model_copy(update=shared)


LEAST_MEMORY_MB = 16
"""Minimum memory of a sandbox, in megabytes."""
FEWEST_ROWS = 4
"""Minimum rows of a training: fewer would be memorised."""


class EvolveBudgetConfig(budget.BudgetConfig):
    """Limits of a run, which ends before it would exceed one; null: no limit."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of prompts and answers together, including those that `learn` trains on."""
    max_usd: float | None = Field(default=None, gt=0)
    """Cost of the run in US dollars."""
    usd_per_million_prompt_tokens: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens."""
    usd_per_million_answer_tokens: float | None = Field(default=None, ge=0)
    """Price of a million answer tokens."""
    max_rollouts: int | None = Field(default=None, gt=0)
    """Answers to search tasks that scoring prompts takes. Select and report tasks do not count."""

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
    """Limits on generated programs."""

    backend: Literal["auto", "bubblewrap", "sandlock", "none"] = "auto"
    """The sandbox. `none`, or the flag `--unsafe`, runs programs with all your permissions."""
    isolate: Literal["auto", "always", "never"] = "auto"
    """Run a program in a separate process from its evaluator, so that it cannot forge its score.
    `auto`: yes, unless the evaluator needs the first program in its own process."""
    memory_mb: int = Field(default=4096, ge=LEAST_MEMORY_MB)
    """Memory of all processes of a program together."""
    startup_s: float = Field(default=120.0, gt=0)
    """Time limit for the evaluator's imports, in seconds."""
    cpu_s: float | None = Field(default=None, gt=0)
    """CPU time limit of a program, in seconds."""
    processes: int = Field(default=64, gt=0)
    """Maximum number of processes and threads of a program."""
    scratch_mb: int = Field(default=1024, gt=0)
    """Size of the folder that a program may write, in megabytes."""
    output_mb: int = Field(default=64, gt=0)
    """Maximum output that a program may print, in megabytes."""
    network: bool = False
    """Let programs use the network."""
    devices: tuple[str, ...] = ()
    """Devices that programs may use."""
    variables: tuple[str, ...] = ()
    """Environment variables that are passed on to programs."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that programs may read."""


class TuneConfig(Config):
    """Tuning of the numbers of new best programs (extra `cmaes`). Costs evaluations, not tokens."""

    evaluations: int = Field(default=60, ge=4)
    """Evaluations per new best program."""
    seconds: float = Field(default=0.0, ge=0)
    """Keep tuning for at least this many seconds of evaluations: for programs scored fast. Model
    calls begin at most `in_flight` iterations ahead of a tuning."""
    children: int = Field(default=0, ge=0)
    """Evaluations to tune every other program before it counts: for programs that are scored fast,
    and without `use_llm_feedback`. A new idea with bad numbers then has a chance."""


class LearnConfig(Config):
    """Training of an adapter of the engine's model on the run's own answers; it joins the models.

    The rows are answers whose child scores higher than its parent, weighted by their lead over the
    other answers to that parent. Each training starts from the engine's model, without an adapter.
    """

    every: int = Field(default=200, ge=1)
    """Iterations between two trainings."""
    rows: int = Field(default=256, ge=FEWEST_ROWS)
    """Maximum answers per training. The newest are taken."""
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the answers of a training."""
    batch_size: int = Field(default=8, ge=1)
    """Answers per optimizer step."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate, reached after the warm-up."""


class TasksConfig(Config):
    """Programs are prompts: their score is the reward of a model of `engine` on tasks."""

    taskset: str
    """A file of rows, a taskset file, hf://datasets/ID or generated:NAME; beside the config."""
    model: str = "base"
    """The model that answers: `base`, or one of `adapters`."""
    minibatch: int = Field(default=4, ge=1)
    """Tasks shown to a proposal. Its child must beat its parent on them to be tried on the rest."""
    num_search: int | None = Field(default=None, ge=1)
    """Number of search tasks to use, drawn at random once; null: all."""
    num_finalists: int = Field(default=5, ge=1)
    """Top prompts of the search tasks that meet on the select tasks, beside the first one."""


class RookeryConfig(Config):
    """Keys that OpenEvolve lacks."""

    in_flight: int = Field(default=16, gt=0)
    """Maximum number of concurrent model calls."""
    workers: int | None = Field(default=None, gt=0)
    """Maximum number of concurrent evaluations; null: `evaluator.parallel_evaluations`."""
    executor: Literal["local", "ray", "modal"] | None = None
    """Place where evaluations run; null: `ray` if `evaluator.distributed`, else `local`."""
    address: str | None = None
    """Address of a Ray cluster; null starts one."""
    mode: Literal["steady", "deterministic"] = "steady"
    """`steady`: results count on arrival. `deterministic`: in a fixed order, whatever the
    timing."""
    lag: int | None = Field(default=None, gt=0)
    """Deterministic mode: attempt k sees results of attempts up to k - lag; null: `in_flight`."""
    model_down_s: float = Field(default=6 * 3600, gt=0)
    """Seconds to wait for a model that is down. Then the run ends and can be resumed."""
    target_score: float | None = None
    """The run ends when a program's fitness reaches this value."""
    confirm: int = Field(default=0, ge=0)
    """Number of further evaluations of a new best program before it counts."""
    budget: EvolveBudgetConfig = EvolveBudgetConfig()
    sandbox: SandboxSettings = SandboxSettings()
    baselines: tuple[
        Literal["best_of_n", "sequential", "best_of_n+tune", "sequential+tune"], ...
    ] = ()
    """Simpler searches to compare with, run afterwards on the same budget. `+tune` needs `tune`."""
    tune: TuneConfig | None = None
    """Tune the numbers in the EVOLVE blocks of each new best Python program; null: off."""
    learn: LearnConfig | None = None
    """Train adapters of `engine`'s model and ask them too, with `bandit` on. null: off."""

    @model_validator(mode="after")
    def _learning_is_possible(self) -> Self:
        if self.learn is not None and self.engine is None:
            raise ValueError(
                "learn trains an adapter of the model of rookery.engine, and none is named; an API "
                "of llm takes no adapters. Write rookery.engine: {model: FOLDER} or {type: fleet, "
                "...}, or leave learn out."
            )
        return self

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
    """Metrics compared by Pareto dominance, none traded against another. Empty: fitness alone."""
    bandit: bool = False
    """Ask the models whose children are better more often, instead of by fixed weights."""
    first_programs: tuple[str, ...] = ()
    """Further programs to start from, relative to the config."""
    engine: dict[str, Any] | None = None
    """A Rookery engine as a proposer, configured as in other loops: `{model: smollm2}` in this
    process, or `{type: fleet, ...}` for vLLM servers. Its models are `base` and those of
    `adapters`. Entries of `llm.models` with these names set their weights."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """PEFT folders that the engine loads, each as a model of its own, relative to the config."""
    tokenizer: str = ""
    """Model folder or id, for servers given by URL."""
    track: tuple[TrackerName, ...] = ()
    """Trackers that draw the run's curves: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    checkpoint: str | None = None
    """A checkpoint folder of OpenEvolve or Rookery. The run starts from its population."""
    tasks: TasksConfig | None = None
    """Tasks that prompts are scored on, in `evolve prompt`; null: an evaluator scores programs."""

    @property
    def engine_models(self) -> tuple[str, ...]:
        """Names of the models that the engine serves."""
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
"""OpenEvolve's search keys. A config that sets one of them uses OpenEvolve's search."""
MAX_BINS = 1000
"""Maximum bins per feature dimension. With more, programs hardly ever compete for a cell."""


class PromptConfig(Section):
    """Contents of the prompts."""

    template_dir: Path | None = Field(default=None, strict=False)
    """Folder of `*.txt` templates and a `fragments.json` that override the defaults, relative to
    the config, else to the current folder."""
    system_message: str = "system_message"
    """System message: its text, or the name of a template."""
    evaluator_system_message: str = "evaluator_system_message"
    """System message for a model that judges a program."""
    programs_as_changes_description: bool = False
    """Show other programs by the model's description of their changes, not by their code."""
    system_message_changes_description: str | None = None
    """System message when programs are described by their changes."""
    initial_changes_description: str = ""
    """Description of the first program's changes, when programs are described by them."""
    num_top_programs: int = Field(default=3, ge=0)
    """Number of best programs that a prompt shows."""
    num_diverse_programs: int = Field(default=2, ge=0)
    """Number of other programs that a prompt shows."""
    use_template_stochasticity: bool = True
    """Vary the wording of prompts."""
    template_variations: dict[str, list[str]] = Field(default_factory=dict)
    """Alternative texts for `{word}` in a template. Each attempt draws one."""
    use_meta_prompting: bool = False
    """No effect."""
    meta_prompt_weight: float = 0.1
    """No effect."""
    include_artifacts: bool = True
    """Show the artifacts of the parent's evaluation."""
    max_artifact_bytes: int = Field(default=20 * 1024, ge=0)
    """Maximum length of each artifact in a prompt, in characters, as in OpenEvolve."""
    artifact_security_filter: bool = True
    """Hide text in artifacts that looks like a key."""
    suggest_simplification_after_chars: int | None = Field(default=500, ge=0)
    """Ask for simpler code if the program is longer than this many characters."""
    include_changes_under_chars: int | None = Field(default=100, ge=0)
    """Show a change in full if it is shorter than this many characters."""
    concise_implementation_max_lines: int | None = Field(default=10, ge=0)
    """A program with at most this many lines is called concise."""
    comprehensive_implementation_min_lines: int | None = Field(default=50, ge=0)
    """A program with at least this many lines is called comprehensive."""
    diff_summary_max_line_len: int = Field(default=100, ge=4)
    """Cut the lines of a change after this many characters."""
    diff_summary_max_lines: int = Field(default=30, ge=1)
    """Cut a change after this many lines."""
    code_length_threshold: int | None = None
    """Old name of suggest_simplification_after_chars, used if that is null."""


class DatabaseConfig(Section):
    """The population: one grid per island, an archive, migration."""

    strategy: Literal["adaptive", "openevolve", "pareto"] = "adaptive"
    """Selection of parents. `adaptive`: operators compete for the remaining iterations.
    `openevolve`: as in OpenEvolve. `pareto`: prompts by the number of tasks that they are best on.
    Unset: `pareto` for prompts, `openevolve` if one of its search keys is set, else `adaptive`."""
    db_path: str | None = None
    """No effect: the run folder keeps everything."""
    in_memory: bool = True
    """No effect: the run folder keeps everything."""
    log_prompts: bool = True
    """Keep prompts and answers with the programs of checkpoints."""
    population_size: int = Field(default=1000, ge=1)
    """Maximum number of programs kept."""
    archive_size: int = Field(default=100, ge=1)
    """Maximum number of programs in the archive."""
    num_islands: int = Field(default=5, ge=1)
    """Number of populations that evolve separately."""
    elite_selection_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the best programs among a prompt's inspirations."""
    exploration_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of parents drawn from the whole island."""
    exploitation_ratio: float = Field(default=0.7, ge=0, le=1)
    """Share of parents drawn from the archive."""
    diversity_metric: str = "edit_distance"
    """No effect."""
    feature_dimensions: tuple[str, ...] = Field(default=("complexity", "diversity"), strict=False)
    """Dimensions of the grid: `complexity`, `diversity`, `score`, or metrics of the evaluator."""
    feature_bins: int | dict[str, int] = 10
    """Cells of the grid per feature, for all features or by name."""
    diversity_reference_size: int = Field(default=20, ge=1)
    """Number of programs that a new one is compared with for its diversity."""
    migration_interval: int = Field(default=50, ge=1)
    """Generations between migrations."""
    migration_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of an island that migrates."""
    random_seed: int | None = 42
    """Seed of the run if the top-level `random_seed` is null."""
    artifacts_base_path: str | None = None
    """No effect: the run folder keeps everything."""
    artifact_size_threshold: int = Field(default=32 * 1024, ge=0)
    """Maximum size in bytes of an artifact stored inside the program's file of a checkpoint."""
    cleanup_old_artifacts: bool = True
    """No effect: the run folder keeps everything."""
    artifact_retention_days: int = 30
    """No effect: the run folder keeps everything."""
    max_snapshot_artifacts: int | None = 100
    """No effect."""
    novelty_llm: str | Literal[False] | None = None
    """Judge of whether a similar program is new all the same: a model of `llm`. null: all of them
    by weight, as in OpenEvolve. false: none; similar programs are rejected."""
    embedding_model: str | None = None
    """Embedding model that compares programs by meaning; null: compare code only."""
    embedding_api_base: str | None = None
    """URL of the embedding server; null: OPENAI_EMBEDDING_BASE_URL."""
    similarity_threshold: float = 0.99
    """Cosine from which two embeddings count as similar; 0 turns the comparison off."""

    @model_validator(mode="before")
    @classmethod
    def _choose_strategy(cls, document: Any) -> Any:
        """Store the choice with the config, so that a resumed run keeps it."""
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
        """True if programs are compared by embedding. No cosine exceeds 1."""
        return bool(self.embedding_model) and 0 < self.similarity_threshold <= 1


class EvaluatorSection(Section):
    """Scoring of programs."""

    timeout: float = Field(default=300, gt=0)
    """Time limit of each stage, in seconds."""
    max_retries: int = Field(default=3, ge=0)
    """Number of retries of an evaluator that raises. Only with `cascade_evaluation: false`."""
    memory_limit_mb: int | None = Field(default=None, ge=LEAST_MEMORY_MB)
    """Memory of a program in megabytes; null: `rookery.sandbox.memory_mb`."""
    cpu_limit: float | None = Field(default=None, gt=0)
    """No effect: use `rookery.sandbox.cpu_s`."""
    cascade_evaluation: bool = True
    """Call `evaluate_stage1` to `evaluate_stage3` if the evaluator has them."""
    cascade_thresholds: tuple[float, ...] = Field(default=(0.5, 0.75, 0.9), strict=False)
    """Score that each stage must reach before the next one runs."""
    parallel_evaluations: int = Field(default=1, ge=1)
    """Maximum number of concurrent evaluations."""
    distributed: bool = False
    """Same as `rookery.executor: ray`."""
    use_llm_feedback: bool = False
    """Let models judge programs too."""
    llm_feedback_weight: float = 0.1
    """Factor of the `llm_` metrics. The judges' share of combined_score is always 0.3."""
    enable_artifacts: bool = True
    """Keep artifacts. The environment variable ENABLE_ARTIFACTS=false turns this off too."""
    max_artifact_storage: int = Field(default=100 * 1024 * 1024, ge=0)
    """Maximum bytes of artifacts kept per program."""


class TraceConfig(Section):
    """The log of parents and children."""

    enabled: bool = False
    """Write a trace of the evolution."""
    format: Literal["jsonl", "json", "hdf5"] = "jsonl"
    """File format of the trace."""
    include_code: bool = False
    """Include the code of programs."""
    include_prompts: bool = True
    """Include prompts and answers."""
    output_path: str | None = None
    """File of the trace; null: in the run."""
    buffer_size: int = Field(default=10, ge=1)
    """Number of entries written together."""
    compress: bool = False
    """Compress the trace."""
