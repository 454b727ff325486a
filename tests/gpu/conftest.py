"""Skips tests of libraries that a pretended device does not have, if the tests run on one."""

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PRETEND_CUDA_DEVICES" not in os.environ:
        return
    found = item.get_closest_marker("real")
    params = getattr(item, "callspec", None)
    compiles = params is not None and params.params.get("compile") not in (None, False, "off")
    if found or compiles:
        pytest.skip(f"needs {found.args[0] if found else 'Triton'} itself")
