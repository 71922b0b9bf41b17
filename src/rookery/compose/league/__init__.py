"""The league: every way to make a model better on one taskset, under one budget.

entrants.py   the config, and each entrant as steps
measure.py    the report tasks, read once; what each earned beside the others
run.py        `run_league`: the entrants one after the other, then the report
"""

from rookery.compose.league.run import LEAGUE, run_league

__all__ = ["LEAGUE", "run_league"]
