"""Turn a config into a finished run, for scripts, notebooks and the command line.

    outcome = run_genome("mine.yaml", seed=3)
    outcome.report.winner.mean, outcome.path / "winner"

running.py                      plans, opens, resumes and reports every run
inputs.py                       digests of the inputs that a run starts on
kinds.py                        finds a kind of run by name; resumes an interrupted run
loop.py                         runs a loop that needs no assembly of its own
genome, icm, evaluation, sft    one file each: config -> objects -> loop -> report and page
grpo/                           the same; setup.py reads the config and decides what it means
league/                         every loop under one budget, on one taskset, ranked
pipeline.py, steps.py           loops that feed each other, as one run
evolve.py, evolve_inputs.py     evolution of programs and prompts
proposers.py, engine_models.py  the models that write programs
serve.py, http_server.py        the service and its HTTP server

Import each module directly: it loads only what its loop needs.
"""

__all__ = ["KINDS"]

KINDS = {
    "eval": "rookery.compose.evaluation:EVALUATION",
    "evolve": "rookery.compose.evolve:EVOLVE",
    "genome": "rookery.compose.genome:GENOME",
    "grpo": "rookery.compose.grpo:GRPO",
    "icm": "rookery.compose.icm:ICM",
    "league": "rookery.compose.league:LEAGUE",
    "pipeline": "rookery.compose.pipeline:PIPELINE",
    "sft": "rookery.compose.sft:SFT",
}
"""Kinds of runs by name: a `RunKind`, or a `Loop` that needs no assembly of its own. Each imports
its loop on first use. A kind without a command of its own gets `rookery KIND run`."""
