"""Ways to use the kit: the command, pytest, a distribution, a file, and the author's settings file."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import dedent

import psutil
import pytest
from click.testing import CliRunner, Result
from support import SUPPORT
from support.fake_distributions import forgetting_modules_below, install

from ddpforge.cli import main
from ddpforge.components.registry import PLUGIN_API, Registry
from ddpforge.testing import Kit, conform
from ddpforge.testing.cases import find_cases

PARTS = '''
    """Two schedules and a helper."""
    from collections.abc import Callable
    from ddpforge.interfaces import Horizon

    def half(horizon: Horizon) -> Callable[[int], float]:
        """A half."""
        return lambda step: 0.5

    def falls(horizon: Horizon) -> Callable[[int], float]:
        """Falls below zero."""
        return lambda step: 1.0 - step / 50

    def helper(x: int) -> int:
        return x
'''

STOPS = '''
    """A callback that has the kit stopped, and does not end by itself."""
    import os
    import time
    from multiprocessing import parent_process
    from pathlib import Path
    from ddpforge.interfaces import Callback, RunContext

    class Stops(Callback):
        """Signals the process that has started this rank, and waits."""
        def on_start(self, run: RunContext) -> None:
            Path("FOLDER", str(os.getpid())).touch()
            run.world.global_ranks.barrier()
            if run.world.is_rank_zero:
                os.kill(parent_process().pid, NUMBER)
            time.sleep(1000)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with forgetting_modules_below(tmp_path):
        yield tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plugins", "test", *arguments])


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(dedent(text))


# ---------------------------------------------------------------------------------------------- the command
def test_local_file_is_tested_without_a_package(folder: Path) -> None:
    write("parts.py", PARTS)
    result = invoke("./parts.py")
    assert result.exit_code == 1
    assert "passed  schedule half: pure\n" in result.stdout
    assert (
        "failed  schedule falls: finite\n"
        "        expected  a finite factor of at least 0\n"
        "        found     -0.020000000000000018 at step 51 of 100\n"
        f"        look at   {folder}/parts.py:12\n"
    ) in result.stdout
    assert "helper" not in result.stdout
    assert result.stdout.endswith("15 passed, 1 failed, 0 skipped\n")
    assert invoke("./parts.py:half").exit_code == 0
    assert invoke("./parts.py", "--name", "half", "--kind", "schedule").exit_code == 0


def test_json_output_has_all_results(folder: Path) -> None:
    write("parts.py", PARTS)
    found = json.loads(invoke("parts.py", "--json").stdout)
    assert (found["schema_version"], found["target"], found["passed"]) == (1, "parts.py", False)
    (failure,) = (one for one in found["results"] if one["status"] == "failed")
    assert failure["where"] == f"{folder}/parts.py:12"
    assert (failure["kind"], failure["name"], failure["check"]) == ("schedule", "falls", "finite")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-distribution"], "no distribution `no-such-distribution` is installed"),
        (["ddpforg"], "did you mean `ddpforge`?"),
        (["mlp"], "for the component: ddpforge plugins test ddpforge --name mlp"),
        (["."], ". is a folder, not a distribution or a file"),
        (["ddpforge", "--name", "mlpp"], "has no such component"),
        (["./missing.py"], "there is no file missing.py"),
        (["./helpers.py"], "the kind of the components in helpers.py is not known"),
        (["ddpforge", "--kind", "thing"], "Invalid value for '--kind'"),
    ],
)
def test_target_without_components_is_a_usage_error(arguments: list[str], says: str) -> None:
    write("helpers.py", "def helper(x: int) -> int: ...\n")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_quick_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.testing.multi_rank_runs.run_ranks", None)
    assert invoke("ddpforge", "--quick", "--kind", "callback").exit_code == 0


def test_no_ranks_start_for_skipped_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "parts.py",
        """
        from ddpforge.interfaces import Callback

        class Tried(Callback):
            '''Does nothing.'''

        class LeftOut(Callback):
            '''Does nothing either.'''
        """,
    )
    write(
        "ddpforge_testing.toml",
        "[callback.LeftOut.skip]\nagrees-on-all-ranks = 'not today'\nstate-round-trip = 'nor this'\n",
    )
    said: list[str] = []
    monkeypatch.setattr("ddpforge.testing.multi_rank_runs.run_ranks", lambda *_, **__: CompletedProcess([], 1, "", ""))
    with Kit(find_cases("parts.py"), say=said.append) as kit:
        skipped = [result.check for result in kit.run() if result.text().startswith("by its settings")]
    assert skipped == ["agrees-on-all-ranks", "state-round-trip"]
    assert said == ["starting 2 ranks for callback Tried"]


@pytest.mark.parametrize("code", [75, 130, 15])
def test_kit_stops_if_its_ranks_are_stopped(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(
        "ddpforge.testing.multi_rank_runs.run_ranks", lambda *_, **__: CompletedProcess([], code, "", "")
    )
    result = invoke("ddpforge", "--kind", "callback", "--name", "ema")
    assert result.exit_code == 130
    assert "stopped; not all checks were made" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_signal_to_the_kit_stops_its_ranks(folder: Path, number: signal.Signals) -> None:
    ranks, before = folder / "ranks", signal.getsignal(signal.SIGTERM)
    ranks.mkdir()
    write("stops.py", STOPS.replace("FOLDER", str(ranks)).replace("NUMBER", str(number.value)))
    result = invoke("stops.py")
    assert result.exit_code == 130
    assert "stopped; not all checks were made" in result.stderr
    assert len(list(ranks.iterdir())) == 2
    assert not any(psutil.pid_exists(int(rank.name)) for rank in ranks.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------------------------------------- settings of authors
def test_settings_provide_options_other_components_and_declarations() -> None:
    write(
        "pkg/parts.py",
        '''
        """A model that takes two numbers."""
        from typing import Annotated
        from pydantic import Field
        from torch import Tensor, nn

        class Two(nn.Module):
            """Gives `out` numbers."""
            def __init__(self, *, out: Annotated[int, Field(ge=1, description="How many.")]) -> None:
                super().__init__()
                self.layer, self.idle = nn.Linear(2, out), nn.Linear(2, 2)
            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x)

        class Points:
            """Points."""
            random = False
            def __len__(self) -> int:
                return 20
            def __getitem__(self, index: int):
                import torch
                return torch.tensor([index, 1.0]), torch.tensor([1.0])
        ''',
    )
    settings = """
        [[model.Two]]
        options = { out = 1 }
        data = { use = "./parts.py:Points" }
        task = { use = "regression" }
        unused = ["idle.*"]
        skip = { meta-device = "not today" }

        [[model.Two]]
        options = { out = 0 }
    """
    write("pkg/ddpforge_testing.toml", settings)
    with Kit(find_cases("pkg/parts.py", kind="model"), quick=True) as kit:
        found = {(result.name, result.check): result for result in kit.run()}
    first = {check: result.status for (name, check), result in found.items() if name == "Two[1]"}
    assert first == {check: "skipped" if check == "meta-device" else "passed" for check in first}
    assert found["Two[1]", "meta-device"].text() == "by its settings: not today"
    refused = found["Two[2]", "builds"]
    assert "out: Input should be greater than or equal to 1" in refused.text()
    assert refused.where == str(Path("pkg/ddpforge_testing.toml").resolve())
    assert found["Two[2]", "finite"].text() == "not possible: builds failed"


@pytest.mark.parametrize("uses", [("GraphNet", "Graphs", "GraphTask"), ("Detector", "Boxes", "Detection")])
def test_batches_may_be_other_objects_than_tensors(folder: Path, uses: Sequence[str]) -> None:
    file, (net, data, task) = folder / "odd_batches.py", uses
    file.write_text((SUPPORT / "odd_batches.py").read_text())
    model, given, trained = (f'{{ use = "./odd_batches.py:{use}" }}' for use in uses)
    write(
        "ddpforge_testing.toml",
        f"[model.{net}]\ndata = {given}\ntask = {trained}\n[task.{task}]\ndata = {given}\nmodel = {model}\n",
    )

    def tested() -> dict[tuple[str, str], str]:
        cases = [case for use in uses for case in find_cases(f"odd_batches.py:{use}")]
        with Kit(cases, quick=True) as kit:
            return {(result.name, result.check): result.status for result in kit.run()}

    found = tested()
    assert "failed" not in found.values()
    assert [found[data, "each-sample-once"], found[net, "finite"], found[task, "loss-is-a-sum"]] == ["passed"] * 3

    file.write_text(file.read_text().replace('"sum"', '"mean"').replace(".sum(), found", ".mean(), found"))
    assert [key for key, status in tested().items() if status == "failed"] == [(task, "loss-is-a-sum")]


def test_settings_may_be_in_pyproject() -> None:
    write("pyproject.toml", "[tool.ddpforge.testing.schedule.half]\nskip = 'out of order'\n")
    write("src/parts.py", PARTS)
    result = invoke("src/parts.py:half")
    assert result.exit_code == 0
    assert "by its settings: out of order" in result.stdout


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("[schedule.half]\nhorizn = { total = 5 }", ["[schedule.half] has no key `horizn`", "did you mean `horizon`?"]),
        ("[schedul.half]", ["`schedul` must be a kind of component", "did you mean `schedule`?"]),
        ("schedule = 3", ["`schedule` must be a kind of component, with tables"]),
        ("[schedule]\nhalf = 3", ["[schedule.half] must be a table"]),
        ("[schedule.half]\nskip = true", ["`skip` of [schedule.half]: Input should be a valid"]),
        ("[schedule.half.skip]\npur = 'why'", ["skips `pur`, but a schedule has no such", "did you mean `pure`?"]),
        ("[schedule.half]\nhorizon = 5", ["`horizon` of [schedule.half]: Input should be a valid dictionary"]),
        ("[schedule.half]\nmodel = { inputs = 5 }", ["`model` of [schedule.half] names no component", "model = { use"]),
        ("[schedule.half", ["ddpforge_testing.toml cannot be read"]),
    ],
)
def test_errors_in_the_settings_are_reported(settings: str, says: list[str]) -> None:
    write("parts.py", PARTS)
    write("ddpforge_testing.toml", settings)
    result = invoke("parts.py")
    assert result.exit_code == 2
    for text in says:
        assert text in result.stderr


def test_here_in_settings_is_their_folder() -> None:
    write(
        "parts.py",
        '''
        """Reads a file."""
        from pathlib import Path
        from typing import Annotated
        from pydantic import Field
        import torch

        class Lines:
            """The lines of a file."""
            random = False
            def __init__(self, *, path: Annotated[Path, Field(description="The file.")]) -> None:
                self.lines = path.read_text().split()
            def __len__(self) -> int:
                return len(self.lines)
            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.tensor(float(self.lines[index]))
        ''',
    )
    write("numbers.txt", "1 2 3 4 5 6 7 8 9")
    write("ddpforge_testing.toml", '[data.Lines]\noptions = { path = "{here}/numbers.txt" }\n')
    conform(str(Path("parts.py").resolve()), quick=True)


# ---------------------------------------------------------------------------------------------- distributions
@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = folder / "site"
    entries = {
        "ddpforge.schedule": {"half": "halves:half", "falls": "halves:falls"},
        "ddpforge.task": {"gone": "no_such:T"},
    }
    install(site, "halves-dist", entries, modules={"halves.py": PARTS})
    monkeypatch.syspath_prepend(site)
    return site


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (
            {"ddpforge.builtin.tasks": {"half": "halves:half"}},
            [
                "entry points in the group `ddpforge.builtin.tasks`, which belongs to no kind",
                "did you mean `ddpforge.task`?",
            ],
        ),
        (
            {"ddpforge.schedule": {"half": "halves:half"}, "ddpforge": {"half": "halves:half"}},
            ["in the group `ddpforge`, which", "the groups are ddpforge.model, ddpforge.data"],
        ),
        ({"console_scripts": {"half": "halves:half"}}, ["is installed, but has no entry points for ddpforge"]),
    ],
)
def test_entry_points_in_unknown_groups_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, dict[str, str]], says: list[str]
) -> None:
    install(folder / "site", "odd-dist", entries, modules={"halves.py": PARTS})
    monkeypatch.syspath_prepend(folder / "site")
    result = invoke("odd-dist")
    assert result.exit_code == 2
    for text in (*says, "install it again after a change"):
        assert text in result.stderr


def test_distribution_with_hooks_only_has_nothing_to_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of hooks are known; a component next to them is tested."""
    hooks = {"ddpforge.feature": {"one": "halves:One"}, "ddpforge.observer": {"two": "halves:Two"}}
    install(folder / "site", "hooked", hooks, modules={"halves.py": PARTS})
    install(folder / "site", "both", {**hooks, "ddpforge.schedule": {"half": "halves:half"}})
    monkeypatch.syspath_prepend(folder / "site")
    result = invoke("hooked")
    assert result.exit_code == 2
    assert "`hooked` has no components to test, only ddpforge.feature, ddpforge.observer" in result.stderr
    assert invoke("both", "--quick").exit_code == 0


def test_disabled_distribution_is_reported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", "halves_dist")
    result = invoke("halves-dist")
    assert result.exit_code == 2
    assert "`halves-dist` is disabled by DDPFORGE_DISABLE_PLUGINS" in result.stderr


def test_component_that_cannot_be_imported_fails_one_check(site: Path) -> None:
    with Kit(find_cases("halves_dist", kind="task"), quick=True) as kit:
        results = list(kit.run())
    assert [result.check for result in results if result.status == "failed"] == ["importable"]
    assert "No module named 'no_such'" in results[0].text()
    assert all("not possible: importable failed" in result.text() for result in results[1:])


@pytest.mark.parametrize(("api", "passes"), [(PLUGIN_API, True), (PLUGIN_API + 1, False), ('"one"', False)])
def test_plugin_for_a_newer_api_is_rejected_with_a_clear_message(folder: Path, api: object, passes: bool) -> None:
    write("parts.py", f"{dedent(PARTS)}\nddpforge_plugin_api = {api}\n")
    result = invoke("./parts.py:half")
    if passes:
        assert result.exit_code == 0
    else:
        assert result.exit_code == 3
        said = str(api).strip('"')
        assert f"is written for plugin API {said}; this ddpforge supports version {PLUGIN_API}" in result.stderr
        assert "update ddpforge, or install an older version of the plugin" in result.stderr


def test_pytest_has_a_test_for_every_check(site: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "ddpforge.testing", "-v"]
    entry = [
        "-p",
        "ddpforge.pytest_options",
    ]  # an installed ddpforge has an entry point for it; this installation may be older
    installed = "pytest11" in _entry_points()
    done = subprocess.run(
        [*command, *([] if installed else entry), "--ddpforge-dist=halves-dist", "--ddpforge-kind=schedule"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_component[schedule-half-pure] PASSED" in done.stdout
    assert "test_component[schedule-falls-finite] FAILED" in done.stdout
    assert "found     -0.020000000000000018 at step 51 of 100" in done.stdout
    assert "Traceback" not in done.stdout


def _entry_points() -> set[str]:
    from importlib import metadata

    return {point.group for point in metadata.distribution("ddpforge").entry_points}


# ---------------------------------------------------------------------------------------------- ddpforge's own
@pytest.mark.full
def test_every_built_in_component_keeps_its_contract() -> None:
    conform("ddpforge", quick=True)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("model", ["mlp"]),
        *(pytest.param(kind, (), marks=pytest.mark.full) for kind in ("model", "callback", "data")),
    ],
)
def test_built_in_components_pass_the_checks_with_ranks(kind: str, names: Sequence[str]) -> None:
    conform("ddpforge", kind=kind, names=names)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [entry.name for entry in Registry.installed().entries("strategy") if entry.distribution == "ddpforge"]
)
def test_built_in_strategies_pass_the_checks(name: str) -> None:
    conform("ddpforge", kind="strategy", names=[name])
