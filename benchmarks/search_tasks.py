"""A family of real tasks for search_quality.py: tasksets, founders and a config from a data folder.

    python benchmarks/search_tasks.py DATA OUT                        # tasksets and OUT/family.yaml
    python benchmarks/search_tasks.py DATA OUT --founders MODEL         # and an adapter per task
    python benchmarks/search_tasks.py DATA OUT --yes-or-no            # all tasks with these answers
    python benchmarks/search_tasks.py judgements OUT --founders MODEL   # needs no data

DATA holds gsm8k problems with right and wrong solutions, TruthfulQA, comparisons of numbers and
political statements:

    challenges/test_gsm8k.json               question, choice, label
    challenges/{train,test}_larger_than.json choice, label
    challenges/{train,test}_political_normative.json   question, choice, is_liberal
    truthfulqa/TruthfulQA.csv                Question, Correct Answers, Incorrect Answers

Every task has its own two answers. With `--yes-or-no` all have the same two, so that adapters of
different tasks interfere and sums of them are hardly better than guessing. Each founder
is trained by `rookery sft` on one task's own training questions; the target is the mixture of all
tasks, on questions that no founder saw. Each question is in one split of one file only, with one of
its answers: search has a quarter, select a quarter, report half.

With `judgements` in place of DATA the tasks are made up: whether a product, a sorted word, a number
of letters, a remainder and a reversed word are right. A small model can hardly tell, so its
founders know next to nothing, and their certainty says little.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rookery.seeding import shuffled, stream
from rookery.tasks import generators

NUM_TRAINING, NUM_TARGET = 600, 240
"""Limits on the rows of each task."""
SPLITS = {"search": 0.25, "select": 0.25, "report": 0.5}
SETTINGS = ("--rank", "8", "--layers", "8", "--targets", "[q_proj, v_proj, o_proj]",
            "--learning-rate", "0.0005", "--steps", "80", "--batch-size", "16")  # fmt: skip
WORDS = {
    "solution": ("right", "wrong"),
    "truthful": ("true", "false"),
    "larger": ("correct", "incorrect"),
    "liberal": ("liberal", "conservative"),
    "french": ("French", "English"),
}
"""Answers of each task: the claim holds, or it does not."""
Claims = dict[str, list[tuple[str, bool]]]
"""By question: its claims, and whether each holds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="a folder, or: judgements")
    parser.add_argument("out", type=Path)
    parser.add_argument("--founders", default="", help="the model to train an adapter per task of")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at a time")
    parser.add_argument("--steps", type=int, help="of each training, in place of 80")
    parser.add_argument("--yes-or-no", action="store_true", help="the answers to every task")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = make_judgements() if str(options.data) == "judgements" else read_tasks(options.data)
    for name, claims in tasks.items():
        words = ("yes", "no") if options.yes_or_no else WORDS.get(name, ("right", "wrong"))
        write_task(options.out, name, claims, words)
    config = family(list(tasks), model=options.founders)
    (options.out / "family.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    if options.founders:
        train(options, list(tasks))


def read_tasks(data: Path) -> dict[str, Claims]:
    challenges = data / "challenges"
    political = ("train_political_normative.json", "test_political_normative.json")
    larger = ("train_larger_than.json", "test_larger_than.json")
    return {
        "solution": gather(
            (row["question"], f"{row['question']}\nSolution: {row['choice']}\n"
             "Is this solution right?", row["label"])
            for row in read_json(challenges / "test_gsm8k.json")
        ),
        "truthful": gather(read_truthful(data / "truthfulqa" / "TruthfulQA.csv")),
        "larger": gather(
            (row["question"], f"{row['choice']} Is that so?", row["label"])
            for file in larger for row in read_json(challenges / file)
        ),
        "liberal": gather(
            (row["question"], f"{row['question']}\n{row['choice']}\nIs this view liberal?",
             row["is_liberal"])
            for file in political for row in read_json(challenges / file)
        ),
        "french": gather(
            (word, f"The word is: {word}\nIs it French?", words is generators.FRENCH)
            for words in (generators.FRENCH, generators.ENGLISH)
            for word in words[: len(generators.ENGLISH)]
        ),
    }  # fmt: skip


def make_judgements() -> dict[str, Claims]:
    """Five kinds, each with a right and a wrong claim about every question."""
    kinds: dict[str, Claims] = {}
    for name in ("product", "sorted", "letters", "remainder", "reversed"):
        rng = stream(0, "judgements", name)
        rows = []
        for _ in range(2 * NUM_TRAINING):
            one, other, off = (int(n) for n in rng.integers((12, 3, 1), (99, 30, 9)))
            word = "".join(rng.choice(list("abcdest"), 7))
            right, wrong = {
                "product": (one * other, one * other + 10 * off),
                "sorted": ("".join(sorted(word)), "".join(sorted(word[1:] + "a"))),
                "letters": (word.count("a"), word.count("a") + 1 + off % 2),
                "remainder": (one % other, (one + 1 + off) % other),
                "reversed": (word[::-1], word[::-1][1:] + word[::-1][0]),
            }[name]
            question = {
                "product": f"{one} times {other} is",
                "sorted": f"The letters of {word} in alphabetical order are",
                "letters": f"The number of times that a is in {word} is",
                "remainder": f"The remainder of {one} divided by {other} is",
                "reversed": f"{word} written backwards is",
            }[name]
            if right != wrong:
                rows += [(question, f"{question} {claim}. Is this right?", claim == right)
                         for claim in (right, wrong)]  # fmt: skip
        kinds[name] = gather(rows)
    return kinds


def read_json(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def read_truthful(path: Path) -> Iterable[tuple[str, str, bool]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            for column, is_true in (("Correct Answers", True), ("Incorrect Answers", False)):
                for answer in row[column].split(";"):
                    if answer.strip():
                        text = f"{row['Question']}\nAnswer: {answer.strip()}\nIs this true?"
                        yield row["Question"], text, is_true


def gather(rows: Iterable[tuple[str, str, bool]]) -> Claims:
    claims: Claims = {}
    for question, text, is_right in rows:
        claims.setdefault(question, []).append((text, bool(is_right)))
    return claims


def write_task(out: Path, name: str, claims: Claims, words: tuple[str, str]) -> None:
    """Write half of the questions for the founder and half for the target, balanced by answer."""
    questions = shuffled(sorted(claims), rng=stream(0, "questions", name))
    half = len(questions) // 2
    trained = [claim for question in questions[:half] for claim in claims[question]]
    write(out / f"{name}-training.jsonl", balanced(trained, NUM_TRAINING, name), words)
    singles = []
    for place, question in enumerate(questions[half:]):
        wanted = [claim for claim in claims[question] if claim[1] == bool(place % 2)]
        singles.append((wanted or claims[question])[0])
    write(out / f"{name}.jsonl", balanced(singles, NUM_TARGET, name), words)


def balanced(claims: Sequence[tuple[str, bool]], count: int, name: str) -> list[tuple[str, bool]]:
    mixed = shuffled(claims, rng=stream(0, "claims", name))
    by_label = [[claim for claim in mixed if claim[1] == label] for label in (True, False)]
    each = min(count // 2, *map(len, by_label))
    return [claim for pair in zip(*(own[:each] for own in by_label), strict=True) for claim in pair]


def write(path: Path, claims: Sequence[tuple[str, bool]], words: tuple[str, str]) -> None:
    rows = [
        {"id": f"{path.stem}-{number}", "prompt": f"{text} Answer {' or '.join(words)}.",
         "choices": list(words), "reference": words[not is_right]}
        for number, (text, is_right) in enumerate(claims)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")


def family(tasks: Sequence[str], *, model: str) -> dict[str, Any]:
    """Config with the sizes of the demo and children of rank 32."""
    scorer = {"type": "choice"}
    return {
        "engine": {"type": "embedded", "model": model or "MODEL"},
        "init": {"type": "file", "path": "founders"},
        "tasksets": [
            {"type": "jsonl", "path": f"{name}.jsonl", "name": name, "scorer": scorer,
             "splits": SPLITS}
            for name in tasks
        ],
        "rank": 32,
        "finals": {"num_finalists": 4, "num_voters": 3},
    }  # fmt: skip


def train(options: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Train an adapter per task, each with its own seed."""
    steps = ["--steps", str(options.steps)] if options.steps else []
    running: list[subprocess.Popen[bytes]] = []
    for seed, name in enumerate(tasks):
        file = f"{options.out / name}-training.jsonl?scorer.type=choice"
        place = options.out / "founders" / name
        words = ["-m", "rookery", "sft", options.founders, file, str(place), "--split", "all"]
        command = [sys.executable, *words, *SETTINGS, *steps, "--seed", str(seed)]
        running.append(subprocess.Popen(command))
        if len(running) == options.parallel:
            finish(running)
    finish(running)


def finish(running: list["subprocess.Popen[bytes]"]) -> None:
    """Wait for these trainings; exit if one failed."""
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("A training failed.")
    running.clear()


if __name__ == "__main__":
    main()
