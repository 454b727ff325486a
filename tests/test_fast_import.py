"""Imports of large libraries: Python's garbage collector is paused, and runs again afterwards."""

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
def test_objects_imported_inside_are_frozen(is_on: bool) -> None:
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
def test_failed_import_enables_the_collector_again() -> None:
    with pytest.raises(ImportError), gc_paused():
        import nothing_of_that_name  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()


def test_nothing_is_frozen_if_torch_is_already_imported() -> None:
    import torch  # noqa: F401

    frozen = gc.get_freeze_count()
    with gc_paused():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_module_that_forks_ranks_does_not_import_torch() -> None:
    """Ensures that torch is imported inside `gc_paused`, with its dependencies."""
    program = "import sys, ddpforge.testing.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
