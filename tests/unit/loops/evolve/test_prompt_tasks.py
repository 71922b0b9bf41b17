"""Prompts evolved on tasks: reflection, minibatches, Pareto parents, choice and report."""

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import forked, run_code
from loops.evolve.prompt_toy import (
    FIELDS,
    FIRST,
    RAISING,
    answer,
    evolve_prompts,
    prompt_config,
    propose,
    sampler,
    toy_taskset,
)
from loops.evolve.toy import decided_states
from marks import long

from rookery.errors import ConfigError, EngineError
from rookery.loops.evolve.prompt_tasks import PromptForm, draw_minibatch, find_form
from rookery.loops.evolve.report import export_population
from rookery.reports import EvolveReport
from rookery.runs import Run
from rookery.search.programs.database import ParetoDatabase, ProgramDatabaseConfig
from rookery.search.programs.program import ScoredProgram, summarize
from rookery.testing import FakeTextModel
from rookery.types import Message, SampleRequest, Task, TextRequest, TokenIds


def export(folder: Path) -> str:
    with Run.view(folder / "toy") as view:
        return export_population(view)


def timeless(report: EvolveReport) -> EvolveReport:
    return report.model_copy(update={"seconds": None, "evaluation_seconds": None})


async def test_prompts_improve_by_reflection_and_are_reported_beside_the_first(
    tmp_path: Path,
) -> None:
    answering, config = sampler(), prompt_config(rookery={"in_flight": 1})
    report = await evolve_prompts(tmp_path, config, answering=answering)
    assert report.tasks is not None and report.best is not None
    chosen, first = report.tasks.rows
    assert chosen.mean == 1.0 and first.mean == 0.0
    assert chosen.gain is not None and chosen.gain.low is not None and chosen.gain.low > 0
    assert all(f"know {kind}" in report.best.code for kind in "abcd")
    best = (tmp_path / "toy/best/best_program.txt").read_text()
    assert best == report.best.code and report.best.id == report.tasks.chosen
    num_rollouts = report.tasks.num_rollouts + report.tasks.num_final_rollouts
    assert 0.8 * num_rollouts < answering.num_samples <= num_rollouts, "none is asked twice"
    assert report.strategy == "pareto"


async def test_the_report_tasks_are_asked_last_and_of_two_prompts_alone(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def note(request: SampleRequest, index: int) -> TokenIds:
        system, user = "".join(map(chr, request.prompt)).strip().split("\nuser: ")
        asked.append((system, user))
        return answer(request, index)

    report = await evolve_prompts(tmp_path, answering=sampler(note))
    taskset = toy_taskset()
    split = {name: {t.prompt for t in taskset.split(name)} for name in ("search", "select")}
    held_out = {task.prompt for task in taskset.split("report")}
    places = [at for at, (_, task) in enumerate(asked) if task in held_out]
    assert places == list(range(len(asked) - len(places), len(asked)))
    assert len({system for system, task in asked if task in held_out}) == 2
    assert report.tasks is not None
    finalists = {system for system, task in asked if task in split["select"]}
    assert len(finalists) == len(report.tasks.finalists) <= 6


async def test_a_child_that_is_no_better_on_the_minibatch_costs_no_more(tmp_path: Path) -> None:
    answering = sampler()
    worse = FakeTextModel(lambda _: f"```\n{_.seed}\n```", name="base")
    report = await evolve_prompts(tmp_path, model=worse, answering=answering)
    [failure] = report.failures
    assert (failure.kind, failure.count) == ("minibatch", 12)
    assert "earns 0 on 3 tasks on which its parent earns 0" in failure.first_message
    num_search = len(toy_taskset().split("search"))
    assert report.tasks is not None and report.tasks.num_rollouts == num_search + 12 * 3
    assert report.tasks.chosen == "first1" and report.tasks.rows[0].gain is not None
    assert report.tasks.rows[0].gain.mean == 0.0


async def test_a_proposal_shows_the_task_the_answer_and_what_was_expected(tmp_path: Path) -> None:
    model = FakeTextModel(propose, name="base")
    await evolve_prompts(tmp_path, prompt_config(max_iterations=1), model=model)
    system, user = model.requests[0].messages
    assert "write prompts" in system.content and FIRST in user.content
    shown = re.findall(r"## Task \d\n[a-d](\d+)\n### Answer, which earned 0\nno(\d+)", user.content)
    assert len(shown) == 3 and all(task == said for task, said in shown)
    assert all(f"### Expected\nyes{task}" in user.content for task, _ in shown)
    assert user.content.count("```") == 4


async def test_same_seed_same_result_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed, in_flight in (("a", 1, 2), ("b", 1, 2), ("c", 2, 2)):
        config = prompt_config(random_seed=seed, rookery={"in_flight": in_flight})
        await evolve_prompts(tmp_path / name, config)
    assert export(tmp_path / "a") == export(tmp_path / "b") != export(tmp_path / "c")


async def test_a_budget_of_rollouts_is_kept(tmp_path: Path) -> None:
    num_search = len(toy_taskset().split("search"))
    config = prompt_config(max_iterations=500, rookery={"budget": {"max_rollouts": 4 * num_search}})
    report = await evolve_prompts(tmp_path, config)
    assert report.tasks is not None
    assert 3 * num_search < report.tasks.num_rollouts <= 4 * num_search
    assert "rollouts allows no further iteration" in report.stop_reason


async def test_a_budget_of_answer_tokens_has_room_for_the_choice(tmp_path: Path) -> None:
    limit = 1200
    config = prompt_config(
        max_iterations=500, rookery={"budget": {"max_answer_tokens": limit}, "in_flight": 1}
    )
    report = await evolve_prompts(tmp_path, config)
    assert report.tasks is not None and report.tasks.num_choice_tokens > 0
    assert "answer tokens allows no further iteration" in report.stop_reason
    assert limit / 2 < report.spent.drawn_tokens <= limit


async def test_a_search_ends_where_no_model_answers(tmp_path: Path) -> None:
    """It would spend nothing of its budget, and never end."""

    def refuse(request: TextRequest) -> str:
        raise EngineError("A prompt has 971 tokens; this model reads at most 199: shorten it.")

    config = prompt_config(max_iterations=500, rookery={"budget": {"max_answer_tokens": 9_000}})
    model = FakeTextModel(refuse, name="base")
    report = await evolve_prompts(tmp_path, config, model=model)
    assert report.stop_reason == "No model answered in 50 iterations in a row."
    assert report.num_iterations < 60 and report.failures[0].kind == "model"
    assert report.tasks is not None and report.tasks.chosen == "first1"


async def test_a_scorer_that_raises_fails_the_prompt_and_not_the_run(tmp_path: Path) -> None:
    report = await evolve_prompts(tmp_path, taskset=toy_taskset(scorer=RAISING))
    failed = {failure.kind: failure for failure in report.failures}
    assert "cannot be judged" in failed["no_reward"].first_message
    assert report.best is not None and "know d" not in report.best.code
    assert report.num_iterations == 12 and report.tasks is not None
    assert report.tasks.rows[0].mean is not None


@pytest.mark.parametrize(
    ("proposal", "kind"),
    [
        ("```\n \n```", "no_code"),
        ("", "empty_answer"),
        ("```\ncut off", "no_code"),
        ("```\n" + "x" * 20_000 + "\n```", "too_long"),
        ("```\n{% for i in range(9**9) %}{{ 7 * 7 }}{% endfor %} {{ secret }}\n```", "minibatch"),
        ("```\n--- file: ../../x ---\nmine\n```", "bad_prompt"),
        (f"```\n{FIRST}\n```", "no_change"),
        ("```\nhas \ud800 inside\n```", "not_text"),
    ],
)
async def test_hostile_proposals_are_failures(tmp_path: Path, proposal: str, kind: str) -> None:
    model = FakeTextModel(lambda _: proposal, name="base")
    report = await evolve_prompts(tmp_path, prompt_config(max_iterations=2), model=model)
    assert kind in {failure.kind for failure in report.failures}
    assert report.num_committed == 0 and report.tasks is not None
    assert report.tasks.chosen == "first1"


async def test_fences_inside_of_a_prompt_stay(tmp_path: Path) -> None:
    inner = "Say\n```json\n{}\n```\nknow a know b know c know d"
    model = FakeTextModel(lambda _: f"Here:\n```\n{inner}\n```\nDone.", name="base")
    report = await evolve_prompts(tmp_path, prompt_config(max_iterations=1), model=model)
    assert report.best is not None and report.best.code == inner


async def test_a_prompt_with_fields_is_the_whole_question(tmp_path: Path) -> None:
    def lose(request: TextRequest) -> str:
        return "```\nNothing is asked. {{ reference }}\n```"

    report = await evolve_prompts(tmp_path / "kept", first=FIELDS)
    assert report.best is not None and report.tasks is not None
    # The task comes last, so that what is added behind it is no answer to it.
    assert {failure.kind for failure in report.failures} <= {"minibatch", "repeated"}
    model = FakeTextModel(lose, name="base")
    config = prompt_config(max_iterations=1)
    report = await evolve_prompts(tmp_path / "lost", config, first=FIELDS, model=model)
    assert "has lost {{ kind }}" in report.failures[0].first_message


async def test_an_instruction_gets_the_task_at_its_end(tmp_path: Path) -> None:
    """Small models write instructions, whatever they are asked to keep."""
    instruction = "know a know b know c know d"
    model = FakeTextModel(lambda _: f"```\n{instruction}\n```", name="base")
    config = prompt_config(max_iterations=1)
    report = await evolve_prompts(tmp_path, config, first="{{ prompt }}", model=model)
    assert report.best is not None and report.best.score == 1.0
    assert report.best.code == f"{instruction}\n\n{{{{ prompt }}}}"


ROW = {"kind": "a", "note": "{{ prompt }}"}
TASK = Task(id="t", prompt="a1", reference="yes1")


@pytest.mark.parametrize(
    ("fields", "prompt", "asked"),
    [
        ((), "Answer {{ kind }} {1} {% x %}", ("Answer {{ kind }} {1} {% x %}", "a1")),
        (("kind", "prompt"), "{{kind}}: {{ prompt }} {{ reference }}", "a: a1 {{ reference }}"),
        (("note",), "{{ note }}!", "{{ prompt }}!"),
    ],
)
def test_only_the_fields_of_the_first_prompt_are_filled(
    fields: tuple[str, ...], prompt: str, asked: Any
) -> None:
    """Nor is a reference ever one, and what a value holds is not read as a field."""
    task = PromptForm(fields=fields).ask(prompt, TASK, ROW, is_chat=True)
    if isinstance(asked, tuple):
        system, user = asked
        expected: Any = (
            Message(role="system", content=system), Message(role="user", content=user),
        )  # fmt: skip
        assert task.prompt == expected
    else:
        assert task.prompt == asked
    assert (task.id, task.reference) == (TASK.id, TASK.reference)


def test_chats_keep_their_turns_and_plain_models_get_text() -> None:
    chat = (
        Message(role="system", content="own"),
        Message(role="user", content="q1"),
        Message(role="assistant", content="r1"),
        Message(role="user", content="q2"),
    )
    task = Task(id="t", prompt=chat, reference="")
    system = PromptForm().ask("new", task, {}, is_chat=True).prompt
    assert system == (Message(role="system", content="new\n\nown"), *chat[1:])
    filled = PromptForm(fields=("prompt",)).ask("> {{ prompt }}", task, {}, is_chat=True).prompt
    assert filled == (*chat[:-1], Message(role="user", content="> q2"))
    assert PromptForm().ask("new", TASK, {}, is_chat=False).prompt == "new\n\na1"


def test_a_field_that_tasks_lack_is_said() -> None:
    form, warnings = find_form("Of {{ knd }} and {{ kind }}", toy_taskset())
    assert form.fields == ("kind",) and "{{ knd }} of the prompt is no field" in warnings[0]
    taskset = toy_taskset(fields={"toy/0": {"kind": "a"}})
    with pytest.raises(ConfigError, match="the task toy/1 has no such field"):
        find_form("{{ kind }}", taskset)


def test_a_minibatch_has_failed_tasks_and_some_that_must_stay() -> None:
    rewards = [1.0] * 20 + [0.0] * 20
    for attempt in range(1, 20):
        places = draw_minibatch(rewards, size=4, seed=0, attempt=attempt)
        assert len(set(places)) == 4 and sum(place >= 20 for place in places) == 3
    assert len(draw_minibatch([0.0] * 3, size=8, seed=0, attempt=1)) == 3
    assert draw_minibatch([1.0] * 3, size=2, seed=0, attempt=1)


def record(id: str, *rewards: float, attempt: int = 1) -> ScoredProgram:
    return ScoredProgram(
        id=id,
        attempt=attempt,
        island=0,
        metrics={"combined_score": sum(rewards) / len(rewards)},
        code=summarize(id),
        parent=None if attempt == 0 else "first",
        rewards=rewards,
    )


def test_parents_are_best_on_some_task_by_on_how_many() -> None:
    database = ParetoDatabase(ProgramDatabaseConfig(num_islands=1), seed=3)
    database.tell(record("first", 0, 0, 0, 0, attempt=0))
    assert {database.ask(attempt).parent for attempt in range(1, 9)} == {"first"}
    database.tell(record("many", 1, 1, 1, 0, attempt=1))
    database.tell(record("one", 0, 0, 0, 1, attempt=2))
    database.tell(record("never", 0.5, 0.5, 0.5, 0.9, attempt=3))
    drawn = [database.ask(attempt).parent for attempt in range(1, 401)]
    assert set(drawn) == {"many", "one"}, "neither what is dominated nor what is never the best"
    assert 2.0 < drawn.count("many") / drawn.count("one") < 4.5


def test_no_prompt_that_is_best_on_a_task_is_forgotten() -> None:
    """As a comparison of every two prompts has it."""
    draw = np.random.default_rng(0).random((260, 20)) < 0.3
    database = ParetoDatabase(ProgramDatabaseConfig(num_islands=1), seed=0)
    for number, rewards in enumerate(draw.astype(float).tolist()):
        database.tell(record(f"p{number}", *rewards, attempt=number))
    front = [
        f"p{number}"
        for number, own in enumerate(draw)
        if not any(
            (other >= own).all() and ((other > own).any() or place < number)
            for place, other in enumerate(draw)
            if place != number
        )
    ]
    parents = {database.ask(attempt).parent for attempt in range(1, 6001)}
    assert parents == set(front) and len(front) > 100


async def test_a_finished_run_asks_nothing_again(tmp_path: Path) -> None:
    report = await evolve_prompts(tmp_path)
    model, answering = FakeTextModel(propose, name="base"), sampler()
    again = await evolve_prompts(tmp_path, model=model, answering=answering)
    assert not model.requests and not answering.num_samples
    assert timeless(again) == timeless(report)


SESSION = """
import asyncio, sys
from pathlib import Path
from forked import kill_at_event
from loops.evolve.prompt_toy import answer, evolve_prompts, propose, sampler
from rookery.testing import FakeTextModel

folder, calls = Path(sys.argv[1]), Path(sys.argv[2])
kill_at_event(int(sys.argv[3]))

def note(what):
    with calls.open("a") as file:
        file.write(what)

def reply(request):
    note("p")
    return propose(request)

def reply_to_task(request, index):
    note("a")
    return answer(request, index)

asyncio.run(
    evolve_prompts(
        folder, model=FakeTextModel(reply, name="base"), answering=sampler(reply_to_task)
    )
)
"""


@pytest.mark.parametrize("least", [150, pytest.param(20, marks=long)])
def test_a_run_that_is_killed_again_and_again_ends_as_a_whole_one(
    tmp_path: Path, least: int
) -> None:
    """SIGKILL after some events: in proposals, minibatches, select and report."""
    whole = asyncio.run(evolve_prompts(tmp_path / "whole"))
    calls, num_kills, code = tmp_path / "calls", 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        num_events = str(least + 7 * num_kills % 31)
        with forked(run_code, SESSION, str(tmp_path / "cut"), str(calls), num_events) as process:
            code = process.wait()
        num_kills += code != 0
        assert num_kills < 60
    assert code == 0 and num_kills >= 2
    assert export(tmp_path / "cut") == export(tmp_path / "whole")
    report = json.loads((tmp_path / "cut/toy/report.json").read_text())
    expected = json.loads((tmp_path / "whole/toy/report.json").read_text())
    assert report["tasks"] == expected["tasks"] and report["best"] == expected["best"]
    states = decided_states(tmp_path / "cut")
    assert all(len(set(recorded)) == len(recorded) for recorded in states.values())
    assert whole.tasks is not None
    num_asked = calls.read_text().count("p")
    assert num_asked <= 12 + 2 * num_kills
