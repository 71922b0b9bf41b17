"""The `llm` section: which models answer, and how they are asked."""

from typing import Self

from pydantic import Field, SecretStr

from rookery.loops.evolve.config.section import Section

__all__ = ["DEFAULT_API_BASE", "LlmConfig", "ModelConfig"]

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
