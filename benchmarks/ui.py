"""`rookery ui` with large runs: seconds to the first content, frames per second, server memory.

    python benchmarks/ui.py             # about four minutes; needs playwright and Chromium

1,000 runs in one folder, one of them a search with 10,000 candidates and 100,000 answers, one an
evolution of 10,000 programs, one an evaluation with 100,000 answers, one with 100,000 events. The
server is its own process. Seconds are measured in the browser, from the request for the page to the
frame that shows the rows or the drawing. Frames are counted while a script scrolls a table and
moves a chart in every frame. Processor seconds of the page's main thread and of the server depend
less on other work on the machine. ROOKERY_CHROMIUM names another browser.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from rookery.runs import NewEvent, Run

CHROMIUM = os.environ.get("ROOKERY_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
BLOCK = 1_000
SEEN = """(wanted) => new Promise((done, failed) => {
    setTimeout(() => failed(new Error(`no ${wanted} within a minute`)), 60000);
    const look = () => {
        const found = [...document.querySelectorAll(wanted)].some((one) => one.clientHeight);
        if (found) requestAnimationFrame(() => done(performance.now()));
        else requestAnimationFrame(look);
    };
    look();
})"""
SCROLL = """() => new Promise((done) => {
    const body = document.querySelector(".lt-body");
    const begun = performance.now();
    let frames = 0;
    const step = () => {
        body.scrollTop += 400;
        frames += 1;
        if (performance.now() - begun < 3000) requestAnimationFrame(step);
        else done((1000 * frames) / (performance.now() - begun));
    };
    requestAnimationFrame(step);
})"""
PAN = """() => new Promise((done) => {
    const chart = echarts.getInstanceByDom(document.querySelector(".chart:has(canvas)"));
    const begun = performance.now();
    let frames = 0;
    const step = () => {
        const start = 20 + 20 * Math.sin(frames / 10);
        chart.dispatchAction({ type: "dataZoom", start, end: start + 40 });
        frames += 1;
        if (performance.now() - begun < 3000) requestAnimationFrame(step);
        else done((1000 * frames) / (performance.now() - begun));
    };
    requestAnimationFrame(step);
})"""


def event(kind: str, key: str, **payload: Any) -> NewEvent:
    return NewEvent(kind=kind, key=key, payload=payload)


def make_search(root: Path, *, generations: int, size: int) -> None:
    """Make a finished search as `genome` writes it."""
    config = {"engine": {"model": "smollm2"}, "stages": [{"generations": generations}]}
    with Run.create(root, kind="genome", name="search", config=config) as run:
        parents: list[str] = []
        for number in range(generations):
            names = [f"g{number:03d}-c{place:03d}" for place in range(size)]
            scores = [0.4 + 0.002 * number + 0.001 * (place % 97) for place in range(size)]
            news = [
                event(
                    "candidate", name, id=name, version=f"v-{name}", error="", num_tasks=16,
                    parents=[parents[place // 2], parents[place // 3]] if parents else [],
                    operator="linear" if parents else "founder", score=scores[place],
                )
                for place, name in enumerate(names)
            ]  # fmt: skip
            summed = {"best": max(scores), "mean": sum(scores) / size, "worst": min(scores)}
            counts = {"num_candidates": size, "num_dropped": 0, "num_failed": 0, "num_tokens": 99}
            rest: dict[str, Any] = {"scores": scores, "stage": "ga", "seconds": 0.5}
            news.append(
                event("generation", str(number), generation=number, **summed, **counts, **rest)
            )
            run.submit(news).result()
            run.log_metrics(number, {"genome/best": summed["best"]})
            parents = names
        last = generations - 1
        versions = [f"v-g{number:03d}-c{place:03d}" for number in (0, last) for place in range(100)]
        add_answers(run, [*versions, *(f"v-{n}" for n in range(1800))], num_tasks=50)
        run.submit([event("winner", "winner", id=parents[0])]).result()
        run.finish()


def add_answers(run: Run, versions: Sequence[str], *, num_tasks: int) -> None:
    """Add answers of 40 tokens each, as evaluations write them."""
    completion = {
        "text": "word " * 40, "tokens": list(range(1000, 1040)), "logprobs": [-0.123456] * 40,
        "finish_reason": "stop",
    }  # fmt: skip
    for version in versions:
        for first in range(0, num_tasks, BLOCK):
            news = [
                event(
                    "rollout", f"{version}|set/{task}|said|how", model=f"m@{version}", error="",
                    task=f"set/{task}", reward=float(task % 3 == 0), completion=completion,
                    num_tokens=70,
                )
                for task in range(first, min(first + BLOCK, num_tasks))
            ]  # fmt: skip
            run.submit(news).result()


def make_programs(root: Path, *, num_programs: int) -> None:
    """Make an evolution without a report, in which every seventh program failed."""
    with Run.create(root, kind="evolve", name="programs", config={"settings": {}}) as run:
        blob = run.blobs.put_bytes(json.dumps({"code": "x = 1\n" * 40}).encode())
        first = {"program": blob, "metrics": {"combined_score": 0.1}, "failure": None}
        run.submit([event("first_program", "1", **first)]).result()
        for number in range(1, num_programs + 1):
            parent = f"p{number - 1 - number % 97}" if number > 97 else "first1"
            plan = {"island": number % 5, "parent": parent, "generation": number // 100, "arm": "m"}
            metrics = {"combined_score": 1e-4 * number * (number % 11), "speed": 1.0}
            failure = {"failure": {"kind": "timeout", "message": "Over 10 s."}}
            states: dict[str, dict[str, Any]] = {
                "planned": {"plan": plan},
                "generated": {"model": "m", "prompt_tokens": 1000, "completion_tokens": 200},
                "evaluated": {"program": blob, "metrics": metrics},
            }
            states |= {"committed": {}} if number % 7 else {"failed": failure}
            news = [
                event("attempt", f"{number}/{state}", number=number, state=state, data=data)
                for state, data in states.items()
            ]
            run.submit(news)
            run.log_metrics(number, {"evolve/best_score": 1e-3 * number})
        run.finish()


def make_answers(root: Path, *, num_answers: int) -> None:
    with Run.create(root, kind="eval", name="answers", config={}) as run:
        add_answers(run, ["base", "trained"], num_tasks=num_answers // 2)
        run.finish()


def make_long(root: Path, *, num_events: int) -> None:
    with Run.create(root, kind="eval", name="long", config={}) as run:
        for first in range(0, num_events, BLOCK):
            news = [
                event("note", str(number), number=number, text="x" * 80)
                for number in range(first, first + BLOCK)
            ]
            run.submit(news).result()
        run.finish()


def make_many(root: Path, *, num_runs: int) -> None:
    with Run.create(root, kind="eval", name="run-0000", config={"model": "tiny"}) as run:
        for step in range(20):
            run.log_metrics(step, {"reward/mean": step / 20})
        run.finish()
    for number in range(1, num_runs):
        folder = shutil.copytree(root / "run-0000", root / f"run-{number:04d}")
        rows = [{"step": step, "reward/mean": step * number % 97 / 97} for step in range(20)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "config.json").write_text(json.dumps({"model": f"tiny-{number}"}))


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, int]]:
    """Serve the page; yields its address and the server's process id."""
    words = [sys.executable, "-m", "rookery", "ui", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Seen:
    """Measurements of one visit."""

    first_s: float
    page_s: float
    """Processor seconds of the page's main thread until the first content; `server_s` likewise."""
    server_s: float
    frames: float
    """Frames per second."""
    frame_ms: float
    """Processor milliseconds per frame on the main thread."""


class Bench:
    """Visits pages, each in a fresh tab."""

    def __init__(self, browser: Any, url: str, pid: int) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 900})
        self.origin = url.partition("?")[0]
        self.context.request.get(url)  # gets the cookie without requesting a run
        self.context.new_page().goto(f"{self.origin}static/page.css")  # an idle tab
        self.pid = pid

    def visit(self, place: str, wanted: str, move: str) -> Seen:
        page = self.context.new_page()
        link = self.context.new_cdp_session(page)
        link.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy_s() -> float:
            metrics = link.send("Performance.getMetrics")["metrics"]
            return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

        page_s, server_s = busy_s(), processor_s(self.pid)
        page.goto(self.origin + place, wait_until="commit")
        first_s = page.evaluate(SEEN, wanted) / 1000
        page_s, server_s = busy_s() - page_s, processor_s(self.pid) - server_s
        begun_s = busy_s()
        frames = page.evaluate(move)
        frame_ms = 1000 * (busy_s() - begun_s) / (3 * frames)
        page.close()
        return Seen(first_s, page_s, server_s, frames, frame_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--generations", type=int, default=100, help="of 100 candidates each")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3, help="how often each page is opened")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        root = Path(folder) / "runs"
        make_search(root, generations=args.generations, size=100)
        make_programs(root, num_programs=100 * args.generations)
        make_answers(root, num_answers=args.events)
        make_long(root, num_events=args.events)
        make_many(root, num_runs=args.runs - 4)
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with serve(root) as (url, pid):
            bench = Bench(browser, url, pid)
            before = memory_mib(pid)
            places = {
                f"{args.runs:,} runs": ("#/runs", ".runs .lt-space .lt-row", SCROLL),
                f"{args.events:,} events": (
                    "#/run/long?tab=events", ".events .lt-space .lt-row button", SCROLL,
                ),
                f"{100 * args.generations:,} candidates": ("#/run/search", ".chart canvas", PAN),
                f"{100 * args.generations:,} programs": ("#/run/programs", ".chart canvas", PAN),
                f"{args.events:,} answers": (
                    "#/run/answers", ".tasks .lt-space .lt-row button", SCROLL,
                ),
            }  # fmt: skip
            for name, place in places.items():
                rows = [bench.visit(*place) for _ in range(args.times)]
                told = [
                    ("first seen after", [f"{row.first_s:.2f}" for row in rows], "s"),
                    ("processor: page", [f"{row.page_s:.2f}" for row in rows], "s"),
                    ("server", [f"{row.server_s:.2f}" for row in rows], "s"),
                    ("frame", [f"{row.frame_ms:.1f}" for row in rows], "ms"),
                    ("seen", [f"{row.frames:.0f}" for row in rows], "frames/s"),
                ]
                line = ", ".join(
                    f"{what} {' '.join(numbers)} {unit}" for what, numbers, unit in told
                )
                sys.stdout.write(f"{name}: {line}\n")
            middle = memory_mib(pid)
            for place in list(places.values()) * args.times:
                bench.visit(*place)
            after = memory_mib(pid)
            sys.stdout.write(
                f"server's memory: {before:.0f} MiB, {middle:.0f} after the visits, "
                f"{after:.0f} after as many again\n"
            )
        browser.close()


if __name__ == "__main__":
    main()
