"""From a config to a finished run, once for all callers: scripts, notebooks, the command line.

    outcome = run_genome("mine.yaml", seed=3)
    outcome.report.winner.mean, outcome.path / "winner"

genome, grpo, icm, evaluation      one each: config -> objects -> loop -> report and page
evolve.py                          the same for programs: evolve_inputs, evolve_log, evolve_check
proposers.py, engine_models.py     the models that write programs
sft.py                             a taskset -> an adapter
running.py                         configs from files and keywords, runs, the one event loop
inputs.py                          tasksets and engines, opened before a run is made
resuming.py                        any run that was interrupted, by its kind

Each is imported by itself: a loop loads what it needs and no more.
"""

__all__: list[str] = []
