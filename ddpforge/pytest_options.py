"""Options of `pytest --pyargs ddpforge.testing`, in a module of their own: pytest reads options before packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the filters of `ddpforge plugins test`."""
    group = parser.getgroup("ddpforge")
    group.addoption("--ddpforge-dist", metavar="NAME", help="Distribution, or .py file, with the components to test.")
    group.addoption("--ddpforge-kind", metavar="KIND", help="Only components of this kind.")
    group.addoption(
        "--ddpforge-name",
        metavar="NAME",
        action="append",
        default=[],
        help="Only the component of this name; repeatable.",
    )
    group.addoption("--ddpforge-quick", action="store_true", help="Skip the checks that start processes.")
