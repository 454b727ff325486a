"""`ddpforge runs` (ls, compare, rm, resume) and `ddpforge status`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.run_folders import made, trained

from ddpforge.cli import main
from ddpforge.cli.status import followed
from ddpforge.errors import ExitCode
from ddpforge.runs.summary import RunSummary, summarize


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=answer)


# ---------------------------------------------------------------------------------------------- ls
def test_ls_lists_runs_with_their_differences() -> None:
    for name, lr, loss in (("a", 0.1, 0.5), ("b", 0.01, 0.25)):
        made(Path("runs") / name, recipe={"optimizer": {"lr": lr}}, metrics={"eval/loss": loss})
    header, *rows = (line.split() for line in invoke("runs", "ls", "--sort", "eval/loss").stdout.splitlines())
    assert header == ["run", "state", "step", "eval/loss", "lr", "age"]
    assert [row[:5] for row in rows] == [
        ["runs/b", "done", "10/10", "0.25", "0.01"],
        ["runs/a", "done", "10/10", "0.5", "0.1"],
    ]
    told = json.loads(invoke("runs", "ls", "runs/a", "--json").stdout)["runs"]
    assert [(run["run"], run["metrics"], run["difference"]) for run in told] == [("runs/a", {"eval/loss": 0.5}, {})]


@pytest.mark.parametrize(
    ("columns", "header"),
    [
        (120, "run state step eval/loss train/loss lr seed age"),
        (72, "run state step eval/loss train/loss lr seed"),
        (60, "run state eval/loss lr seed"),
        (30, "run eval/loss"),
    ],
)
def test_ls_on_a_terminal_drops_columns_but_never_the_name(
    monkeypatch: pytest.MonkeyPatch, columns: int, header: str
) -> None:
    for seed in (0, 1):
        metrics = {"eval/loss": 0.1234, "train/loss": 0.5}
        recipe = {"optimizer": {"lr": 0.1 + seed}, "train": {"seed": seed}}
        made(Path("runs/sweep") / f"a-rather-long-name-{seed}", recipe=recipe, metrics=metrics)
    monkeypatch.setattr("ddpforge.cli.runs.terminal_width", lambda: columns)
    monkeypatch.setattr("ddpforge.cli.tables.terminal_width", lambda: columns)
    shown = invoke("runs", "ls", "--sort", "name")
    folder, first, *rows = shown.stdout.splitlines()
    assert folder == "runs/sweep/"
    assert first.split() == header.split()
    assert [row.split()[0] for row in rows] == ["a-rather-long-name-0", "a-rather-long-name-1"]
    assert ("--wide shows all columns" in shown.stderr) == (columns < 120)
    whole = invoke("runs", "ls", "--wide").stdout.splitlines()
    assert whole[0].split() == ["run", "state", "step", "eval/loss", "train/loss", "lr", "seed", "age"]


def test_a_narrow_terminal_keeps_components_rates_and_seeds_rather_than_other_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place, use in enumerate(("ddp", "fsdp")):
        of_model = {"depth": place, "width": 100 + place, "heads": place}
        recipe = {"model": of_model, "strategy": {"use": use}, "optimizer": {"lr": 0.1 + place}}
        made(Path("runs/sweep") / f"a-rather-long-name-{place}", recipe=recipe, metrics={"eval/loss": 0.1234})
    monkeypatch.setattr("ddpforge.cli.runs.terminal_width", lambda: 60)
    monkeypatch.setattr("ddpforge.cli.tables.terminal_width", lambda: 60)
    shown = invoke("runs", "ls")
    assert shown.stdout.splitlines()[1].split()[:5] == ["run", "state", "eval/loss", "strategy.use", "lr"]
    assert shown.stderr.splitlines()[0].startswith("not shown: age, step,")
    assert max(map(len, shown.stderr.splitlines())) <= 60


def test_columns_have_the_whole_key_if_its_last_part_is_not_unique() -> None:
    for name, use in (("a", 1), ("b", 2)):
        made(Path("runs") / name, recipe={"model": {"depth": use}, "task": {"depth": use}})
    assert invoke("runs", "ls").stdout.split()[3:5] == ["model.depth", "task.depth"]


def test_ls_shows_a_missing_value() -> None:
    made(Path("runs/a"), recipe={"callbacks": {"ema": {"decay": 0.9}}})
    made(Path("runs/b"))
    rows = invoke("runs", "ls", "--sort", "name").stdout.splitlines()[1:]
    assert [row.split()[3] for row in rows] == ["0.9", "-"]


def test_ls_without_runs_is_not_an_error() -> None:
    assert invoke("runs", "ls").stdout == "runs/: no runs\n"
    made(Path("runs/a"))
    assert invoke("runs", "ls", "--state", "failed").stdout == "runs/: no runs like that among 1\n"
    refused = invoke("runs", "ls", "--state", "dead")
    assert refused.exit_code == ExitCode.USAGE
    assert "there is no state 'dead'" in refused.stderr


# ---------------------------------------------------------------------------------------------- compare
@pytest.fixture
def two() -> None:
    for name, lr in (("a", 0.1), ("b", 0.01)):
        rows = [{"step": step, "train/loss": lr / step, "eval/loss": lr} for step in range(1, 9)]
        made(Path("runs") / name, recipe={"optimizer": {"lr": lr}}, rows=rows, metrics={"eval/loss": lr})


@pytest.mark.usefixtures("two")
def test_runs_are_compared_side_by_side() -> None:
    said = invoke("runs", "compare", "a", "b").stdout
    lines = [line.split() for line in said.splitlines() if line]
    assert lines[:4] == [
        ["recipe", "runs/a", "runs/b"],
        ["optimizer.lr", "0.1", "0.01"],
        ["code:", "same"],
        ["environment:", "same"],
    ]
    assert ["train/loss", "0.0125", "0.00125"] in lines
    told = json.loads(invoke("runs", "compare", "a", "b", "--json", "--curve", "train/loss").stdout)
    assert told["recipe"] == {"optimizer.lr": [0.1, 0.01]}
    assert told["curves"]["train/loss"]["runs/a"][:2] == [[1, 0.1], [2, 0.05]]


@pytest.mark.usefixtures("two")
def test_curves_are_drawn_in_the_terminal_and_as_a_picture() -> None:
    drawn = invoke("runs", "compare", "a", "b", "--curve", "train/loss").stdout.partition("train/loss  ")[2]
    assert "runs/a" in drawn
    assert "runs/b" in drawn
    assert "\x1b" not in drawn  # no colours in a pipe
    assert "┤" in drawn
    assert max(map(len, drawn.splitlines())) <= 80
    for name in ("curves.png", "curves.svg"):
        assert invoke("runs", "compare", "a", "b", "--picture", name).stderr == f"curves: {name}\n"
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("curves.svg").read_text()
    refused = invoke("runs", "compare", "a", "b", "--picture", "curves.docx")
    assert refused.exit_code == ExitCode.USAGE
    assert "cannot write curves.docx" in refused.stderr


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("library", "option"), [("plotext", "--curve=lr"), ("matplotlib", "--picture=x.png")])
def test_the_error_names_a_missing_plotting_library_and_its_extra(
    monkeypatch: pytest.MonkeyPatch, library: str, option: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    refused = invoke("runs", "compare", "a", "b", option.replace("=lr", "=eval/loss"))
    assert refused.exit_code == ExitCode.ENVIRONMENT
    assert library in refused.stderr
    assert "pip install 'matplotlib>=3.8' 'plotext<6,>=5.3'" in refused.stderr


def test_compare_needs_two_runs() -> None:
    made(Path("runs/a"))
    refused = invoke("runs", "compare", "a", "runs/a")
    assert refused.exit_code == ExitCode.USAGE
    assert "expected two runs" in refused.stderr


# ---------------------------------------------------------------------------------------------- rm
def test_rm_deletes_runs_only_after_confirmation() -> None:
    for name in ("a", "b", "c"):
        made(Path("runs") / name)
    refused = invoke("runs", "rm", "a", "b", answer="n\n")
    assert refused.exit_code == ExitCode.USAGE
    assert "runs/a: done at step 10/10" in refused.stderr
    assert "Delete 2 runs with all checkpoints?" in refused.stderr
    nobody = invoke("runs", "rm", "a")
    assert (nobody.exit_code, "to delete without a question, use --yes" in nobody.stderr) == (ExitCode.USAGE, True)
    assert len(list(Path("runs").iterdir())) == 3

    assert invoke("runs", "rm", "a", "runs/b", answer="y\n").exit_code == 0
    assert invoke("runs", "rm", "c", "--yes").exit_code == 0
    assert not list(Path("runs").iterdir())


def test_rm_deletes_nothing_if_one_run_is_in_use() -> None:
    made(Path("runs/a"))
    with trained(made(Path("runs/b"), state="running")):
        refused = invoke("runs", "rm", "a", "b", "--yes")
    assert refused.exit_code == ExitCode.USAGE
    assert "a process is training runs/b" in refused.stderr
    assert sorted(path.name for path in Path("runs").iterdir()) == ["a", "b"]


def test_rm_refuses_a_folder_that_is_not_a_run() -> None:
    Path("thesis").mkdir()
    refused = invoke("runs", "rm", "thesis", "--yes")
    assert refused.exit_code == ExitCode.USAGE
    assert "there is no run 'thesis'" in refused.stderr
    assert Path("thesis").is_dir()


# ---------------------------------------------------------------------------------------------- resume
@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the arguments passed to `ddpforge launch`."""
    from ddpforge.cli.launch import launch

    given: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda arguments, **_: given.append(arguments))
    return given


def environment(run: Path, **variables: str) -> None:
    (run / "env.json").write_text(json.dumps({"environment": variables}))


def test_resume_uses_the_folder_and_the_number_of_processes_of_the_run(launched: list[list[str]]) -> None:
    """Holds also if the run was trained with --out, or was renamed."""
    environment(made(Path("runs/sweep/a")).path, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    Path("runs/sweep/a").rename("runs/sweep/b")
    invoke("runs", "resume", "runs/sweep/b", "train.length=20st", "--set", "track.every=5st", "--json")
    sets = ["--set=name=b", "--set=track.every=5st", "--set=train.length=20st"]
    recipe = "runs/sweep/b/recipe.resolved.toml"
    assert launched == [[recipe, "--nproc=2", "--out=runs/sweep", *sets, "--json"]]


def test_resume_of_a_multi_node_run_needs_nproc(launched: list[list[str]]) -> None:
    environment(made(Path("runs/a")).path, WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    refused = invoke("runs", "resume", "a")
    assert refused.exit_code == ExitCode.USAGE
    assert "trained by 16 processes on several machines" in refused.stderr
    invoke("runs", "resume", "a", "--nproc", "4")
    assert [arguments[1] for arguments in launched] == ["--nproc=4"]


# ---------------------------------------------------------------------------------------------- status
def test_status_prints_text_or_json() -> None:
    rows = [{"step": 4, "train/loss": 0.5}, {"step": 6, "train/loss": 0.25}]
    run = made(Path("runs/a"), state="running", step=0, rows=rows)
    with trained(run):
        page = invoke("status", "a").stdout
        told = json.loads(invoke("status", "a", "--json").stdout)
    assert page.splitlines()[0] == "runs/a: running at step 6 of 10 (60%), 1 step/s, 4s left"
    assert ["train/loss", "0.25"] in [line.split() for line in page.splitlines()]
    assert ["checkpoint", "none"] in [line.split() for line in page.splitlines()]
    assert (told["state"], told["step"], told["seconds_left"], told["checkpoint"]) == ("running", 6, 4, None)
    assert invoke("status", "a").stdout.startswith("runs/a: killed at step 6 of 10")


def test_watch_yields_changes_until_the_run_ends() -> None:
    def seen(state: str, step: int) -> RunSummary:
        return RunSummary(folder=made(Path(f"runs/{state}-{step}")), state=state, step=step)

    looks = [seen("starting", 0), seen("running", 1), seen("done", 2)]
    looks = [looks[0], looks[0], looks[1], looks[1], looks[2]]
    waits: list[None] = []
    found = list(followed(iter(looks).__next__, lambda: waits.append(None)))
    assert [run.state for run in found] == ["starting", "running", "done"]
    assert len(waits) == 4


def test_watch_prints_one_line_for_a_finished_run() -> None:
    speeds = {"train/tokens_per_second": 12345.0, "train/time/data": 0.25, "train/time/optimizer": 0.5}
    run = made(Path("runs/a"), metrics={"eval/loss": 0.5, "lr": 0.1, **speeds})
    assert summarize(run).state == "done"
    told = "eval/loss 0.5  train/tokens_per_second 1.234e+04  train/time/data 0.25"
    assert invoke("status", "a", "--watch").stdout == f"runs/a: done at step 10 of 10 (100%)  {told}\n"


# ---------------------------------------------------------------------------------------------- speed
@pytest.mark.parametrize(
    "arguments", [["runs", "ls"], ["runs", "compare", "a", "b"], ["status", "a"], ["runs", "rm", "a", "--yes"]]
)
def test_runs_and_status_import_no_torch(arguments: list[str]) -> None:
    made(Path("runs/a"), recipe={"optimizer": {"lr": 0.1}})
    made(Path("runs/b"))
    code = f"""
import sys
from contextlib import suppress
from ddpforge.cli import main
with suppress(SystemExit):
    main({arguments!r}, prog_name="ddpforge")
assert not {{"torch", "numpy", "accelerate"}} & set(sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
