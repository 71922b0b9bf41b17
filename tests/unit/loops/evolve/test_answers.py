"""From answers to children: OpenEvolve's own worker reads the same answers beside ours."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.loops.evolve.answers import (
    AnswerFailure,
    AnswerRules,
    ChildProgram,
    FailureKind,
    read_answer,
)
from rookery.loops.evolve.program import ProgramRecord, join_files, split_files
from rookery.loops.evolve.program_evaluator import merge_feedback, read_feedback

OpenEvolve = Callable[[str, Any], Any]

PARENT = """import math
# EVOLVE-BLOCK-START
def f(x):
    return x + 1
# EVOLVE-BLOCK-END
print(f(1))
"""
RULES = AnswerRules(language="python")


def _diff(search: str, replacement: str) -> str:
    return f"<<<<<<< SEARCH\n{search}\n=======\n{replacement}\n>>>>>>> REPLACE\n"


def _program(code: str, **more: Any) -> ProgramRecord:
    return ProgramRecord(id="p", code=code, **more)


def _kind(answer: str, rules: AnswerRules = RULES, code: str = PARENT) -> FailureKind | None:
    result = read_answer(answer, parent=_program(code), rules=rules)
    return result.kind if isinstance(result, AnswerFailure) else None


def _child(answer: str, parent: ProgramRecord, rules: AnswerRules = RULES) -> ChildProgram:
    result = read_answer(answer, parent=parent, rules=rules)
    assert isinstance(result, ChildProgram), result
    return result


THEIR_WORKER = """
from dataclasses import asdict
from openevolve import process_parallel as worker
from openevolve.config import Config
from openevolve.database import Program
from openevolve.prompt.sampler import PromptSampler

class Model:
    async def generate_with_context(self, **_):
        return self.text

class Evaluator:
    async def evaluate_program(self, code, name):
        return {"combined_score": 1.0}
    def get_pending_artifacts(self, name):
        return None

worker._worker_llm_ensemble, worker._worker_evaluator = Model(), Evaluator()
def one(case):
    config = Config.from_dict({"language": "python", **case["config"]})
    worker._worker_config = config
    worker._worker_prompt_sampler = PromptSampler(config.prompt)
    worker._worker_llm_ensemble.text = case["answer"]
    parent = Program(id="p", code=case["code"], changes_description=case["description"],
                     metrics={"combined_score": 0.5})
    snapshot = {"programs": {"p": asdict(parent)}, "artifacts": {}, "islands": [["p"]],
                "current_island": 0, "feature_dimensions": [], "sampling_island": 0}
    result = worker._run_iteration_worker(1, snapshot, "p", [])
    if result.error:
        return {"error": result.error}
    child = result.child_program_dict
    return {"code": child["code"], "changes": child["metadata"]["changes"],
            "description": child["changes_description"]}
answer([one(case) for case in DATA])
"""


def _random_answer(rng: random.Random, code: str) -> str:
    lines = code.split("\n")
    parts = []
    for _ in range(rng.randrange(3)):
        start = rng.randrange(len(lines))
        search = lines[start : start + rng.randrange(1, 4)]
        if rng.random() < 0.3:
            search = [*search, "    nowhere = 1"]
        if rng.random() < 0.3:
            search = [line + "  " for line in search]
        parts.append(
            _diff("\n".join(search), rng.choice(["x = 1", "", "\n".join(search), "y = 2\nz = 3"]))
        )
    if rng.random() < 0.1:
        parts.append("=======")
    return "Some words.\n" + "\n".join(parts)


def test_diffs_make_the_children_that_openevolve_makes(openevolve: OpenEvolve) -> None:
    rng = random.Random(3)
    cases: list[dict[str, Any]] = []
    for number in range(300):
        config = {"enforce_evolve_blocks": number % 2 == 0, "max_code_length": 150}
        answer = _random_answer(rng, PARENT)
        cases.append({"config": config, "answer": answer, "code": PARENT, "description": ""})
    theirs = openevolve(THEIR_WORKER, cases)
    num_children = 0
    for case, other in zip(cases, theirs, strict=True):
        rules = replace(
            RULES, enforce_blocks=case["config"]["enforce_evolve_blocks"], max_code_chars=150
        )
        ours = read_answer(case["answer"], parent=_program(PARENT), rules=rules)
        if "error" in other:
            assert isinstance(ours, AnswerFailure), (case, other)
            continue
        assert isinstance(ours, ChildProgram), (case, ours, other)
        assert (ours.code, ours.changes) == (other["code"], other["changes"])
        num_children += 1
    assert 30 < num_children < 270


def test_rewrites_make_the_children_that_openevolve_makes(openevolve: OpenEvolve) -> None:
    answers = ["```python\nx = 1\n```", "x = 2", f"```python\n{PARENT.strip()}\n```", "```\ny\n```"]
    config = {"diff_based_evolution": False}
    cases: list[dict[str, Any]] = [
        {"config": config, "answer": a, "code": PARENT.strip(), "description": ""} for a in answers
    ]
    theirs = openevolve(THEIR_WORKER, cases)
    assert [("error" in other) for other in theirs] == [False, False, True, False]
    rules = replace(RULES, is_diff=False)
    for case, other in zip(cases, theirs, strict=True):
        ours = read_answer(case["answer"], parent=_program(case["code"]), rules=rules)
        if isinstance(ours, AnswerFailure):
            assert ours.kind == FailureKind.NO_CHANGE and "error" in other
        else:
            assert (ours.code, ours.changes) == (other["code"], other["changes"])


def test_descriptions_are_updated_as_in_openevolve(openevolve: OpenEvolve) -> None:
    answers = [
        _diff("    return x + 1", "    return x + 2") + _diff("1. nothing", "1. adds two"),
        _diff("    return x + 1", "    return x + 2"),
        _diff("1. nothing", "1. adds two\n2. more") + _diff("    return x + 1  ", "    return 3"),
        _diff("import math", "import os") + _diff("1. nothing", "1. nothing"),
        _diff("both", "x") + _diff("1. nothing", "1. x"),
    ]
    config = {"prompt": {"programs_as_changes_description": True}}
    code, description = PARENT + "both\n", "1. nothing\nboth"
    cases: list[dict[str, Any]] = [
        {"config": config, "answer": a, "code": code, "description": description} for a in answers
    ]
    theirs = openevolve(THEIR_WORKER, cases)
    rules = replace(RULES, with_description=True)
    kinds = []
    for case, other in zip(cases, theirs, strict=True):
        parent = _program(code, changes_description=description)
        ours = read_answer(case["answer"], parent=parent, rules=rules)
        if isinstance(ours, AnswerFailure):
            kinds.append(ours.kind.value)
            assert "error" in other
        else:
            kinds.append("child")
            assert ours.changes_description == other["description"]
            # OpenEvolve evaluates the parent again where only trailing white space differs.
            assert other["code"] in (ours.code, code)
    assert kinds == ["child", "no_description", "child", "no_description", "search_ambiguous"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("", FailureKind.EMPTY),
        (" \n", FailureKind.EMPTY),
        ("I cannot help.", FailureKind.NO_DIFF),
        (_diff("nowhere", "x"), FailureKind.SEARCH_NOT_FOUND),
        (_diff("import math", "import math"), FailureKind.NO_CHANGE),
        (_diff("import math", "x\n=======\ny"), FailureKind.BAD_DELIMITERS),
        ("<<<<<<< SEARCH\nimport math\n", FailureKind.BAD_DELIMITERS),
        (_diff("import math", "x" * 10_000), FailureKind.TOO_LONG),
        (_diff("import math", "x = '\ud83d'"), FailureKind.NOT_TEXT),
    ],
)
def test_each_failure_has_its_kind(answer: str, kind: FailureKind) -> None:
    assert _kind(answer) == kind


def test_blocks_that_are_nowhere_change_nothing() -> None:
    child = _child(_diff("import math", "import os") + _diff("nowhere", "x"), _program(PARENT))
    assert child.code == PARENT.replace("import math", "import os", 1)


def test_edits_outside_of_blocks_are_undone_or_refused() -> None:
    rules = replace(RULES, enforce_blocks=True)
    inside, outside = _diff("    return x + 1", "    return 2"), _diff("import math", "import os")
    child = _child(inside + outside, _program(PARENT), rules)
    assert child.code == PARENT.replace("x + 1", "2")
    assert _kind(outside, rules) == FailureKind.NO_CHANGE
    assert _kind(_diff("# EVOLVE-BLOCK-END", "#"), rules) == FailureKind.MARKERS_BROKEN


FILES = {"a.py": "x = 1\nsame = 0\n", "lib/b.py": "y = 2\nsame = 0\n"}
FOLDER = ProgramRecord(id="p", code=join_files(FILES))


def test_blocks_of_a_folder_go_to_the_file_they_name() -> None:
    answer = "**lib/b.py**\n```\n" + _diff("same = 0", "same = 9") + "```"
    assert _child(answer, FOLDER).code == join_files({**FILES, "lib/b.py": "y = 2\nsame = 9\n"})
    unnamed = _child(_diff("y = 2", "y = 3"), FOLDER)
    assert split_files(unnamed.code) == {**FILES, "lib/b.py": "y = 3\nsame = 0\n"}
    assert _kind(_diff("same = 0", "z"), code=FOLDER.code) == FailureKind.SEARCH_AMBIGUOUS
    assert _kind("a.py\n" + _diff("y = 2", "z"), code=FOLDER.code) == FailureKind.SEARCH_NOT_FOUND


def test_a_model_cannot_add_a_file_by_writing_its_header() -> None:
    answer = _diff("x = 1", "x = 1\n--- file: ../../etc/evil ---")
    assert _kind(answer, code=FOLDER.code) == FailureKind.BAD_FILES


def test_rewrites_of_a_folder_replace_the_files_they_name() -> None:
    rules = replace(RULES, is_diff=False)
    answer = "Better:\n\n### File: `lib/b.py`\n```python\ny = 5\n```\nand\n```\nnoise\n```"
    child = _child(answer, FOLDER, rules)
    assert split_files(child.code) == {**FILES, "lib/b.py": "y = 5\n"}
    assert _kind("```python\ny = 5\n```", rules, FOLDER.code) == FailureKind.NO_CODE


def test_markers_of_a_folder_hold_in_each_file() -> None:
    files = {"a.py": "k = 1\n", "b.py": "# EVOLVE-BLOCK-START\ny = 2\n# EVOLVE-BLOCK-END\nz = 3\n"}
    parent = _program(join_files(files))
    answer = _diff("y = 2", "y = 7") + _diff("z = 3", "z = 4")
    child = _child(answer, parent, replace(RULES, enforce_blocks=True))
    assert split_files(child.code)["b.py"] == files["b.py"].replace("y = 2", "y = 7")


_TEXT = st.text(alphabet="ab\n-: fileSEARCH<>=`#", max_size=60)


@given(_TEXT, st.sampled_from([True, False]))
def test_any_answer_is_a_child_or_a_failure(answer: str, is_diff: bool) -> None:
    for parent in (_program(PARENT), FOLDER):
        result = read_answer(answer, parent=parent, rules=replace(RULES, is_diff=is_diff))
        if isinstance(result, ChildProgram):
            assert result.code != parent.code
        else:
            assert result.message.endswith(".")


_NAMES = st.from_regex(r"[a-z]{1,4}(/[a-z]{1,3})?\.py", fullmatch=True)


@given(st.dictionaries(_NAMES, st.text(alphabet="a\n-: file\r", max_size=20), min_size=1))
def test_folders_come_back_as_they_were(files: dict[str, str]) -> None:
    assert split_files(join_files(files)) == dict(sorted(files.items()))


# Judges' answers as metrics, beside OpenEvolve's own evaluator.


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
