"""What models say of a program's quality (`evaluator.use_llm_feedback`), as further metrics.

feedback = read_feedback(['{"readability": 0.8, "reasoning": "short"}'], weights=[1.0])
merge_feedback({"combined_score": 0.5}, feedback, weight=0.1)
{"combined_score": 0.59, "llm_readability": 0.08, "llm_average": 0.08}
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rookery.loops.evolve.fitness import is_number
from rookery.loops.evolve.program import Metrics

__all__ = ["Feedback", "merge_feedback", "read_feedback"]

_FENCED = re.compile(r"```json\n(.*?)\n```", re.DOTALL)
_SHARE = 0.3
"""Of the judges in combined_score. OpenEvolve's number, whatever `llm_feedback_weight` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Scores by name, averaged over judges by their weights, and what else they said."""

    scores: dict[str, float]
    artifacts: dict[str, str]


def read_feedback(answers: Sequence[str], *, weights: Sequence[float]) -> Feedback | None:
    """The judges' scores; None if an answer is no JSON object or has no score."""
    scores: dict[str, float] = {}
    artifacts: dict[str, str] = {}
    for answer, weight in zip(answers, weights, strict=True):
        said = _read_object(answer)
        numbers = {name: float(value) for name, value in said.items() if is_number(value)}
        if not numbers:
            return None
        for name, value in numbers.items():
            scores[name] = scores.get(name, 0.0) + value * weight / sum(weights)
        others = {name: value for name, value in said.items() if name not in numbers}
        artifacts |= {name: _text(value) for name, value in others.items()}
    return Feedback(scores=scores, artifacts=artifacts)


def merge_feedback(metrics: Metrics, feedback: Feedback, *, weight: float) -> dict[str, Any]:
    """The evaluator's metrics with `llm_<name>`, `llm_average`, and combined_score mixed anew."""
    merged = dict(metrics)
    merged |= {f"llm_{name}": value * weight for name, value in feedback.scores.items()}
    average = sum(feedback.scores.values()) / len(feedback.scores)
    merged["llm_average"] = average * weight
    if is_number(metrics.get("combined_score")):
        merged["combined_score"] = metrics["combined_score"] * (1 - _SHARE) + average * _SHARE
    return merged


def _read_object(answer: str) -> dict[str, Any]:
    fenced = _FENCED.search(answer)
    text = fenced[1] if fenced else answer[answer.find("{") : answer.rfind("}") + 1]
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
