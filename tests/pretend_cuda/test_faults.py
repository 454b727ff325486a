"""Plants faults in code for a device, each in a copy of the package: the tests that name them must fail."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from pretend_cuda.faults import FAULTS, Fault
from support.pretended import ROOT, built, on_path, with_changes

PACKAGE, TESTS = ROOT / "ddpforge", ROOT / "tests"

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


def failed(folder: Path, tests: Sequence[str]) -> set[str]:
    """Runs tests with the package in `folder`; returns the tests that fail."""
    # The folder is the current one, which `-m` puts on the path before the package of this environment.
    command = [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += ["-m", "", "-rfE", "--tb=line", "-p", "no:cacheprovider", *(f"{TESTS}/{test}" for test in tests)]
    env = with_changes({"PYTHONPATH": on_path(folder)})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    # An error is a fixture that fails: the ranks did not end as they should.
    name = r"^(?:FAILED|ERROR) (?:.*/)?tests/(.*?\.py::[^\[\s]+(?:\[.*?\](?=$| - ))?)"
    return set(re.findall(name, done.stdout, re.M))


@each_fault
def test_patch_fits_the_source_and_its_tests_exist(fault: Fault) -> None:
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    for test in fault.tests:
        file, name = test.partition("[")[0].split("::")
        assert f"\ndef {name}(" in (TESTS / file).read_text()


@pytest.mark.full
@each_fault
def test_fault_is_found(tmp_path: Path, fault: Fault) -> None:
    """Half a minute for most: they count calls of a loop by hand and of ddpforge."""
    built()
    copytree(PACKAGE, tmp_path / "ddpforge", ignore=ignore_patterns("__pycache__"))
    file = tmp_path / "ddpforge" / fault.file
    file.write_text(file.read_text().replace(fault.old, fault.new))
    assert failed(tmp_path, fault.tests) == {*fault.tests}


@pytest.mark.full
def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    built()
    copytree(PACKAGE, tmp_path / "ddpforge", ignore=ignore_patterns("__pycache__"))
    assert failed(tmp_path, sorted({test for fault in FAULTS for test in fault.tests})) == set()
