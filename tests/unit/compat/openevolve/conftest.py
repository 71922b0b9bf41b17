"""The real OpenEvolve, as the tests of the loop have it."""

from loops.evolve.conftest import openevolve, openevolve_python

__all__ = ["openevolve", "openevolve_python"]
