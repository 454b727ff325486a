"""A component that is not of its kind is refused when it is built, by its name."""

from pathlib import Path
from typing import Any

import pytest

from ddpforge.components.building import build
from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError
from ddpforge.recipe.schema import Component


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_no_component_of_any_kind(kind: str) -> None:
    assert KINDS[kind].mismatch(None)


@pytest.mark.parametrize(
    ("kind", "built"), [("schedule", lambda step: 1.0), ("data", [1, 2]), ("data", (number for number in (1, 2)))]
)
def test_data_and_schedules_need_no_base_class(kind: str, built: Any) -> None:
    assert KINDS[kind].mismatch(built) is None


def test_what_is_built_instead_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def net():\n    """A network."""\n    return {"a": 1}\n')
    with pytest.raises(PluginError, match=r"model `\./mine\.py:net` is a dict, and must be a torch\.nn\.Module"):
        build(Registry(), "model", Component(use="./mine.py:net", options={}, base=tmp_path))
