"""Judges' answers as metrics, beside OpenEvolve's own evaluator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery.loops.evolve.program_evaluator import merge_feedback, read_feedback

OpenEvolve = Callable[[str, Any], Any]
ANSWERS = [
    'Sure:\n```json\n{"readability": 0.5, "efficiency": 1, "reasoning": "fine"}\n```',
    'I say {"readability": 0.75, "notes": ["a"]} so.',
]


def test_metrics_are_those_of_openevolve(openevolve: OpenEvolve, tmp_path: Path) -> None:
    (tmp_path / "evaluator.py").write_text(
        "def evaluate(path):\n    return {'combined_score': 0.5, 'speed': 2.0}\n"
    )
    theirs = openevolve(
        """
import asyncio
from openevolve.config import EvaluatorConfig, PromptConfig
from openevolve.evaluator import Evaluator
from openevolve.prompt.sampler import PromptSampler
class Judges:
    weights = [0.25, 0.75]
    async def generate_all_with_context(self, system, messages):
        return DATA["answers"]
config = EvaluatorConfig(use_llm_feedback=True, llm_feedback_weight=0.2, cascade_evaluation=False)
sampler = PromptSampler(PromptConfig())
evaluator = Evaluator(config, DATA["path"], Judges(), sampler)
answer(asyncio.run(evaluator.evaluate_program("x = 1", "p")))
""",
        {"answers": ANSWERS, "path": str(tmp_path / "evaluator.py")},
    )
    feedback = read_feedback(ANSWERS, weights=[1.0, 3.0])
    assert feedback is not None and feedback.artifacts == {"reasoning": "fine", "notes": '["a"]'}
    ours = merge_feedback({"combined_score": 0.5, "speed": 2.0}, feedback, weight=0.2)
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("answer", ["no", "{", '{"reasoning": "x"}', "[1]", '{"a": NaN}', ""])
def test_an_answer_without_scores_is_no_feedback(answer: str) -> None:
    assert read_feedback([answer], weights=[1.0]) is None
    assert read_feedback([ANSWERS[0], answer], weights=[1.0, 1.0]) is None


def test_without_a_combined_score_none_is_made() -> None:
    feedback = read_feedback(ANSWERS[:1], weights=[2.0])
    assert feedback is not None
    merged = merge_feedback({"speed": 1.0}, feedback, weight=1.0)
    assert merged == {
        "speed": 1.0,
        "llm_readability": 0.5,
        "llm_efficiency": 1.0,
        "llm_average": 0.75,
    }
