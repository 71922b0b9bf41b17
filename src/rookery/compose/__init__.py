"""From a config to a finished run, once for all callers: scripts, notebooks, the command line.

    outcome = run_genome("mine.yaml", seed=3)
    outcome.report.winner.mean, outcome.path / "winner"

running.py                      how every run is planned, opened and reported
inputs.py                       what runs are started on, as digests
kinds.py                        which kinds there are; an interrupted run goes on
loop.py                         a loop that needs no assembly of its own, as a kind of run
genome, icm, evaluation, sft    one each: config -> objects -> loop -> report and page
grpo/                           the same; setup.py: all that a config names and means
pipeline.py                     loops that feed each other, as one run
evolve.py, evolve_inputs.py     the same for programs and prompts
proposers.py, engine_models.py  the models that write programs
serve.py, http_server.py        the service and the server it answers on

Each is imported by itself: a loop loads what it needs and no more.
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
"""The kinds of runs by name: a `RunKind`, or a `Loop` that needs no assembly of its own. Each
imports its loop when it is needed; one without a command of its own gets `rookery KIND run`."""
