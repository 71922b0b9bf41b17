"""Config of an evolution: its sections, and the top-level keys."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rookery.loops.evolve.answers import DIFF_PATTERN, AnswerRules, SummaryLimits
from rookery.loops.evolve.config_sections import (
    DatabaseConfig,
    EvaluatorSection,
    EvolveBudgetConfig,
    LearnConfig,
    LlmConfig,
    ModelConfig,
    PromptConfig,
    RookeryConfig,
    SandboxSettings,
    Section,
    TasksConfig,
    TraceConfig,
)

__all__ = [
    "DatabaseConfig",
    "EvaluatorSection",
    "EvolveBudgetConfig",
    "EvolveConfig",
    "LearnConfig",
    "LlmConfig",
    "ModelConfig",
    "PromptConfig",
    "RookeryConfig",
    "SandboxSettings",
    "TasksConfig",
    "TraceConfig",
]


class EvolveConfig(Section):
    """Config of one evolution of programs."""

    max_iterations: int = Field(default=10_000, ge=1)
    """Number of iterations of the run."""
    checkpoint_interval: int = Field(default=100, ge=1)
    """Iterations between checkpoints."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Minimum level of log messages."""
    log_dir: str | None = None
    """Folder of the log. null: `logs/` of the run."""
    random_seed: int | None = 42
    """Seed of the run. Takes precedence over `database.random_seed`."""
    language: str | None = None
    """Language of the program. null: detected from its file name and text."""
    file_suffix: str = ".py"
    """File suffix of programs."""
    llm: LlmConfig = LlmConfig()
    prompt: PromptConfig = PromptConfig()
    database: DatabaseConfig = DatabaseConfig()
    evaluator: EvaluatorSection = EvaluatorSection()
    evolution_trace: TraceConfig = TraceConfig()
    diff_based_evolution: bool = True
    """true: answers are SEARCH/REPLACE blocks. false: answers are whole programs."""
    max_code_length: int = Field(default=10_000, ge=1)
    """Maximum length of a program, in characters."""
    enforce_evolve_blocks: bool = False
    """Undo edits outside of EVOLVE-BLOCKs."""
    diff_pattern: str = DIFF_PATTERN
    """Regular expression of one edit. Group 1 is the text to find, group 2 its replacement."""
    early_stopping_patience: int | None = None
    """End the run after this many iterations without improvement. null: never."""
    convergence_threshold: float = 0.001
    """Smallest improvement that resets the patience."""
    early_stopping_metric: str = "combined_score"
    """Metric that the patience watches."""
    max_tasks_per_child: int | None = None
    """No effect."""
    rookery: RookeryConfig = RookeryConfig()

    @model_validator(mode="before")
    @classmethod
    def _default_for_prompts(cls, document: Any) -> Any:
        """For prompts, default to Pareto selection and require whole answers."""
        section = document.get("rookery") if isinstance(document, dict) else None
        if not isinstance(section, dict) or section.get("tasks") is None:
            return document
        database = document.get("database") or {}
        if isinstance(database, dict) and database.get("strategy") is None:
            database = {"num_islands": 1, **database, "strategy": "pareto"}
        return {**document, "database": database, "diff_based_evolution": False}

    @field_validator("diff_pattern")
    @classmethod
    def _pattern_has_two_groups(cls, pattern: str) -> str:
        try:
            num_groups = re.compile(pattern, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from None
        if num_groups < 2:
            raise ValueError(
                f"{pattern!r} has {num_groups} groups; it needs two: what to find and what to put "
                "there."
            )
        return pattern

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.database.strategy == "pareto" and self.rookery.tasks is None:
            raise ValueError(
                "database.strategy is pareto, which needs rookery.tasks: it draws prompts by the "
                "tasks that they are best on. Write adaptive or openevolve."
            )
        if self.prompt.programs_as_changes_description and not self.diff_based_evolution:
            raise ValueError(
                "prompt.programs_as_changes_description needs diff_based_evolution: true, as a "
                "whole program cannot also update its description."
            )
        return self

    @model_validator(mode="after")
    def _prompts_are_possible(self) -> Self:
        section = self.rookery
        if section.tasks is None:
            if section.budget.max_rollouts is not None:
                raise ValueError(
                    "rookery.budget.max_rollouts is for prompts: set rookery.tasks too"
                )
            return self
        if section.engine is None:
            raise ValueError(
                "rookery.tasks are answered by a model of rookery.engine, and none is named: write "
                "engine: {model: FOLDER} or {type: fleet, ...}, or give --model"
            )
        if section.tasks.model not in section.engine_models:
            known = ", ".join(section.engine_models)
            raise ValueError(
                f"rookery.tasks.model is {section.tasks.model!r}; the engine's models are {known}"
            )
        for key, is_set in (("tune", section.tune is not None), ("confirm", section.confirm > 0)):
            if is_set:
                raise ValueError(f"rookery.{key} is for programs, and rookery.tasks is set")
        return self

    @property
    def seed(self) -> int | None:
        """Seed of the run. None: the run draws one and records it."""
        return self.database.random_seed if self.random_seed is None else self.random_seed

    @property
    def executor(self) -> Literal["local", "ray", "modal"]:
        """The executor. `evaluator.distributed` means Ray, unless another executor is named."""
        return self.rookery.executor or ("ray" if self.evaluator.distributed else "local")

    @property
    def workers(self) -> int:
        """Number of concurrent evaluations."""
        return self.rookery.workers or self.evaluator.parallel_evaluations

    @property
    def lag(self) -> int:
        """Deterministic mode: how many attempts back the results lie that an attempt sees."""
        return self.rookery.lag or self.rookery.in_flight

    def answer_rules(self, language: str) -> AnswerRules:
        """Return the rules for reading answers in this language."""
        return AnswerRules(
            language=language,
            is_diff=self.diff_based_evolution,
            diff_pattern=self.diff_pattern,
            max_code_chars=self.max_code_length,
            enforce_blocks=self.enforce_evolve_blocks,
            with_description=self.prompt.programs_as_changes_description,
            initial_description=self.prompt.initial_changes_description,
            is_prompt=self.rookery.tasks is not None,
            summary=SummaryLimits(
                max_line_chars=self.prompt.diff_summary_max_line_len,
                max_lines=self.prompt.diff_summary_max_lines,
            ),
        )
