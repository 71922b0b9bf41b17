"""Prompts: letter by letter those of OpenEvolve when its own templates are the user's folder."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, PromptConfig
from rookery.loops.evolve.program import ProgramRecord, find_fitness, join_files
from rookery.loops.evolve.prompts import (
    DEFAULTS,
    Asked,
    Prompts,
    ShownPrograms,
    hide_secrets,
    load_templates,
    show_artifacts,
)

OpenEvolve = Callable[[str, Any], Any]

THEIR_PROMPTS = """
from openevolve.config import PromptConfig
from openevolve.prompt.sampler import PromptSampler
def one(case):
    return PromptSampler(PromptConfig(**case["config"])).build_prompt(**case["prompt"])
answer([one(case) for case in DATA])
"""


def _program(rng: random.Random, name: str) -> ProgramRecord:
    """Metrics between 0.3 and 0.9, for which OpenEvolve's fragments are not broken."""
    metrics: dict[str, Any] = {"speed": rng.uniform(0.31, 0.89), "note": "good"}
    if rng.random() < 0.5:
        metrics["combined_score"] = rng.uniform(0.31, 0.89)
    parents = {key: value + rng.choice([-0.1, 0.1]) for key, value in list(metrics.items())[:1]}
    if "combined_score" in metrics:
        parents["combined_score"] = 0.5
    code = rng.choice(
        [
            "import numpy as np\n" + "x = 1\n" * 60,
            "class A:\n    def __init__(self):\n        pass\n",
            "for i in []:\n    while 0: pass\n" * 10,
            "y = 2\n" * 20,
        ]
    )
    return ProgramRecord(
        id=name,
        code=code,
        metrics=metrics,
        parent_metrics=parents,
        changes=rng.choice(["", "long words " * 20]),
        changes_description=rng.choice(["", "1. first\n2. second"]),
        metadata=rng.choice([{}, {"migrant": True}, {"diverse": True}]),
    )


def _theirs(program: ProgramRecord) -> dict[str, Any]:
    metadata = {**program.metadata, "parent_metrics": dict(program.parent_metrics)}
    if program.changes:
        metadata["changes"] = program.changes
    return {
        "id": program.id,
        "code": program.code,
        "changes_description": program.changes_description,
        "metrics": dict(program.metrics),
        "metadata": metadata,
    }


def _case(rng: random.Random, folder: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "template_dir": folder,
        "num_diverse_programs": number % 2,
        "programs_as_changes_description": number % 3 == 0,
        "include_artifacts": number % 4 != 0,
        "system_message": rng.choice(["system_message", "You write fast code."]),
        "max_artifact_bytes": 30,
    }
    shown = {
        kind: [_program(rng, f"{kind}{i}") for i in range(rng.randrange(5))]
        for kind in ("previous", "top", "inspirations")
    }
    shown["top"] = shown["top"][:4]  # at most one diverse program, so that nothing is drawn
    if shown["top"] and rng.random() < 0.5:
        shown["inspirations"].append(shown["top"][0])
    return config, shown


def test_prompts_are_those_of_openevolve(openevolve: OpenEvolve) -> None:
    folder = openevolve(
        "import openevolve, os; "
        "answer(os.path.join(os.path.dirname(openevolve.__file__), 'prompts', 'defaults'))",
        None,
    )
    rng = random.Random(5)
    cases, ours = [], []
    for number in range(60):
        config, shown = _case(rng, folder, number)
        parent = _program(rng, "parent")
        artifacts = {"stderr": "\x1b[31mpassword: x\x1b[0m " + "word " * 9, "out": "a" * 40}
        dimensions = rng.choice([(), ("speed",), ("complexity", "diversity")])
        is_diff = number % 3 == 0 or number % 2 == 0
        description = parent.changes_description or "none yet"
        cases.append(
            {
                "config": config,
                "prompt": {
                    "current_program": parent.code,
                    "parent_program": parent.code,
                    "program_metrics": dict(parent.metrics),
                    "previous_programs": [_theirs(p) for p in shown["previous"]],
                    "top_programs": [_theirs(p) for p in shown["top"]],
                    "inspirations": [_theirs(p) for p in shown["inspirations"]],
                    "language": "python",
                    "diff_based_evolution": is_diff,
                    "program_artifacts": artifacts,
                    "feature_dimensions": list(dimensions),
                    "current_changes_description": description,
                },
            }
        )
        whole = EvolveConfig.model_validate(
            {
                "prompt": {**config, "initial_changes_description": "none yet"},
                "database": {"feature_dimensions": dimensions},
                "diff_based_evolution": is_diff,
            }
        )
        record = ProgramRecord(
            id=parent.id,
            code=parent.code,
            metrics=parent.metrics,
            changes_description=parent.changes_description,
            artifacts=artifacts,
        )
        prompts = Prompts(whole, language="python", seed=1)
        ours.append(prompts.build(record, shown=ShownPrograms(**shown), attempt=number))
    theirs = openevolve(THEIR_PROMPTS, cases)
    for prompt, other in zip(ours, theirs, strict=True):
        assert prompt.user == other["user"]
        assert prompt.system == other["system"]


def test_fitness_is_that_of_openevolve(openevolve: OpenEvolve) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"combined_score": 0.5, "x": 9}, []),
        ({"combined_score": "0.25"}, []),
        ({"combined_score": True}, []),
        ({"combined_score": "bad", "x": 2.0}, []),
        ({"x": 1, "y": 3, "ok": True, "note": "n"}, ["y"]),
        ({"y": 3}, ["y"]),
    ]
    theirs = openevolve(
        "from openevolve.utils.metrics_utils import get_fitness_score as score\n"
        "answer([score(*case) for case in DATA])",
        cases,
    )
    assert [find_fitness(m, feature_dimensions=d) for m, d in cases] == theirs


@pytest.mark.parametrize(
    "metrics", [{}, {"note": "x"}, {"ok": True}, {"combined_score": float("nan"), "x": 1.0}]
)
def test_no_number_is_no_fitness(metrics: dict[str, Any]) -> None:
    assert find_fitness(metrics) is None


def _prompts(document: dict[str, Any] | None = None, seed: int = 1) -> Prompts:
    return Prompts(EvolveConfig.model_validate(document or {}), language="python", seed=seed)


PARENT = ProgramRecord(id="p", code="x = 1", metrics={"combined_score": 0.5})


def test_shipped_templates_have_the_names_and_fields_of_openevolve(
    openevolve: OpenEvolve, tmp_path: Path
) -> None:
    theirs = openevolve(
        """
from openevolve.prompt.templates import TemplateManager
manager = TemplateManager()
answer([manager.templates, manager.fragments])
""",
        None,
    )
    texts, fragments = theirs
    ours = load_templates(PromptConfig())
    assert {*ours.texts} == {*texts, "reflection_system", "reflection_user"}
    used = {
        name
        for name in fragments
        if f'"{name}"' in (DEFAULTS / "fragments.json").read_text(encoding="utf-8")
    }
    own = {"asks_crossover", "asks_repair", "recurring_failure", "several_files"}
    assert set(ours.fragments) - used == own
    for text in texts:  # the wording is our own
        if "{" not in texts[text]:
            assert ours.texts[text] != texts[text]


def test_the_program_and_the_mode_can_be_found_in_a_prompt() -> None:
    prompt = _prompts().build(PARENT, shown=ShownPrograms(), attempt=1)
    assert "# Current Program\n```python\nx = 1\n```" in prompt.user
    assert "SEARCH/REPLACE" in prompt.user and prompt.template == "diff_user"
    rewrite = _prompts({"diff_based_evolution": False})
    prompt = rewrite.build(PARENT, shown=ShownPrograms(), attempt=1)
    assert "SEARCH/REPLACE" not in prompt.user and prompt.template == "full_rewrite_user"


def test_what_is_drawn_belongs_to_the_attempt(tmp_path: Path) -> None:
    (tmp_path / "diff_user.txt").write_text("{tone} {evolution_history}")
    document = {
        "prompt": {
            "template_dir": tmp_path,
            "template_variations": {"tone": ["Be brief.", "Be bold."]},
        }
    }
    rng = random.Random(1)
    shown = ShownPrograms(top=[_program(rng, str(i)) for i in range(9)])
    texts = [_prompts(document).build(PARENT, shown=shown, attempt=i).user for i in range(30)]
    again = [_prompts(document).build(PARENT, shown=shown, attempt=i).user for i in range(30)]
    assert texts == again and len(set(texts)) > 10
    assert {text.partition(".")[0] for text in texts} == {"Be brief", "Be bold"}
    other = [_prompts(document, 2).build(PARENT, shown=shown, attempt=i).user for i in range(30)]
    assert other != texts


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "diff_user.txt",
            "{current_program} {oops}",
            "has the field {oops}; allowed are artifacts",
        ),
        ("top_program.txt", "{program_number", "Write {{ and }} for braces"),
        ("diff_user.txt", "{}", "has the field {}"),
        ("fragments.json", "{", "cannot be read"),
        ("fragments.json", '["a"]', "should be an object of texts"),
        ("fragments.json", '{"code_too_long": "{limit}"}', "has the field 'limit'; allowed: thres"),
    ],
)
def test_broken_templates_get_a_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words.replace("{", r"\{").replace("}", r"\}")):
        load_templates(PromptConfig(template_dir=tmp_path))


def test_a_users_fragments_and_templates_go_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "fragments.json").write_text(json.dumps({"artifact_title": "It said"}))
    (tmp_path / "mine.txt").write_text("Braces {mean} nothing here.")
    document = {"prompt": {"template_dir": tmp_path, "system_message": "mine"}}
    parent = ProgramRecord(id="p", code="x", artifacts={"out": b"\xff ok"})
    prompt = _prompts(document).build(parent, shown=ShownPrograms(), attempt=1)
    assert prompt.system == "Braces {mean} nothing here."
    assert "## It said\n\n### out\n```\n\ufffd ok\n```" in prompt.user


def test_a_program_without_a_number_has_no_invented_fitness() -> None:
    prompt = _prompts().build(
        ProgramRecord(id="p", code="x"), shown=ShownPrograms(previous=[PARENT]), attempt=1
    )
    assert "- Fitness: unknown" in prompt.user and "0.0000" not in prompt.user


def test_a_folder_is_shown_with_how_to_answer() -> None:
    parent = ProgramRecord(id="p", code=join_files({"a.py": "x = 1", "b.py": "y = 2"}))
    user = _prompts().build(parent, shown=ShownPrograms(), attempt=1).user
    assert "--- file: b.py ---\ny = 2" in user and "name of the file it changes" in user


def test_artifacts_can_be_turned_off_by_the_evaluator() -> None:
    parent = ProgramRecord(id="p", code="x", artifacts={"out": "words"})
    document = {"evaluator": {"enable_artifacts": False}}
    assert "words" not in _prompts(document).build(parent, shown=ShownPrograms(), attempt=1).user


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcDEF123_456-789xyz000",
        "Authorization: Bearer abc.def-ghi_123",
        "password: hunter2",
        "token=abc",
        "API_KEY=abc123",
        "0123456789abcdef0123456789abcdef",
    ],
)
def test_secrets_do_not_reach_a_prompt(secret: str) -> None:
    shown = show_artifacts({"log": f"x {secret} y"}, title="t", max_chars=99, is_filtered=True)
    assert secret.split()[-1] not in shown and shown.count("REDACTED") == 1
    assert secret in show_artifacts({"l": secret}, title="t", max_chars=99, is_filtered=False)
    assert hide_secrets("plain words, a = 3") == "plain words, a = 3"


def test_a_template_without_places_for_them_still_asks_for_a_repair_with_its_error(
    tmp_path: Path,
) -> None:
    failed = ProgramRecord(id="p1", code="x = np\n", artifacts={"error": "NameError: np"})
    asked = Asked(operator="repair", failures=["3 of the last 9 answers failed (timeout): slow"])
    for text in (None, "Change this: {current_program}"):
        if text is not None:
            (tmp_path / "diff_user.txt").write_text(text)
        config = EvolveConfig.model_validate({"prompt": {"template_dir": tmp_path}})
        prompts = Prompts(config, language="python", seed=0)
        user = prompts.build(failed, shown=ShownPrograms(), attempt=1, asked=asked).user
        for words in ("x = np", "NameError: np", "FAILED", "answers failed (timeout): slow"):
            assert user.count(words) == 1, words
        plain = prompts.build(failed, shown=ShownPrograms(), attempt=1).user
        assert "FAILED" not in plain and "timeout" not in plain
