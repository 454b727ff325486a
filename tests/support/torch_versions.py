"""Marks of tests that need a newer torch than the oldest that ddpforge supports."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs_torch(least: str) -> pytest.MarkDecorator:
    """Skips a test if torch is older."""
    return pytest.mark.skipif(Version(version("torch")) < Version(least), reason=f"needs torch {least}")


needs_pipelines = needs_torch("2.14")
