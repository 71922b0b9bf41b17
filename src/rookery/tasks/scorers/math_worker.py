"""Worker process of the math scorer: one JSON line in, one JSON line out. `numeric.py` starts it.

    {"references": ["1/2"], "answer": "so it is $0.5$"}  ->  {"equal": true}
    {"references": [":("], "answer": "2"}                ->  {"error": "..."}

It imports nothing from Rookery and limits its own memory. Its parent limits its time.
"""

import json
import logging
import os
import resource
import sys

__all__ = ["compare", "main"]

MAX_MEMORY_BYTES = 4 << 30
"""Limit on address space: enough for sympy, too little for a number with a billion digits."""


def compare(references: list[str], answer: str) -> dict[str, str | bool]:
    """Compare the answer with each reference; return an error if a reference is not a formula.

    An answer without a formula, or with one that cannot be compared, is not equal.
    """
    from math_verify import parse, verify

    golds = [parse(_delimited(text), parsing_timeout=None) for text in references]
    for text, gold in zip(references, golds, strict=True):
        if not gold or all(isinstance(part, str) for part in gold):
            return {"error": f"the reference {text!r} is no formula that math-verify can read."}
    parsed = parse(answer, parsing_timeout=None)
    return {"equal": any(verify(gold, parsed, timeout_seconds=None) for gold in golds)}


def _delimited(reference: str) -> str:
    """Return the part after ####, in LaTeX delimiters, by which math-verify finds formulas."""
    reference = reference.rpartition("####")[2].strip()
    is_delimited = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    return reference if is_delimited else f"${reference}$"


def main() -> None:
    """Answer until the parent closes the pipe."""
    # Redirect standard output, so that a library that prints cannot corrupt the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    compare(["1"], "1")  # import everything before the first time limit starts
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(compare(**json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
