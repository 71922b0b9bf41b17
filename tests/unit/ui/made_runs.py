"""Runs as their loops write them, small or large, for the tests of `rookery ui`."""

import gzip
import re
import zlib
from base64 import b64decode
from collections.abc import Mapping
from json import dumps, loads
from pathlib import Path
from typing import Any

from ui.made import made_evolve, made_grpo, made_icm, made_report, made_row

from rookery.runs import NewEvent, Run
from rookery.ui.display import Display

__all__ = [
    "HOSTILE",
    "append_generation",
    "make_eval",
    "make_evolve",
    "make_genome",
    "make_grpo",
    "make_icm",
    "make_league",
    "make_loop",
    "make_pipeline",
    "make_sft",
    "read_saved",
]


def read_saved(html: str) -> dict[str, Any]:
    """What an exported page holds of its run."""
    packed = re.search(r'id="saved">([^<]*)<', html)
    assert packed
    document: dict[str, Any] = loads(gzip.decompress(b64decode(packed[1])))
    return document


HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def _append(run: Run, news: list[NewEvent]) -> None:
    """Also in the thread of a browser's driver, which runs an event loop."""
    run.submit(news).result()


def _event(kind: str, key: str, **payload: Any) -> NewEvent:
    return NewEvent(kind=kind, key=key, payload=payload)


def _rollout(model: str, task: str, reward: float, *, text: str = "left") -> NewEvent:
    completion = {"text": text, "tokens": [1], "logprobs": [-0.1], "finish_reason": "stop"}
    key = f"{model.rpartition('@')[2]}|{task}|said"
    return _event(
        "rollout", key, model=model, task=task, reward=reward, error="", completion=completion,
        num_tokens=3,
    )  # fmt: skip


def make_genome(
    root: Path,
    name: str = "demo",
    *,
    generations: int = 3,
    size: int = 3,
    text: str = "",
    report: Mapping[str, Any] | None = None,
) -> Path:
    """Two founders, then generations of `size`; the last is finished, with a report."""
    config = {"engine": {"model": "smollm2"}, "stages": [{"generations": generations}], "seed": 0}
    with Run.create(root, kind="genome", name=name, config=config) as run:
        founders = [f"founder-a{text}", "founder-b"]
        append_generation(run, 0, founders, parents=[])
        for number in range(1, generations + 1):
            names = [f"g{number:03d}-c{place:02d}{text}" for place in range(size)]
            append_generation(run, number, names, parents=founders)
        rollouts = [
            _rollout(f"{name}@v-{name}", f"kind/{task}{text}", float(task % (place + 2) == 0))
            for place, name in enumerate([founders[1], names[-1]])
            for task in range(20)
        ]
        end = [_event("phase", "select", seconds=1.0), _event("winner", "winner", id=names[-1])]
        _append(run, [*rollouts, *end])
        run.write_json("report.json", made_report(run=name, winner_id=names[-1], **(report or {})))
        run.finish()
    return root / name


def append_generation(run: Run, number: int, names: list[str], *, parents: list[str]) -> None:
    """Its candidates, what it sums up to, and its metrics."""
    scores = [0.4 + 0.01 * number + 0.001 * (place % 97) for place in range(len(names))]
    news = [
        _event(
            "candidate", name, id=name, version=f"v-{name}", parents=parents, score=score, error="",
            operator="linear" if parents else "founder", num_tasks=16 if place % 3 else 8,
        )
        for place, (name, score) in enumerate(zip(names, scores, strict=True))
    ]  # fmt: skip
    summed = {"best": max(scores), "mean": sum(scores) / len(scores), "worst": min(scores)}
    counts = {"num_candidates": len(names), "num_dropped": 1, "num_failed": 0, "num_tokens": 99}
    last = _event(
        "generation", str(number), generation=number, scores=scores, stage="ga", seconds=0.5,
        **summed, **counts,
    )  # fmt: skip
    _append(run, [*news, last])
    run.log_metrics(number, {"genome/best": summed["best"], "genome/mean": summed["mean"]})


def make_grpo(
    root: Path,
    name: str = "train",
    *,
    steps: int = 4,
    text: str = "",
    report: Mapping[str, Any] | None = None,
) -> Path:
    """Steps with metrics; the last one with all its completions."""
    with (
        Run.create(root, kind="grpo", name=name, config={"steps": steps + 1}) as run,
        Display(is_quiet=True).bar("train", total=steps + 1, noun="step", run=run) as bar,
    ):
        for step in range(steps):
            bar.update(done=step + 1)
            metrics = {"reward/mean": 0.1 * step, "train/entropy": 2.0, "time/draw_s": 0.2}
            examples = [{"task": "add/1", "text": f"five {text}", "reward": 1.0}]
            _append(run, [_event("step", str(step), step=step, examples=examples)])
            run.log_metrics(step, metrics)
        rollouts = [{"text": f"seven {text}", "reward": r, "advantages": None} for r in (0.0, 1.0)]
        batch = dumps({"groups": [{"task": "add/2", "rollouts": rollouts}]}).encode()
        digest = run.blobs.put_bytes(zlib.compress(batch))
        _append(run, [NewEvent(kind="batch", payload={"digest": digest}, key=str(steps - 1))])
        _append(run, [NewEvent(kind="select", payload={"mean": 0.5, "is_best": True}, key="0")])
        answers = [[[f"seven{text}", 0.01], [" eight", -0.002]], [["nine", None]]]
        _append(run, [_event("gap", str(steps - 1), task="add/2", is_fresh=True, answers=answers)])
        if report is not None:
            run.write_json("report.json", made_grpo(run=name, **report))
        run.finish("failed", message=f"No server is left. {text}")
    return root / name


def make_icm(
    root: Path, name: str = "labels", *, text: str = "", report: Mapping[str, Any] | None = None
) -> Path:
    with Run.create(root, kind="icm", name=name, config={"batch_size": 2}) as run:
        for number in range(6):
            decision = {"item": "i1", "labels": "-01", "is_accepted": True, "num_frustrated": 1}
            key = f"0/0/{number}"
            _append(run, [_event("decision", key, utility=float(number), **decision)])
            run.log_metrics(number, {"icm/num_violated_0_0": float(number < 2)})
        if report is not None:
            run.write_json("report.json", made_icm(run=name, **report))
        label = {"id": "i1", "label": f"yes{text}", "margin": 0.5, "text": f"It is so. {text}"}
        run.write_text("labels.jsonl", dumps(label) + "\n")
        run.finish()
    return root / name


def make_evolve(
    root: Path,
    name: str = "programs",
    *,
    size: int = 3,
    text: str = "",
    report: Mapping[str, Any] | None = None,
) -> Path:
    """A first program and `size` more, each from the one before; the last one fails."""
    with Run.create(root, kind="evolve", name=name, config={"max_iterations": size}) as run:
        first = _blob(run, f"x = 0 # {text}\n")
        payload = {"program": first, "metrics": {"combined_score": 0.1}, "failure": None}
        _append(run, [NewEvent(kind="first_program", payload=payload, key="1")])
        for number in range(1, size + 1):
            parent = f"p{number - 1}" if number > 1 else "first1"
            plan = {"island": 0, "parent": parent, "generation": number}
            failure = {"kind": "timeout", "message": f"Over 10 s. {text}"}
            evaluated = {
                "program": _blob(run, f"x = {number} # {text}\n"),
                "metrics": {"combined_score": number / 10},
            }
            is_last = number == size
            ended = ("failed", {"failure": failure}) if is_last else ("committed", {})
            states: list[tuple[str, Mapping[str, Any]]] = [
                ("planned", {"plan": plan}),
                ("generated", {"model": f"m{text}", "prompt_tokens": 10, "completion_tokens": 2}),
                ("evaluated", evaluated),
                ended,
            ]
            news = [
                _event("attempt", f"{number}/{s}", number=number, state=s, epoch=0, data=data)
                for s, data in states
            ]
            _append(run, news)
            run.log_metrics(number, {"evolve/best_score": number / 10})
        if report is not None:
            run.write_json("report.json", made_evolve(run=name, **report))
    return root / name


def _blob(run: Run, code: str) -> str:
    return run.blobs.put_bytes(dumps({"code": code, "metadata": {"changes": "more"}}).encode())


def make_eval(root: Path, name: str = "scores", *, size: int = 4, text: str = "") -> Path:
    with Run.create(root, kind="eval", name=name, config={"model": f"tiny{text}"}) as run:
        news = [
            _rollout(f"base{text}@1", f"sum/{task}{text}", float(task % 2), text=f"four {text}")
            for task in range(size)
        ]
        _append(run, news)
        run.finish()
    return root / name


def make_pipeline(
    root: Path, name: str = "steps", *, text: str = "", report: Mapping[str, Any] | None = None
) -> Path:
    """Two steps with an adapter each."""
    steps = [
        {
            "name": f"{loop}{text}",
            "loop": loop,
            "run": f"{name}-{loop}",
            "made_from": [f"of {text}"],
        }
        for loop in ("icm", "sft")
    ]
    models = [made_row(f"{step}{text}", mean) for step, mean in (("base", 0.5), ("sft", 0.8))]
    return _make_measured(
        root, "pipeline", name, text, {"models": models, "steps": steps, **(report or {})}
    )


def make_league(
    root: Path, name: str = "ways", *, text: str = "", report: Mapping[str, Any] | None = None
) -> Path:
    """Two entrants with two seeds each, beside the untouched model, and one that is left out."""
    seeds = [
        {"name": f"sft {seed}{text}", "runs": [f"{name}-sft-{seed}"], "mean": 0.8, "seconds": 9.0,
         "spent": {"drawn_tokens": 10, "trained_tokens": 90}, "stop_reason": f"Spent. {text}"}
        for seed in range(2)
    ]  # fmt: skip
    rows = [
        {**made_row(way, mean), "what": f"by {way}{text}", "runs": seeds if way != "base" else []}
        for way, mean in (("sft", 0.8), ("grpo", 0.7), ("base", 0.5))
    ]
    pair = {"first": "sft", "second": "grpo", "difference": {"mean": 0.1, "low": 0.0, "high": 0.2}}
    left_out = [{"name": f"icm{text}", "reason": f"It needs a rule. {text}"}]
    found = {"rows": rows, "pairs": [pair], "left_out": left_out, "budget": f"100 tokens {text}"}
    return _make_measured(root, "league", name, text, {**found, **(report or {})})


def _make_measured(root: Path, kind: str, name: str, text: str, report: Mapping[str, Any]) -> Path:
    with Run.create(root, kind=kind, name=name, config={"tasks": text}) as run:
        answers = [
            _rollout(f"{model}@{model}", f"sum/{task}{text}", float(task % 2 == place), text=text)
            for place, model in enumerate(("base", "sft"))
            for task in range(4)
        ]
        _append(run, answers)
        run.write_json("report.json", {"kind": kind, "run": name, **report})
        run.finish()
    return root / name


def make_sft(
    root: Path, name: str = "answers", *, text: str = "", report: Mapping[str, Any] | None = None
) -> Path:
    losses = {"first_loss": 2.5, "last_loss": 0.5, "version": "v1", "num_steps": 4, "num_rows": 10}
    found = {"model": f"tiny{text}", "warnings": [f"2 rows were cut. {text}"], **losses}
    return _make_trained(root, "sft", name, {"train/loss": 2.5}, {**found, **(report or {})})


def make_loop(
    root: Path, name: str = "drawn", *, text: str = "", report: Mapping[str, Any] | None = None
) -> Path:
    """Of a kind that the page knows nothing of."""
    rows = [made_row(f"random{text}", 0.9, is_winner=True), made_row("base model", 0.7, gain=None)]
    found = {"sentence": f"The best of 8 random adapters. {text}", "rows": rows, **(report or {})}
    return _make_trained(root, "random_search", name, {"tried/mean": 0.5}, found)


def _make_trained(
    root: Path, kind: str, name: str, metrics: Mapping[str, float], report: Mapping[str, Any]
) -> Path:
    with Run.create(root, kind=kind, name=name, config={}) as run:
        for step in range(4):
            run.log_metrics(step, {key: value / (1 + step) for key, value in metrics.items()})
        run.write_json("report.json", {"kind": kind, "run": name, **report})
        run.finish()
    return root / name
