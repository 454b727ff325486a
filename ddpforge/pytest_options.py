"""The options of `pytest --pyargs ddpforge.testing`: pytest reads options before it looks into packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The same filters as `ddpforge plugins test`."""
    group = parser.getgroup("ddpforge")
    group.addoption(
        "--ddpforge-dist", metavar="NAME", help="The distribution, or the .py file, whose components to test."
    )
    group.addoption("--ddpforge-kind", metavar="KIND", help="Only components of this kind.")
    group.addoption("--ddpforge-name", metavar="NAME", action="append", default=[], help="Only this one; repeatable.")
    group.addoption("--ddpforge-quick", action="store_true", help="Leave out the checks that start processes.")
