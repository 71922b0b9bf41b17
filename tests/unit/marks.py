"""Marks of tests."""

import os

import pytest

__all__ = ["long"]

long = pytest.mark.skipif(
    not os.environ.get("ROOKERY_LONG"), reason="takes minutes: set ROOKERY_LONG, or make test-real"
)
"""A longer form of what a test that always runs proves too."""
