"""What only newer versions of torch can do, of those with which ddpforge runs."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs_torch(least: str) -> pytest.MarkDecorator:
    """Leaves a test out where torch is older."""
    return pytest.mark.skipif(Version(version("torch")) < Version(least), reason=f"needs torch {least}")


needs_pipelines = needs_torch("2.14")
