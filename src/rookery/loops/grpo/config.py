"""Config of a grpo run. Every default is the vetted setting."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.engines import EngineChoice, engine_from_folder, launch_of, local_model
from rookery.environments import GameConfig
from rookery.environments.atropos import AtroposConfig, VerifiersConfig
from rookery.loops.comparison import ReportConfig, Samples
from rookery.loops.grpo.batch import AdvantageName
from rookery.paths import expanded
from rookery.runs.budget import BudgetConfig
from rookery.runs.trackers import TrackerName
from rookery.tasks.python_function import function_from_folder
from rookery.tasks.scorers import PythonConfig
from rookery.tasks.taskset import TasksetConfig, from_folder
from rookery.train import FullWeights, LoraConfig, TrainerConfig
from rookery.train.losses import PolicyLossConfig
from rookery.train.losses.policy import Grpo
from rookery.train.schedule import AdamWConfig, ScheduleConfig
from rookery.types import SamplingParams

__all__ = ["BridgeName", "DrawingConfig", "GrpoConfig", "SweepConfig"]

BridgeName = Literal["auto", "alias", "merge", "slot", "adapter", "copy", "reload", "restart"]
_FULL_BRIDGES = ("auto", "alias", "copy", "reload", "restart")
_ADAPTER_BRIDGES = ("auto", "merge", "slot", "adapter")


class DrawingConfig(Config):
    """Sampling parameters of the answers that the policy is trained on."""

    max_tokens: int = Field(default=256, ge=1)
    """Maximum length of an answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature. The trainer divides by it too, to train the sampled distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most likely tokens that add up to this probability; 1 keeps every token. With
    top_p, top_k or min_p, the trainer normalises over the same tokens."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many most likely tokens; 0 keeps every token."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens whose probability is below this share of the most likely token's."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer."""

    def params(self, *, group_size: int) -> SamplingParams:
        params = SamplingParams(n=group_size, **self.model_dump())
        return replace(params, return_kept=params.is_cut)


FIXED = (
    "engine", "tokenizer", "share", "bridge", "tasksets", "lora", "full", "init_from", "reference",
    "environment", "trainer", "keep", "keep_rollouts", "track", "report", "sweep",
)  # fmt: skip
"""Keys that all adapters of a sweep share."""


MOST_ADAPTERS = 10_000
"""Limit of one sweep: each adapter has its own run and its own slot in the trainer."""


class SweepConfig(Config):
    """The adapters that one process trains together."""

    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Values by key: {learning_rate: [1e-5, 1e-4], loss.type: [grpo, dr_grpo]}, all combined."""
    seeds: int = Field(default=1, ge=1)
    """Adapters per combination. Their seeds are `seed`, `seed` + 1, ..."""

    @field_validator("vary", mode="before")
    @classmethod
    def _normalise_keys(cls, vary: object) -> object:
        """Accept `learning-rate` for `learning_rate`, as flags do."""
        if not isinstance(vary, Mapping):
            return vary
        keys = [str(key).replace("-", "_") for key in vary]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"vary has {twice} twice: write all its values in one list")
        return dict(zip(keys, vary.values(), strict=True))

    @property
    def num_adapters(self) -> int:
        return self.seeds * math.prod(map(len, self.vary.values()))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_adapters > MOST_ADAPTERS:
            raise ValueError(
                f"vary and seeds make {self.num_adapters:,} adapters; one run trains at most "
                f"{MOST_ADAPTERS:,}: give fewer values or seeds"
            )
        for key, values in self.vary.items():
            first = key.partition(".")[0]
            if first in FIXED:
                raise ValueError(
                    f"vary has {key}, and adapters of one sweep have {first} in common: give each "
                    "value a run of its own. Learning rate, loss, drawing, optimizer and the like "
                    "can be varied"
                )
            texts = [str(value) for value in values]
            if not values or len(set(texts)) < len(texts):
                raise ValueError(
                    f"vary has {key} with the values {', '.join(texts) or 'none'}: give one or "
                    "more, each once"
                )
        if "seed" in self.vary and self.seeds > 1:
            raise ValueError("vary has seed, and seeds is given too: leave one of them out")
        return self


def _section(value: object) -> object:
    """Read `full: true` as an empty section and `full: false` as none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def _default_to_python(value: object) -> object:
    return {"type": "python", **value} if isinstance(value, dict) else value


def _default_to_grpo(value: object) -> object:
    return {"type": "grpo", **value} if isinstance(value, dict) else value


AnyEnvironment = Annotated[
    Annotated[GameConfig | AtroposConfig | VerifiersConfig, Field(discriminator="type")],
    BeforeValidator(_default_to_python),
]


class GrpoConfig(ScheduleConfig):
    """Config of one training by group-relative policy optimisation."""

    engine: EngineChoice = EngineConfig()
    """The engine that draws answers."""
    tokenizer: str = ""
    """A model folder or Hugging Face id. Empty: the engine's model. For servers by URL it is
    required, and the trainer loads it."""
    share: bool = False
    """true: the embedded engine and the trainer share one copy of the weights: half the memory, but
    slower answers on a CPU, where a separate engine packs its weights. false: a copy for each."""
    bridge: BridgeName = "auto"
    """How new weights reach the servers of a fleet. For all weights: `alias` (trainer and server
    share one copy), `copy` (through memory), `reload` (through a folder) or `restart`. For an
    adapter: `merge` (added to the weights of a server on the trainer's GPU), `slot` (from memory)
    or `adapter` (a PEFT folder). auto: the first that fits; the run prints the reason."""
    tasksets: tuple[TasksetConfig, ...] = ()
    """The run trains on `search`, chooses the checkpoint on `select` and measures on `report`.
    Optional with an Atropos environment: the newest checkpoint is then kept, unmeasured."""
    lora: LoraConfig = LoraConfig()
    """Shape of a new adapter."""
    full: Annotated[FullWeights | None, BeforeValidator(_section)] = None
    """`true` trains all weights of the model, with float32 masters, and ignores `lora`. A section
    chooses layers and optimizer: {layers: 4, optimizer: adamw_8bit}."""
    init_from: Path | None = None
    """A PEFT folder to start from, such as the `winner` of a genome run; `lora` is then ignored.
    With `full`, a model folder, such as the `trained` of another run with `full`. Empty: a new
    adapter that changes nothing yet, or with `full` the engine's model."""
    steps: int = Field(default=100, ge=1)
    """Number of optimizer steps."""
    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per step."""
    group_size: int = Field(default=8, ge=1)
    """Answers per task."""
    drawing: DrawingConfig = DrawingConfig()
    environment: AnyEnvironment | None = None
    """A game of several turns in place of the tasksets' scorers, played group_size times per task.
    `{type: atropos}` and `{type: verifiers}` take groups played elsewhere. null: one answer per
    prompt."""
    max_extra_groups: int | None = Field(default=None, ge=0)
    """A group whose rewards are all equal teaches nothing, so the next task replaces it. This
    limits the replacements per step. null: groups_per_step."""
    max_failed_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """The run stops if a larger share of a step's rollouts fails."""
    advantages: AdvantageName | None = None
    """`group_relative` (GRPO), `leave_one_out` (RLOO), `no_std` (Dr. GRPO), or `shuffled`, a
    control that must not learn. null: `no_std` with the loss dr_grpo, else `group_relative`."""
    loss: Annotated[PolicyLossConfig, BeforeValidator(_default_to_grpo)] = Grpo()
    """The policy loss with its options: `grpo`, `dr_grpo`, `dapo`, `bnpo`, `gspo`, `cispo`, `ppo`,
    `importance_sampling` or `reinforce`. Without a `type` it is `grpo`."""
    reference: Path | None = None
    """Policy that the KL term (`loss.kl`) compares with: a PEFT folder, or a model folder, the
    engine's own for the model without an adapter. Empty: the policy that the run starts from."""
    learning_rate: float = Field(default=1e-4, gt=0.0)
    """Peak learning rate, reached after the warm-up. For adapters, use 1e-3 for models of a million
    weights and 1e-5 to 1e-4 for larger ones. With `full`, use about a tenth of an adapter's."""
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 along a half cosine or a line."""
    warmup: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of all steps over which the learning rate rises from 0."""
    optimizer: AdamWConfig = AdamWConfig()
    trainer: TrainerConfig = TrainerConfig()
    staleness: Literal[0, 1] | None = None
    """0: step k draws with the weights of step k, then trains. 1: step k draws with the weights of
    step k - 1 while that step is trained, so that engine and trainer work at the same time. null: 1
    if a server is started on the trainer's GPU, else 0."""
    budget: BudgetConfig = BudgetConfig()
    """Limits that may end the run before `steps`. The learning rate still follows `steps`."""
    publish_every: int = Field(default=1, ge=1)
    """Number of steps between hand-overs of new weights to the engine."""
    save_every: int = Field(default=20, ge=1)
    """Number of steps between checkpoints. Each checkpoint is measured on the `select` tasks."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints kept besides the best one."""
    keep_rollouts: bool = False
    """Keep the tokens of every step. false: the run removes those of steps before the last
    checkpoint. Texts and rewards are always kept, for the page."""
    max_gap: float = Field(default=0.2, gt=0.0)
    """The run stops if the log-probabilities of engine and trainer under the same weights differ by
    more than this on average, in nats. In bfloat16, rounding alone reaches 0.05."""
    report: ReportConfig = ReportConfig()
    """`{samples: 8}` draws 8 further answers per report task for pass@k, as `drawing` says."""
    track: tuple[TrackerName, ...] = ()
    """Trackers that draw the run's curves: `tensorboard`, `trackio`, `wandb` (extra `track`)."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    sweep: SweepConfig | None = None
    """Train many adapters at once: all combinations of some values, each with several seeds."""

    @property
    def num_policies(self) -> int:
        """Number of adapters that are trained together."""
        return 1 if self.sweep is None else self.sweep.num_adapters

    @property
    def needs_reference(self) -> bool:
        """True if the loss has a KL term."""
        return "reference_logprobs" in self.loss.needs

    @property
    def advantage_name(self) -> AdvantageName:
        """The advantages in use, with the default resolved."""
        return self.advantages or ("no_std" if self.loss.type == "dr_grpo" else "group_relative")

    @property
    def samples(self) -> Samples | None:
        """Further answers drawn per report task, for pass@k."""
        if self.report.samples is None:
            return None
        params = self.drawing.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        return Samples(self.report.samples, params)

    @property
    def max_drawn_tokens(self) -> int:
        """Maximum number of tokens that one rollout draws."""
        if isinstance(self.environment, AtroposConfig | VerifiersConfig):
            return self.environment.max_token_len
        return self.drawing.max_tokens if self.environment is None else self.environment.max_tokens

    @property
    def game(self) -> GameConfig | None:
        """The game that this process plays, if there is one."""
        return self.environment if isinstance(self.environment, GameConfig) else None

    @property
    def atropos(self) -> AtroposConfig | None:
        """The Atropos gateway that groups come through, if there is one."""
        if isinstance(self.environment, VerifiersConfig):
            return self.environment.as_atropos(
                group_size=self.group_size,
                temperature=self.drawing.temperature,
                max_tokens=self.drawing.max_tokens,
            )
        return self.environment if isinstance(self.environment, AtroposConfig) else None

    @property
    def judged_tasksets(self) -> tuple[TasksetConfig, ...]:
        """The tasksets. If a game judges, they need neither scorer nor reference."""
        if self.game is None:
            return self.tasksets
        scorer = PythonConfig(function=self.game.function)
        return tuple(taskset.model_copy(update={"scorer": scorer}) for taskset in self.tasksets)

    @property
    def max_groups(self) -> int:
        """Maximum number of tasks that one step draws."""
        extra = self.groups_per_step if self.max_extra_groups is None else self.max_extra_groups
        return self.groups_per_step + extra

    def drawn_at(self, step: int) -> int:
        """Return the step whose weights draw the answers of `step`.

        With staleness 1 and publish_every 2, steps 0 to 5 are drawn at 0, 0, 0, 2, 2, 4.
        """
        newest = max(0, step - (self.staleness or 0))
        return newest - newest % self.publish_every

    def is_checkpoint(self, step: int) -> bool:
        """Return True if the weights before this step are saved. The last weights always are."""
        return step % self.save_every == 0 or step == self.steps

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                "group_size is 1, and an answer is judged against the others of its group: write "
                "2 or more, 8 for example"
            )
        if self.save_every % self.publish_every:
            raise ValueError(
                f"save_every is {self.save_every} and publish_every {self.publish_every}: a "
                "checkpoint is measured with published weights, so write a multiple of "
                f"publish_every, {self.publish_every * -(-self.save_every // self.publish_every)} "
                "for example"
            )
        if self.share and self.engine.type != "embedded":
            raise ValueError(
                "share is for the embedded engine; servers have their own weights: write share: "
                "false"
            )
        if self.engine.rounding is not None:
            raise ValueError(
                f"engine.weights is {self.engine.rounding}, and a policy is trained in float32: "
                "its answers would come from other weights than are trained. Leave weights out"
            )
        if self.share and self.full is not None and self.publish_every > 1:
            raise ValueError(
                f"publish_every is {self.publish_every}, and with full and share the engine "
                "computes with the weights that each step changes: write publish_every: 1, or "
                "share: false"
            )
        self._check_reference()
        self._check_service()
        self._check_bridge()
        self._check_tasks()
        if self.sweep is not None and (self.full is not None or self.atropos is not None):
            reason = "full trains one model" if self.full is not None else "environment feeds one"
            raise ValueError(f"sweep trains many adapters, and {reason}: leave one of them out")
        if self.sweep is not None and self.budget.has_limit:
            raise ValueError(
                "budget ends one training, and sweep trains many to the same step: write steps, "
                "or leave sweep out"
            )
        if self.game is not None and self.report.samples is not None:
            raise ValueError(
                "report.samples is for answers to prompts, and environment plays games: leave one "
                "of them out"
            )
        scored = [taskset for taskset in self.tasksets if taskset.scorer is not None]
        if self.game is not None and scored:
            raise ValueError(
                "a taskset has a scorer and environment is given too; the game returns the reward: "
                "leave one of them out"
            )
        return self

    def _check_reference(self) -> None:
        if self.reference is not None and self.loss.kl is None:
            raise ValueError(
                f"reference is {self.reference}, and the loss has no KL term to it: write loss.kl, "
                "{weight: 0.04} for example, or leave reference out"
            )

    def _check_service(self) -> None:
        if self.engine.type != "service":
            return
        refused = {
            "full": (self.full is not None, "which trains all weights"),
            "sweep": (self.sweep is not None, "which trains many adapters in one process"),
            "environment": (self.atropos is not None, "whose programs ask an engine here"),
        }
        for key, (is_given, why) in refused.items():
            if is_given:
                raise ValueError(
                    f"{key} is given, {why}, and a service trains one adapter at a time of tasks "
                    f"and games: leave {key} out, or take an engine of type embedded or fleet"
                )

    def _check_tasks(self) -> None:
        if self.atropos is None:
            if not self.tasksets:
                raise ValueError(
                    "tasksets is empty, and there is nothing to train on: give one, or "
                    "environment: {type: atropos}"
                )
            return
        if not (self.atropos.environments or self.atropos.url or self.atropos.port):
            raise ValueError(
                "environment starts no environments, names no url and has port 0, where no program "
                "finds the gateway: write environments, url, or a port for environments that are "
                "started elsewhere"
            )
        if self.drawing.params(group_size=2).is_cut:
            raise ValueError(
                "drawing has top_p, top_k or min_p, and the Atropos API has no room for what they "
                "cut off: leave them out"
            )
        if self.staleness:
            raise ValueError(
                "staleness is for tasks that are drawn here; Atropos environments draw all the "
                "time: leave it out"
            )

    def _check_bridge(self) -> None:
        if self.engine.type != "fleet" and self.bridge != "auto":
            raise ValueError(
                f"bridge is {self.bridge}, and the engine is no vLLM server: new weights need no "
                "bridge. Leave bridge out, or take engine: {type: fleet, ...}"
            )
        fitting = _ADAPTER_BRIDGES if self.full is None else _FULL_BRIDGES
        if self.bridge not in fitting:
            trained = "an adapter is" if self.full is None else "all weights are"
            raise ValueError(
                f"bridge is {self.bridge}, and {trained} trained: write one of {', '.join(fitting)}"
            )
        if self.bridge == "merge" and self.sweep is not None:
            raise ValueError(
                "bridge is merge, which adds one adapter to the weights of a server, and sweep "
                "trains many: write bridge: slot, or leave bridge out"
            )
        launch = launch_of(self.engine)
        if self.bridge == "alias" and launch is not None and launch.spare_gpus:
            raise ValueError(
                f"bridge is alias and engine.launch.spare_gpus is {launch.spare_gpus}: one copy of "
                "the weights is on one GPU. Leave out spare_gpus, or write bridge: copy"
            )
        if self.bridge == "alias" and self.publish_every > 1:
            raise ValueError(
                f"publish_every is {self.publish_every}, and with alias every step changes the "
                "weights that the servers compute with: write publish_every: 1, or bridge: copy"
            )

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its paths resolved against the folder of its file."""
        update: dict[str, object] = {
            "tasksets": tuple(from_folder(taskset, folder) for taskset in self.tasksets),
            "engine": engine_from_folder(self.engine, folder),
            "tokenizer": local_model(self.tokenizer, folder),
        }
        if isinstance(self.environment, GameConfig):
            function = function_from_folder(self.environment.function, folder)
            update["environment"] = self.environment.model_copy(update={"function": function})
        if isinstance(self.environment, AtroposConfig | VerifiersConfig):
            update["environment"] = self.environment.from_folder(folder)
        for name, path in (("init_from", self.init_from), ("reference", self.reference)):
            if path is not None:
                update[name] = expanded(path, folder).resolve()
        return self.model_copy(update=update)
