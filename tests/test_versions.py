"""Supported versions: one table, which the package, the docs and continuous integration agree with, and its runner."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ddpforge import compat

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRANSFORMERS = tomllib.loads((ROOT / "plugins/ddpforge-transformers/pyproject.toml").read_text())["project"]
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="good"/>
<testcase classname="tests.test_a" name="skips"><skipped/></testcase>
<testcase classname="tests.test_a" name="wrong"><failure/></testcase>
<testcase classname="tests.test_a" name="setup"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tests/versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["versions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def required(package: str) -> SpecifierSet:
    """Returns the range of a package in pyproject.toml, or in ddpforge-transformers."""
    texts = [*PROJECT["dependencies"], *TRANSFORMERS["dependencies"]]
    for extra in ("deepspeed", "vision", "fp8"):
        texts += PROJECT["optional-dependencies"][extra]
    (found,) = {str(one.specifier) for text in texts if (one := Requirement(text)).name == package}
    return SpecifierSet(found)


def oldest(versions: SpecifierSet) -> Version:
    return next(Version(one.version) for one in versions if one.operator == ">=")


# ------------------------------------------------------------------------------------------------ the table
@pytest.mark.parametrize("package", ["torch", "torchvision", "torchao", "accelerate", "deepspeed", "transformers"])
def test_a_row_has_the_oldest_version_of_each_package(script: ModuleType, package: str) -> None:
    pinned = [SpecifierSet(pin) for row in script.rows() if (pin := row.pin(package))]
    least = oldest(required(package))
    assert any(least in pins for pins in pinned), f"no row has {package} {least}"
    exact = [Version(one.version.removesuffix(".*")) for pins in pinned for one in pins if one.operator == "=="]
    assert min(exact) >= Version(f"{least.major}.{least.minor}"), "a row is older than the package allows"


def test_a_row_has_each_python_of_the_package(script: ModuleType) -> None:
    stated = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    assert stated <= {row.python for row in script.rows()}
    untried = [row for row in script.rows() if row.python not in stated]
    assert all("not run" in row.note for row in untried), "the docs name Pythons that no test has run with"
    assert min(stated) == str(oldest(SpecifierSet(PROJECT["requires-python"])))


def test_a_row_has_each_torch_without_a_gap(script: ModuleType) -> None:
    found = {int(re.fullmatch(r"==2\.(\d+)\.\*", row.pin("torch"))[1]) for row in script.rows()}
    assert found == set(range(min(found), max(found) + 1))


def test_the_workflow_has_the_rows(script: ModuleType) -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    found = re.findall(r'^ +- \{ name: (\S+), python: "(.+?)" \}$', workflow, re.MULTILINE)
    assert found == [(row.name, row.python) for row in script.rows()]
    assert "tests/versions.py --pins ${{ matrix.name }} >" in workflow


def test_features_need_the_versions_that_the_code_checks(script: ModuleType) -> None:
    found = {need["feature"]: need["torch"] for need in script.table()["needs"]}
    assert found == {
        "strategy `pipeline`": compat.PIPELINES,
        "strategy `deepspeed` with stage 3 and `train.compile`": compat.COMPILED_STAGE_3,
        "strategy `fsdp` for models with parameters of integers": compat.SHARDED_INTEGERS,
    }
    assert all(Version(least) > oldest(required("torch")) for least in found.values()), "all supported versions have it"


def test_the_tests_of_a_row_exist(script: ModuleType) -> None:
    assert [test for test in script.table()["tests"] if not (ROOT / test).exists()] == []


# ------------------------------------------------------------------------------------------------ the script
def test_pins_are_a_constraints_file(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--pins", "torch-2.11"]) == 0
    assert capsys.readouterr().out == "torch==2.11.*\ntorchvision==0.26.*\ntorchao==0.17.*\n"


def test_a_pin_is_of_the_whole_name(script: ModuleType) -> None:
    row = script.Row("row", "3.11", ("torchvision==0.26.*", "torch==2.11.*"))
    assert row.pin("torch") == "==2.11.*"
    assert row.pin("torchvision") == "==0.26.*"
    assert row.pin("torchao") is None


def test_tests_of_a_plugin_run_in_its_folder(script: ModuleType) -> None:
    plugin = ROOT / "plugins/ddpforge-sam"
    found = script.by_folder(["tests/strategies", "plugins/ddpforge-sam", "tests/test_compat.py"])
    assert found == {ROOT: [str(ROOT / "tests/strategies"), str(ROOT / "tests/test_compat.py")], plugin: []}
    assert script.by_folder([]) == {ROOT: []}, "all tests"


def test_a_python_that_does_not_start_is_not_chosen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shims, pyenv = tmp_path / "shims", tmp_path / "pyenv/versions/3.77.1/bin"
    for folder, name, code in ((shims, "python3.77", 127), (pyenv, "python", 0)):
        folder.mkdir(parents=True)
        (folder / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert script.installed_python("3.77") == str(pyenv / "python")
    assert script.installed_python("3.78") is None


def test_a_row_runs_tests_and_reports_failures(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert False\n"
        "@pytest.mark.skip\ndef test_left(): pass\n@pytest.mark.slow\ndef test_long(): assert False\n"
    )
    monkeypatch.setattr(script, "OUT", tmp_path)
    monkeypatch.setattr(script, "make_environment", lambda row, place: Path(sys.executable))
    assert script.main(["--only", "newest", "--tests", str(tmp_path / "test_one.py"), "--processes", "1"]) == 1
    (result,) = json.loads((tmp_path / "results.json").read_text()).values()
    assert (result["passed"], result["failed"], result["skipped"]) == (1, 1, 1), "slow tests do not run"
    assert [test.rpartition("::")[2] for test in result["failures"]] == ["test_bad"]
    assert Version(result["versions"]["torch"]) in required("torch")
    out = capsys.readouterr().out
    assert re.search(r"^newest +\d\S+ +\d\S+ +1 +1 +1 +\d+$", out, re.MULTILINE)
    assert re.search(r"^newest: FAILED \S*test_one::test_bad$", out, re.MULTILINE)


def test_a_row_without_its_environment_is_reported_and_fails(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(row: object, place: Path) -> Path:
        raise script.NotRunError("no python3.14 on PATH")

    monkeypatch.setattr(script, "OUT", tmp_path)
    monkeypatch.setattr(script, "make_environment", missing)
    assert script.main(["--only", "newest-3.14"]) == 1
    assert "newest-3.14   not run: no python3.14 on PATH\n" in capsys.readouterr().out


def test_results_of_other_rows_remain(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    one = script.counted("one", [tmp_path / "a.xml", tmp_path / "a.xml"], 7, {"torch": "2.11.0"}, ["tests"])
    assert (one.passed, one.failed, one.skipped, one.good) == (2, 4, 2, False)
    script.write(one, tmp_path / "results.json")
    script.write(script.Result("two", passed=3), tmp_path / "results.json")
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == ["one", "two"]
    assert found["one"]["failures"] == ["tests.test_a::wrong", "tests.test_a::setup"] * 2
