"""Creates the tests that the options of `ddpforge.pytest_options` select."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpforge.errors import UsageError
from ddpforge.testing.cases import find_cases
from ddpforge.testing.kit import Kit

_KIT = pytest.StashKey[Kit]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Creates a test for each component and check."""
    if "component_check" not in metafunc.fixturenames:
        return
    config = metafunc.config
    target = config.getoption("--ddpforge-dist")
    if not target:
        raise pytest.UsageError("name the distribution to test: --ddpforge-dist NAME")
    try:
        cases = find_cases(
            target, kind=config.getoption("--ddpforge-kind"), names=tuple(config.getoption("--ddpforge-name"))
        )
    except UsageError as error:
        raise pytest.UsageError("\n".join([error.message, *error.hints])) from error
    kit = config.stash.setdefault(_KIT, Kit(cases, quick=config.getoption("--ddpforge-quick")))
    pairs = list(kit.pairs())
    ids = [f"{case.kind}-{case.label}-{check.name}" for case, check in pairs]
    metafunc.parametrize("component_check", pairs, ids=ids)


@pytest.fixture(scope="session")
def kit(pytestconfig: pytest.Config) -> Iterator[Kit]:
    """Yields the kit; tests share its launches of ranks."""
    found: Any = pytestconfig.stash[_KIT]
    with found:
        yield found
