"""Hooks: what installed distributions add to ddpforge itself, by entry-point groups that no recipe names."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_distributions import forgetting_modules_below, install
from support.forked import refused

from ddpforge.components.hooks import hooks
from ddpforge.errors import ExitCode, PluginError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with a distribution that has two hooks."""
    points = {"ddpforge.toy": {"b": "tools:second", "a": "tools:first"}}
    install(tmp_path, "Some.Tools", points, modules={"tools.py": "first, second = 1, 2"})
    monkeypatch.syspath_prepend(tmp_path)
    with forgetting_modules_below(tmp_path):
        yield tmp_path


def test_hooks_of_plugins_are_sorted_by_name_after_those_of_ddpforge(site: Path) -> None:
    install(site, "aaa", {"ddpforge.toy": {"z": "ddpforge.errors:ExitCode"}})
    assert hooks("toy") == (ExitCode, 1, 2)


def test_group_without_hooks_is_empty(site: Path) -> None:
    assert hooks("nothing") == ()


def test_disabled_plugins_have_no_hooks(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", "other,some-tools")
    assert hooks("toy") == ()


def test_hook_that_cannot_be_imported_is_refused_with_distribution_and_line(site: Path) -> None:
    install(site, "broken", {"ddpforge.toy": {"bad": "bad_tools:x"}}, modules={"bad_tools.py": "import json\n1 / 0\n"})
    message = refused(PluginError, lambda: hooks("toy"))
    assert "`bad` of broken (ddpforge.toy) cannot be loaded: ZeroDivisionError: division by zero" in message
    assert f"{site / 'bad_tools.py'}:2" in message
    assert "DDPFORGE_DISABLE_PLUGINS=broken" in message
    assert PluginError.exit_code == ExitCode.ENVIRONMENT


def test_entry_points_of_distributions_are_read_once_for_all_groups(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks("toy")
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: pytest.fail("read again"))
    assert hooks("another") == ()
