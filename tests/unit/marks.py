"""Marks of tests."""

import pytest

__all__ = ["long"]

long = pytest.mark.long
"""A longer form of what a test that always runs proves too: `make test-real` runs it."""
