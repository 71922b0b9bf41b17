"""The records that flow between the parts: frozen, complete when built, no behaviour.

Task -> SampleRequest -> Completion -> Rollout -> Group -> Datum -> Adapter -> ModelRef
"""

from rookery.types.jobs import (
    Job,
    JobCancelled,
    JobDone,
    JobFailed,
    JobOutcome,
    WorkerInfo,
    WorkerLost,
)
from rookery.types.models import (
    Adapter,
    Json,
    LoraFactors,
    ModelRef,
    ModelWeights,
    TokenIds,
    Weights,
)
from rookery.types.rollouts import (
    Draw,
    Evaluation,
    Group,
    Rollout,
    TokenSequence,
)
from rookery.types.sampling import (
    Completion,
    CompletionDelta,
    FinishReason,
    KeptTokens,
    Penalties,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TextReply,
    TextRequest,
    TokenUsage,
    TopLogprobs,
    VersionSpan,
)
from rookery.types.tasks import (
    Message,
    Task,
)
from rookery.types.training import (
    Datum,
    LoraShape,
    OptimStep,
    StepOutput,
    TrainOutput,
    TrainRequest,
)

__all__ = [
    "Adapter",
    "Completion",
    "CompletionDelta",
    "Datum",
    "Draw",
    "Evaluation",
    "FinishReason",
    "Group",
    "Job",
    "JobCancelled",
    "JobDone",
    "JobFailed",
    "JobOutcome",
    "Json",
    "KeptTokens",
    "LoraFactors",
    "LoraShape",
    "Message",
    "ModelRef",
    "ModelWeights",
    "OptimStep",
    "Penalties",
    "Rollout",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "StepOutput",
    "Task",
    "TextReply",
    "TextRequest",
    "TokenIds",
    "TokenSequence",
    "TokenUsage",
    "TopLogprobs",
    "TrainOutput",
    "TrainRequest",
    "VersionSpan",
    "Weights",
    "WorkerInfo",
    "WorkerLost",
]
