"""The league: runs every way to improve a model on one taskset, under one budget.

entrants.py   the config, and each entrant as steps
measure.py    measures all results on the report tasks, and writes the report
run.py        `run_league`: the entrants one after the other, then the report
"""

from rookery.compose.league.run import LEAGUE, run_league

__all__ = ["LEAGUE", "run_league"]
