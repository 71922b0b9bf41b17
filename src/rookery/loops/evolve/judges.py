"""Models that judge programs (`evaluator.use_llm_feedback`): their scores become metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from rookery.concurrency import together
from rookery.loops.evolve.endpoint import Endpoint, ModelFailed
from rookery.loops.evolve.feedback import Feedback, merge_feedback, read_feedback
from rookery.loops.evolve.prompts import Prompts
from rookery.loops.evolve.proposer import seed_of
from rookery.loops.evolve.stages import AttemptFailure
from rookery.sandbox import Artifact, Metric
from rookery.types import TokenUsage

__all__ = ["Judge", "Judgement", "Judges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One model and how much it counts."""

    endpoint: Endpoint
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What all judges said, and what that cost; usage is None when one does not report it."""

    feedback: Feedback
    usage: TokenUsage | None


class Judges:
    """Asks every judge about every program."""

    def __init__(
        self, judges: tuple[Judge, ...], *, prompts: Prompts, weight: float, seed: int
    ) -> None:
        self._judges = judges
        self._prompts = prompts
        self._weight = weight
        self._seed = seed

    async def judge(self, code: str, *, attempt: int) -> Judgement | AttemptFailure:
        """A program that could not be judged is a failure: its score would not compare."""
        prompt = self._prompts.build_feedback(code)
        seed = seed_of(self._seed, "judge", attempt)
        try:
            replies = await together(
                judge.endpoint.reply(
                    judge.endpoint.request(system=prompt.system, user=prompt.user, seed=seed)
                )
                for judge in self._judges
            )
        except ModelFailed as error:
            return AttemptFailure(kind="judge", message=str(error))
        weights = [judge.weight for judge in self._judges]
        feedback = read_feedback([reply.text for reply in replies], weights=weights)
        if feedback is None:
            message = "A judge's answer is no JSON object with a score in it."
            return AttemptFailure(kind="judge", message=message)
        usages = [reply.usage for reply in replies]
        known = [usage for usage in usages if usage is not None]
        usage = TokenUsage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            completion_tokens=sum(usage.completion_tokens for usage in known),
        )
        return Judgement(feedback=feedback, usage=usage if len(known) == len(usages) else None)

    def merge(
        self,
        metrics: Mapping[str, Metric],
        artifacts: Mapping[str, Artifact],
        judgement: Judgement,
    ) -> tuple[dict[str, Metric], dict[str, Artifact]]:
        """The evaluator's metrics and artifacts with those of the judges."""
        feedback = judgement.feedback
        merged = merge_feedback(metrics, feedback, weight=self._weight)
        return merged, {**artifacts, **feedback.artifacts}
