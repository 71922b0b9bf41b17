"""The sections `prompt`, `database`, `evaluator` and `evolution_trace`, with 0.4's defaults."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rookery.loops.evolve.config.own import LEAST_MEMORY_MB
from rookery.loops.evolve.config.section import Section

__all__ = ["DatabaseConfig", "EvaluatorConfig", "PromptConfig", "TraceConfig"]

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
