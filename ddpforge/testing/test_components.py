"""Tests of the conformance kit for pytest: one for each component and check."""

from __future__ import annotations

import pytest

from ddpforge.testing.cases import Case
from ddpforge.testing.kit import Kit
from ddpforge.testing.registered_checks import Check


def test_component(component_check: tuple[Case, Check], kit: Kit) -> None:
    """Runs one check of one component."""
    result = kit.result(*component_check)
    if result.status == "failed":
        pytest.fail(result.text(), pytrace=False)
    if result.status == "skipped":
        pytest.skip(result.text())
