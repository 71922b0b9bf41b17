"""`rookery ui` with large runs: seconds to what is seen first, frames a second, server memory.

    python benchmarks/ui.py             # about two minutes; needs playwright and Chromium

1,000 runs in one folder, one of them a search with 10,000 candidates, one with 100,000 events. The
server is a process of its own. Seconds are those of the browser, from the request for the page to
the frame in which the rows or the drawing are there. Frames are counted while a table is scrolled
and a chart is moved by script in every frame. ROOKERY_CHROMIUM names another browser.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from rookery.runs import NewEvent, Run

CHROMIUM = os.environ.get("ROOKERY_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
BLOCK = 1_000
SEEN = """(wanted) => new Promise((done) => {
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
    """A search as `genome` writes it, finished."""
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
        run.submit([event("winner", "winner", id=parents[0])]).result()
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
        shutil.copytree(root / "run-0000", root / f"run-{number:04d}")


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, int]]:
    """The page's address and its server's process."""
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


class Bench:
    """Visits with a fresh tab each."""

    def __init__(self, browser: Any, url: str) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 900})
        self.context.new_page().goto(url)
        self.origin = url.partition("?")[0]

    def visit(self, place: str, wanted: str, *scripts: str) -> list[float]:
        """Seconds until something is seen, then what the scripts count."""
        page = self.context.new_page()
        page.goto(self.origin + place, wait_until="commit")
        numbers = [page.evaluate(SEEN, wanted) / 1000]
        numbers += [page.evaluate(script) for script in scripts]
        page.close()
        return numbers


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
        make_long(root, num_events=args.events)
        make_many(root, num_runs=args.runs - 2)
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with serve(root) as (url, pid):
            bench = Bench(browser, url)
            before = memory_mib(pid)
            places = {
                f"{args.runs:,} runs": ("#/runs", ".runs .lt-space .lt-row", SCROLL),
                f"{args.events:,} events": (
                    "#/run/long?tab=events", ".events .lt-space .lt-row button", SCROLL,
                ),
                f"{100 * args.generations:,} candidates": ("#/run/search", ".chart canvas", PAN),
            }  # fmt: skip
            for name, place in places.items():
                rows = [bench.visit(*place) for _ in range(args.times)]
                seconds = " ".join(f"{row[0]:.2f}" for row in rows)
                frames = " ".join(f"{row[1]:.0f}" for row in rows)
                sys.stdout.write(f"{name}: first seen after {seconds} s, {frames} frames/s\n")
            middle = memory_mib(pid)
            for place in list(places.values()) * args.times:
                bench.visit(*place[:2])
            after = memory_mib(pid)
            sys.stdout.write(
                f"server's memory: {before:.0f} MiB, {middle:.0f} after the visits, "
                f"{after:.0f} after as many again\n"
            )
        browser.close()


if __name__ == "__main__":
    main()
