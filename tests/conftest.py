"""Tests that take minutes run when ROOKERY_LONG is set, as `make test-real` sets it."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("ROOKERY_LONG"):
        return
    skip = pytest.mark.skip(reason="takes minutes: set ROOKERY_LONG, or make test-real")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skip)
