"""Imports of large libraries: Python's garbage collector leaves them alone, and goes on afterwards."""

import gc
import subprocess
import sys

import pytest

from ddpforge.fast_import import gc_paused


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.usefixtures("no_torch")
def test_what_is_imported_inside_is_never_gone_through(is_on: bool) -> None:
    if not is_on:
        gc.disable()
    frozen = gc.get_freeze_count()
    try:
        with gc_paused():
            assert not gc.isenabled()
            imported = [[number] for number in range(1000)]
        assert gc.isenabled() == is_on
        assert gc.get_freeze_count() >= frozen + len(imported)
        kept = {id(one) for one in gc.get_objects()}
        assert not any(id(one) in kept for one in imported)
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.usefixtures("no_torch")
def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), gc_paused():
        import nothing_of_that_name  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()


def test_nothing_is_frozen_in_a_process_that_has_torch() -> None:
    import torch  # noqa: F401

    frozen = gc.get_freeze_count()
    with gc_paused():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_what_forks_the_ranks_of_tests_begins_without_torch() -> None:
    """So that it is imported inside, with all that follows."""
    program = "import sys, ddpforge.testing.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
