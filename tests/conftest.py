"""Puts this folder on the import path, for models.py; a slow moment of the machine fails no test."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

LONG = ("test_readme.py", "test_docs.py", "test_docs_targets.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: at the end one would keep one core waiting for it."""
    items.sort(key=lambda item: item.path.name not in LONG)
