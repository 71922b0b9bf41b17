"""A small genome report as the loop writes it, for the tests of the table and the page."""

from typing import Any

__all__ = ["made_report", "made_row"]


def made_row(name: str, mean: float, /, **keys: Any) -> dict[str, Any]:
    """A row of the comparison, 0.03 wide on both sides."""
    return {
        "name": name,
        "is_winner": False,
        "mean": mean,
        "low": mean - 0.03,
        "high": mean + 0.03,
        "gain": {"mean": mean - 0.7, "low": mean - 0.75, "high": mean - 0.65},
        "by_source": {"label-kind": mean, "add-two": mean - 0.1},
        "num_failed": 0,
        "note": "",
    } | keys


def made_report(**keys: Any) -> dict[str, Any]:
    """Three generations of three; `keys` replace those of the report."""
    return {
        "kind": "genome",
        "run": "demo",
        "model": "smollm2",
        "seed": 0,
        "tasksets": [_taskset("label-kind", 1.0), _taskset("add-two", 2.0)],
        "rows": [
            made_row("evolved", 0.91, is_winner=True, note="g002-c01"),
            made_row("best founder", 0.7, gain=None, note="founder-b"),
            made_row("uniform average", 0.8),
            made_row("plain sum", 0.66),
            made_row("vote of founders", 0.72),
            made_row("random search", 0.85, num_failed=2),
            made_row("vote of the best", 0.9),
            made_row("base model", 0.33),
        ],
        "generations": [_generation(index) for index in range(3)],
        "lineage": _lineage(),
        "num_candidates": 46,
        "num_rollouts": 12345,
        "num_tokens": 123456,
        "seconds": 120.5,
        "warnings": ["2 tasks of add-two could not be scored."],
    } | keys


def _taskset(name: str, weight: float) -> dict[str, Any]:
    splits = {"num_search": 40, "num_select": 16, "num_report": 60}
    return {"name": name, "weight": weight} | splits


def _generation(index: int) -> dict[str, Any]:
    return {
        "generation": index,
        "best": 0.6 + 0.1 * index,
        "mean": 0.5 + 0.1 * index,
        "worst": 0.4,
        "scores": [0.6 + 0.1 * index, 0.5 + 0.1 * index, 0.4],
        "num_candidates": 3,
        "num_dropped": 1,
        "num_failed": 0,
        "num_tokens": 12345 + index,
        "seconds": 3.2,
    }


def _lineage() -> list[dict[str, Any]]:
    """Two founders; founder-c is only named as a parent; g002-c01 wins, g002-c02 failed."""

    def made(name: str, parents: list[str], score: float | None, *, ancestor: bool = False) -> Any:
        return {
            "id": name,
            "generation": int(name[1:4]) if name.startswith("g") else 0,
            "operator": "linear" if parents else "founder",
            "parents": parents,
            "weights": [0.6, 0.4][: len(parents)],
            "score": score,
            "is_winner": name == "g002-c01",
            "is_ancestor": ancestor,
        }

    return [
        made("founder-a", [], 0.6, ancestor=True),
        made("founder-b", [], 0.5, ancestor=True),
        made("g001-c00", ["founder-a", "founder-b"], 0.7, ancestor=True),
        made("g001-c01", ["founder-b", "founder-c"], 0.4),
        made("g002-c01", ["g001-c00", "founder-a"], 0.8, ancestor=True),
        made("g002-c02", ["g001-c01"], None),
    ]
