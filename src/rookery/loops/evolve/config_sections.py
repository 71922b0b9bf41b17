"""The sections `prompt`, `database`, `evaluator` and `evolution_trace`, with 0.4's defaults."""

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
    """Changes nothing here."""
    system_message: str | None = None
    """Changes nothing here: it is `prompt.system_message`."""
    temperature: float | None = Field(default=None, ge=0)
    """The temperature of answers; null: the server's own."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the likeliest tokens of this total probability; null: the server's own."""
    max_tokens: int | None = Field(default=None, gt=0)
    """The most tokens of an answer."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one answer."""
    retries: int | None = Field(default=None, ge=0)
    """How often a failed request is sent again."""
    retry_delay: float | None = Field(default=None, ge=0)
    """Seconds between two tries."""
    random_seed: int | None = None
    """The seed of the requests; null: made from the run's."""
    reasoning_effort: str | None = None
    """Passed on to models that reason."""
    max_budget_usd: float | None = None
    """For command-line providers, which are not there."""
    max_ai_credits: float | None = None
    """For command-line providers, which are not there."""
    allow_all_tools: bool | None = None
    """For command-line providers, which are not there."""
    manual_mode: bool | None = None
    """Not there: refused if true."""


class ModelConfig(_Asking):
    """One model of the ensemble."""

    name: str | None = None
    """The name of the model."""
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
    """Changes nothing here: name models in `models`."""
    weight: float = 1.0
    """Changes nothing here: give weights in `models`."""
    temperature: float | None = Field(default=0.7, ge=0)
    """The temperature of answers; null: the server's own."""
    max_tokens: int | None = Field(default=4096, gt=0)
    """The most tokens of an answer."""
    timeout: float | None = Field(default=60, gt=0)
    """Seconds that an answer may take."""
    retries: int | None = Field(default=3, ge=0)
    """How often a failed request is sent again."""
    retry_delay: float | None = Field(default=5, ge=0)
    """Seconds before a request is sent again."""
    manual_mode: bool | None = False
    """Not there: refused if true."""
    models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    evaluator_models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    """Models that judge programs (`evaluator.use_llm_feedback`); empty: those of `models`."""
    primary_model: str | None = None
    """The model that is asked most."""
    primary_model_weight: float | None = Field(default=None, ge=0)
    """How often it is asked, beside the weight of the other."""
    secondary_model: str | None = None
    """The model that is asked now and then."""
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
FEWEST_ROWS = 4
"""Of a training: fewer answers are learned by heart."""


class EvolveBudgetConfig(budget.BudgetConfig):
    """The run ends before it would spend more; null: no limit."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of prompts and answers together, and those that `learn` trains on."""
    max_usd: float | None = Field(default=None, gt=0)
    """The most money that the run spends."""
    usd_per_million_prompt_tokens: float | None = Field(default=None, ge=0)
    """What a million prompt tokens costs."""
    usd_per_million_answer_tokens: float | None = Field(default=None, ge=0)
    """What a million answer tokens costs."""
    max_rollouts: int | None = Field(default=None, gt=0)
    """Answers to tasks that scoring prompts takes, before select and report."""

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
    """Seconds of CPU that a program may use."""
    processes: int = Field(default=64, gt=0)
    """The most processes and threads of a program."""
    scratch_mb: int = Field(default=1024, gt=0)
    """The size of the folder that a program may write."""
    output_mb: int = Field(default=64, gt=0)
    """The most that a program may print."""
    network: bool = False
    """Let programs use the network."""
    devices: tuple[str, ...] = ()
    """Devices that programs may use."""
    variables: tuple[str, ...] = ()
    """Environment variables that are passed on."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that programs may read."""


class TuneConfig(Config):
    """Numbers of a new best program are tuned (extra `cmaes`): no tokens, evaluations."""

    evaluations: int = Field(default=60, ge=4)
    """For each new best program."""
    seconds: float = Field(default=0.0, ge=0)
    """More evaluations, where so many seconds allow them: for programs that are scored fast."""


class LearnConfig(Config):
    """An adapter of the engine's model is trained on the run's own answers, and joins its models.

    Trained on: answers whose child scores higher than its parent, by how much more than the other
    answers to that parent. Each training begins with the engine's model, without an adapter.
    """

    every: int = Field(default=200, ge=1)
    """Iterations between two trainings."""
    rows: int = Field(default=256, ge=FEWEST_ROWS)
    """The most answers of a training: the newest."""
    rank: int = Field(default=16, ge=1)
    """The rank of the adapter."""
    epochs: int = Field(default=3, ge=1)
    """How often a training sees every answer."""
    batch_size: int = Field(default=8, ge=1)
    """Answers of a step."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """The highest: reached after the warm-up."""


class TasksConfig(Config):
    """Programs are prompts: their score is what a model of `engine` earns on tasks with them."""

    taskset: str
    """A file of rows, a taskset's file, hf://datasets/ID, or generated:NAME; beside the config."""
    model: str = "base"
    """Who answers: `base`, or one of `adapters`."""
    minibatch: int = Field(default=4, ge=1)
    """Tasks that a proposal is shown, and that its child must do better on than its parent before
    it answers all search tasks."""
    num_search: int | None = Field(default=None, ge=1)
    """Search tasks to use, a fixed draw of them; null: all."""
    num_finalists: int = Field(default=5, ge=1)
    """The best so many on the search tasks meet on the select tasks, and the first prompt."""


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
    """Whether results count as they come (`steady`) or in order (`deterministic`)."""
    lag: int | None = Field(default=None, gt=0)
    """deterministic: attempt k sees what attempts up to k - lag found; null: in_flight."""
    model_down_s: float = Field(default=6 * 3600, gt=0)
    """How long a model that serves nobody is waited for, before the run ends to be resumed."""
    target_score: float | None = None
    """The run ends when a program's fitness reaches it."""
    confirm: int = Field(default=0, ge=0)
    """Times that a new best program is scored again before it counts."""
    budget: EvolveBudgetConfig = EvolveBudgetConfig()
    sandbox: SandboxSettings = SandboxSettings()
    baselines: tuple[
        Literal["best_of_n", "sequential", "best_of_n+tune", "sequential+tune"], ...
    ] = ()
    """Run beside the evolution, with as much to spend; `+tune`: with `tune`, where that is set."""
    tune: TuneConfig | None = None
    """Tune the numbers in the EVOLVE blocks of every new best Python program; null: not."""
    learn: LearnConfig | None = None
    """Train an adapter of `engine`'s model while the run goes on, and ask it too, as often as it
    earns: `bandit` is then on. null: not."""

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
    tasks: TasksConfig | None = None
    """What prompts are scored on, in `evolve prompt`; null: programs, scored by an evaluator."""

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
    """The system message when a model judges a program."""
    programs_as_changes_description: bool = False
    """Show other programs by what the model says of their changes, not by their code."""
    system_message_changes_description: str | None = None
    """The system message when programs are described by their changes."""
    initial_changes_description: str = ""
    """How the first program is described then."""
    num_top_programs: int = Field(default=3, ge=0)
    """Best programs that a prompt shows."""
    num_diverse_programs: int = Field(default=2, ge=0)
    """Other programs that a prompt shows."""
    use_template_stochasticity: bool = True
    """Vary the wording of prompts."""
    template_variations: dict[str, list[str]] = Field(default_factory=dict)
    """`{word}` of a template to the texts of which each attempt draws one."""
    use_meta_prompting: bool = False
    """Changes nothing here."""
    meta_prompt_weight: float = 0.1
    """Changes nothing here."""
    include_artifacts: bool = True
    """Show what the last evaluation printed and returned."""
    max_artifact_bytes: int = Field(default=20 * 1024, ge=0)
    """Of each artifact; counted in characters, as in OpenEvolve."""
    artifact_security_filter: bool = True
    """Hide what looks like a key in it."""
    suggest_simplification_after_chars: int | None = Field(default=500, ge=0)
    """Ask for simpler code when a program is longer than this."""
    include_changes_under_chars: int | None = Field(default=100, ge=0)
    """Show a change whole when it is shorter than this."""
    concise_implementation_max_lines: int | None = Field(default=10, ge=0)
    """A program up to so many lines is called concise."""
    comprehensive_implementation_min_lines: int | None = Field(default=50, ge=0)
    """A program from so many lines on is called comprehensive."""
    diff_summary_max_line_len: int = Field(default=100, ge=4)
    """Cut the lines of a change after so many characters."""
    diff_summary_max_lines: int = Field(default=30, ge=1)
    """Cut a change after so many lines."""
    code_length_threshold: int | None = None
    """The old name of suggest_simplification_after_chars, read where that is null."""


class DatabaseConfig(Section):
    """The population: a grid per island, an archive, migration."""

    strategy: Literal["adaptive", "openevolve", "pareto"] = "adaptive"
    """`adaptive`: operators compete for attempts, within the iterations that are left;
    `openevolve`: as OpenEvolve draws parents; `pareto`: prompts that are best on a task, by on how
    many. Unset: `pareto` for prompts; `openevolve` if one of the keys that say how it searches is
    set; else `adaptive`."""
    db_path: str | None = None
    """Changes nothing here: the run folder keeps everything."""
    in_memory: bool = True
    """Changes nothing here: the run folder keeps everything."""
    log_prompts: bool = True
    """Keep prompts and answers in the checkpoints' programs."""
    population_size: int = Field(default=1000, ge=1)
    """The most programs that are kept."""
    archive_size: int = Field(default=100, ge=1)
    """The most programs of the archive."""
    num_islands: int = Field(default=5, ge=1)
    """Populations that evolve apart."""
    elite_selection_ratio: float = Field(default=0.1, ge=0, le=1)
    """The share of the best among the programs that a prompt shows."""
    exploration_ratio: float = Field(default=0.2, ge=0, le=1)
    """The share of parents drawn from the whole island."""
    exploitation_ratio: float = Field(default=0.7, ge=0, le=1)
    """The share of parents drawn from the archive."""
    diversity_metric: str = "edit_distance"
    """Changes nothing here."""
    feature_dimensions: tuple[str, ...] = Field(default=("complexity", "diversity"), strict=False)
    """`complexity`, `diversity`, `score`, or metrics of the evaluator."""
    feature_bins: int | dict[str, int] = 10
    """Cells of the grid along each feature."""
    diversity_reference_size: int = Field(default=20, ge=1)
    """Programs that a new one is compared with for its diversity."""
    migration_interval: int = Field(default=50, ge=1)
    """Generations between migrations."""
    migration_rate: float = Field(default=0.1, ge=0, le=1)
    """The share of an island that migrates."""
    random_seed: int | None = 42
    """The seed of the run where the config's own `random_seed` is null."""
    artifacts_base_path: str | None = None
    """Changes nothing here: the run folder keeps everything."""
    artifact_size_threshold: int = Field(default=32 * 1024, ge=0)
    """Bytes up to which a checkpoint keeps an artifact inside of the program's file."""
    cleanup_old_artifacts: bool = True
    """Changes nothing here: the run folder keeps everything."""
    artifact_retention_days: int = 30
    """Changes nothing here: the run folder keeps everything."""
    max_snapshot_artifacts: int | None = 100
    """Changes nothing here."""
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


class EvaluatorSection(Section):
    """How programs are scored."""

    timeout: float = Field(default=300, gt=0)
    """Seconds, for each stage."""
    max_retries: int = Field(default=3, ge=0)
    """More tries of an evaluator that raises, where `cascade_evaluation` is off."""
    memory_limit_mb: int | None = Field(default=None, ge=LEAST_MEMORY_MB)
    """The memory of a program; null: `rookery.sandbox.memory_mb`."""
    cpu_limit: float | None = Field(default=None, gt=0)
    """Changes nothing here: it is `rookery.sandbox.cpu_s`."""
    cascade_evaluation: bool = True
    """Use `evaluate_stage1` to `evaluate_stage3` where the evaluator has them."""
    cascade_thresholds: tuple[float, ...] = Field(default=(0.5, 0.75, 0.9), strict=False)
    """The score that each stage must reach before the next."""
    parallel_evaluations: int = Field(default=1, ge=1)
    """Evaluations at a time."""
    distributed: bool = False
    """The same as `rookery.executor: ray`."""
    use_llm_feedback: bool = False
    """Have a model judge programs too."""
    llm_feedback_weight: float = 0.1
    """How much that judgement counts."""
    enable_artifacts: bool = True
    """ENABLE_ARTIFACTS=false turns them off too."""
    max_artifact_storage: int = Field(default=100 * 1024 * 1024, ge=0)
    """The most bytes of artifacts that a program keeps."""


class TraceConfig(Section):
    """The log of parents and children."""

    enabled: bool = False
    """Write a trace of the evolution."""
    format: Literal["jsonl", "json", "hdf5"] = "jsonl"
    """The format of the trace."""
    include_code: bool = False
    """Have the code of programs in the trace."""
    include_prompts: bool = True
    """Have prompts and answers in the trace."""
    output_path: str | None = None
    """The file of the trace; null: in the run."""
    buffer_size: int = Field(default=10, ge=1)
    """Entries that are written together."""
    compress: bool = False
    """Write the trace compressed."""
