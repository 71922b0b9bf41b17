"""Marks of tests."""

import sys
from platform import machine

import pytest

__all__ = ["long", "needs_int4"]

long = pytest.mark.long
"""A longer form of what a test that always runs proves too: `make test-real` runs it."""

needs_int4 = pytest.mark.skipif(
    sys.platform != "linux" or machine() not in ("aarch64", "x86_64"),
    reason="torch has kernels for Linux on Arm and x86",
)
