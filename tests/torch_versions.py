"""What only newer versions of torch can do, of those with which ddpforge runs."""

from importlib.metadata import version

import pytest
from packaging.version import Version

needs_pipelines = pytest.mark.skipif(Version(version("torch")) < Version("2.14"), reason="pipelines need torch 2.14")
