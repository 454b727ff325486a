"""`ddpforge check`: reports problems of a recipe, as text on stderr or as JSON on stdout, and trains nothing."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses an empty folder: `check` would resume a run of `digits` in the working directory, e.g. of `make run`."""
    monkeypatch.chdir(tmp_path)


def _check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def test_a_valid_recipe_is_ok_and_its_batch_is_printed() -> None:
    result = _check("digits", "--ranks", "2", "--set", "train.micro_batch=8")
    assert result.exit_code == 0
    assert result.stdout == "digits: ok, 64 per step = 8 per forward pass × 4 accumulation × 2 ranks\n"


def test_every_error_is_shown_on_stderr_and_the_exit_code_is_2() -> None:
    result = _check("digits", "--set", "train.lenght=5ep", "--set", "model.classes=0")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "unknown key `lenght` in [train]" in result.stderr
    assert "`model.classes` must be at least" in result.stderr
    assert result.stderr.endswith("2 errors in the recipe; nothing was started.\n")


def test_json_is_one_object_on_stdout() -> None:
    assert json.loads(_check("digits", "--json").stdout) == {"ok": True, "problems": []}

    result = _check("digits", "--json", "--set", "train.precision=bf61")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "ok": False,
        "problems": [
            {
                "message": '`train.precision` cannot be "bf61"',
                "key": "train.precision",
                "file": "--set",
                "line": 1,
                "column": 17,
                "hints": ["did you mean `bf16`?", "one of: fp32, bf16, fp16"],
            }
        ],
    }


def test_the_batch_must_divide_by_the_ranks_of_the_launcher_or_of_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "cannot be divided evenly among 3 ranks" in _check("digits").stderr
    assert _check("digits", "--ranks", "4").exit_code == 0


def test_check_finds_options_that_the_optimizer_refuses() -> None:
    result = _check("digits", "--set", "optimizer.use=torch.optim:SGD", "--set", "optimizer.lr=-1")
    assert result.exit_code == 2
    assert "Invalid learning rate: -1.0" in result.stderr


def problems(*arguments: str) -> dict[str, str]:
    """Returns the messages of `check --json` by key."""
    result = _check("digits", "--json", *arguments)
    assert result.exit_code == 2, result.output
    return {problem["key"]: problem["message"] for problem in json.loads(result.stdout)["problems"]}


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (["strategy.use=deepspeed", "strategy.extra.foo=1"], "strategy.extra", "`foo` is not a key"),
        (["strategy.use=fsdp", "strategy.replicas=3"], "strategy.replicas", "does not divide the 2 ranks"),
        (["strategy.use=single"], "strategy.use", "was started in 2 processes"),
        (["checkpoint.init_from=nowhere"], "checkpoint.init_from", "there is no run 'nowhere'"),
        (["train.sync_batchnorm=true"], "train.sync_batchnorm", "needs CUDA"),
        (["train.compile_blocks=true"], "train.compile_blocks", "has no effect"),
        (["task.use=regression", "task.delta=2.0"], "task.delta", "only loss ="),
        (
            ["callbacks.early_stopping.metric=eval/score", "callbacks.early_stopping.patience=1"],
            "callbacks.early_stopping",
            "set mode",
        ),
    ],
)
def test_check_finds_problems_that_need_neither_data_nor_model(sets: list[str], key: str, said: str) -> None:
    arguments = [word for text in sets for word in ("--set", text)]
    found = problems("--ranks", "2", "--device", "cpu", *arguments)
    assert list(found) == [key]
    assert said in found[key]


def test_check_accepts_a_device_that_this_machine_lacks() -> None:
    assert _check("digits", "--device", "cuda", "--set", "train.sync_batchnorm=true").exit_code == 0


WRONG = (
    *("--set", 'train.blocks=["Nope"]', "--set", 'optimizer.no_decay=["biass"]', "--set", "model.classes=5"),
    *("--set", "schedule.use=step", "--set", 'schedule.milestones=["9ep", "9ep"]'),
)


def test_build_reports_all_problems_of_data_and_model_at_once() -> None:
    assert _check("digits", *WRONG).exit_code == 0
    found = problems("--build", "--set", "train.sync_batchnorm=true", "--device", "cpu", *WRONG)
    assert found.keys() == {
        *("train.blocks", "optimizer.no_decay", "model.classes", "schedule.milestones", "train.sync_batchnorm")
    }
    assert "the model has no Nope" in found["train.blocks"]
    assert "`biass` matches no parameter" in found["optimizer.no_decay"]
    assert "the data has 10 classes and the model 5 outputs" in found["model.classes"]


def test_build_finds_empty_evaluation_data_and_its_place_in_the_recipe() -> None:
    Path("parts.py").write_text("class Empty(list):\n    pass\n")
    result = _check("digits", "--build", "--set", "data.eval={use = './parts.py:Empty'}")
    assert result.exit_code == 3
    assert "error: Empty is empty: it has no samples\n --> --set:1:" in result.stderr
    assert "[task]" not in result.stderr


def test_build_finds_metrics_that_no_evaluation_reports() -> None:
    keep = ("--set", "checkpoint.keep.best=1", "--set", "checkpoint.keep.monitor=eval/f1")
    stop = ("--set", "callbacks.early_stopping.metric=eval/acuracy", "--set", "callbacks.early_stopping.patience=1")
    mode = ("--set", "callbacks.early_stopping.mode=max")
    found = problems("--build", *keep, *stop, *mode)
    assert found["checkpoint.keep.monitor"] == "no evaluation reports eval/f1"
    assert found["callbacks.early_stopping.metric"] == "no evaluation reports eval/acuracy"


def test_build_prints_parameters_steps_and_batches() -> None:
    lines = _check("digits", "--build").stdout.split("\n")
    assert lines[1].endswith("of them trainable")
    assert lines[2].endswith(" steps")
    assert lines[3].startswith("  [data.train] gives a tuple (float32 [8, 1, 8, 8], int64 [8]), loss 2.")
    assert lines[4].startswith("  [data.eval] gives a tuple (float32 [8, 1, 8, 8], int64 [8]), loss 2.")


def test_build_counts_the_tensors_of_each_parameter_group() -> None:
    groups = (
        "optimizer.groups={matrices={parameters=['2d'], use='muon', lr=0.02}, head={parameters=['*.bias'], lr=0.1}}"
    )
    lines = _check("digits", "--build", groups).stdout.split("\n")
    assert [line.partition(" tensors")[0] for line in lines if line.startswith("  optimizer of ")] == [
        "  optimizer of all others: adamw, 8",
        "  optimizer of matrices: muon, 1",
        "  optimizer of head: adamw, 5",
    ]


def test_build_finds_an_optimizer_that_refuses_the_parameters() -> None:
    result = _check("digits", "--build", "optimizer={use='torch.optim:Muon', lr=1e-3}")
    assert result.exit_code == 2
    assert "Muon only supports 2D parameters" in result.stderr
    assert "--set:1:11" in result.stderr


def test_no_import_imports_no_component() -> None:
    Path("evil.py").write_text('open("ran", "w").close()\ndef Net(width: int): ...\ndef ddp(): ...\n')
    sets = ("--set", "model={use='./evil.py:Net', wide=3}", "--set", "strategy.use=./evil.py:ddp")
    shown = _check("digits", "--no-import", *sets)
    assert (shown.exit_code, Path("ran").exists()) == (0, False), shown.output
    assert "not imported and not checked: ./evil.py:Net, ./evil.py:ddp" in shown.stdout
    seen = CliRunner().invoke(main, ["show", "digits", "--no-import", *sets])
    assert (seen.exit_code, Path("ran").exists()) == (0, False), seen.output
    assert "wide = 3" in seen.stdout
    assert "# not imported, its options are not checked: ./evil.py:Net" in seen.stdout
    assert _check("digits", "--no-import", "--set", "train.sync_batchnorm=true", "--device", "cpu").exit_code == 2
    assert _check("digits", "--no-import", "--build").exit_code == 2
    assert _check("digits", *sets).exit_code == 2
    assert Path("ran").exists()


def test_a_missing_recipe_is_a_problem_in_json() -> None:
    result = _check("nowhere.toml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problems"][0]["message"] == "no such recipe: `nowhere.toml`"


STREAMS = """
from torch.utils.data import IterableDataset

class Plain:
    def __iter__(self):
        raise AssertionError("check builds no data")

class Torchs(IterableDataset):
    def __init__(self):
        raise AssertionError("check builds no data")

class Counted(Plain):
    def __len__(self):
        return 100
"""


@pytest.mark.parametrize(
    ("use", "keys"),
    [
        ("./streams.py:Plain", {"checkpoint.every", "data.sampler", "train.eval_every", "train.length"}),
        ("./streams.py:Torchs", {"checkpoint.every", "data.sampler", "train.eval_every", "train.length"}),
        ("./streams.py:Counted", {"data.sampler"}),
        ("digits", set()),
    ],
)
def test_keys_that_need_epochs_or_a_sampler_are_refused_for_an_iterable_dataset(use: str, keys: set[str]) -> None:
    Path("streams.py").write_text(STREAMS)
    sets = [f'data.train={{use="{use}"}}', "data.sampler.use=sequential", "schedule.warmup=1st", "train.length=3ep"]
    found = json.loads(_check("digits", "--json", *sets).stdout)["problems"]
    assert {problem["key"] for problem in found} == keys
    assert len(found) == len(keys)


def test_keys_that_need_epochs_or_a_sampler_are_refused_for_a_bundled_stream() -> None:
    sets = ['data.train={use="text_stream", path="."}', "data.sampler.use=sequential", "checkpoint.every=1ep"]
    found = json.loads(_check("stdlib-lm", "--json", *sets).stdout)["problems"]
    assert {problem["key"] for problem in found} == {"checkpoint.every", "data.sampler"}


# ---------------------------------------------------------------------------------------------- endless recipes
TINY = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8 }
"""
LONG = 100_000


@contextmanager
def time_limit(seconds: int = 15) -> Iterator[None]:
    """Raises AssertionError if the block takes longer than `seconds`."""

    def late(_: int, __: FrameType | None) -> None:
        raise AssertionError("it takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"2st"', f'"{"9" * LONG}st"'),
        ('"2st"', f'"{"9" * LONG}"'),
        ('"2st"', f'"{"1_" * LONG}"'),
        ("lr = 0.1", f"lr = {'9' * LONG}"),
        ("lr = 0.1", f"lr = {'a' * LONG}"),
        ("hidden = [8]", f"hidden = {'[' * LONG}"),
        ('name = "tiny"', f'name = "{"x" * LONG}"'),
        ('"mlp"', f'"{"a" * LONG}"'),
        ("name =", f"{'a' * LONG} = 1\nname ="),
        ("name =", f"{'a.' * LONG}b = 1\nname ="),
        ("name =", f"x = {'9' * LONG}\nname ="),
        ("name =", f"{' ' * LONG}x\nname ="),
    ],
)
def test_a_recipe_with_a_very_long_token_is_refused_quickly(old: str, new: str) -> None:
    Path("tiny.toml").write_text(TINY.replace(old, new, 1))
    with time_limit():
        assert _check("tiny.toml").exit_code == 2


def test_a_recipe_that_extends_one_file_twice_at_sixteen_levels_is_refused_quickly() -> None:
    Path("base0.toml").write_text(TINY)
    for level in range(1, 17):
        Path(f"base{level}.toml").write_text(f'extends = ["base{level - 1}.toml", "base{level - 1}.toml"]\n')
    with time_limit():
        refused = _check("base16.toml")
    assert refused.exit_code == 2
    assert "extends more than 256 files" in refused.stderr
    assert refused.stderr.endswith("1 error in the recipe; nothing was started.\n")
    assert _check("base5.toml").exit_code == 0


def test_a_variable_that_expands_to_too_much_text_is_refused() -> None:
    text = f'[vars]\nx = "{"y" * LONG}"\n'
    Path("tiny.toml").write_text(TINY.replace('"tiny"', f'"{"${vars.x}" * 10_000}"') + text)
    with time_limit():
        refused = _check("tiny.toml")
    assert refused.exit_code == 2
    assert "`name` would be longer than 4,194,304 characters" in refused.stderr


def test_a_huge_range_in_the_path_of_tar_files_is_refused() -> None:
    data = 'data.train = { use = "tar", path = "x-{0..99999999999}.tar", fields = ["cls"] }'
    Path("tiny.toml").write_text(TINY.replace('data.train = { use = "digits", split = "test" }', data))
    with time_limit():
        refused = _check("tiny.toml", "--build")
    assert refused.exit_code == 2
    assert "names more than 100,000 files" in refused.stderr


def test_two_billion_updates_a_step_are_refused() -> None:
    Path("tiny.toml").write_text(TINY)
    refused = _check("tiny.toml", "--set", "optimizer.updates.a.n_updates=2147483648")
    assert refused.exit_code == 2
    assert "`optimizer.updates.a.n_updates` must be at most 10000" in refused.stderr


# ---------------------------------------------------------------------------------------------- sharding the model
GPT = """\
recipe = 2
name = "tiny"
model = { use = "gpt", vocab_size = 256, block_size = 16, layers = 2, heads = 2, width = 16 }
data.train = { use = "tokens", path = "there_is_no_such_file.bin", block_size = 16 }
task = { use = "language_modeling" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8, device = "cpu" }
"""


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (
            '{ use = "fsdp", tensor = 2, plan = { "blocks.*.nothing" = "colwise" } }',
            "but no module of the model has this name",
        ),
        (
            '{ use = "fsdp", tensor = 2, plan = { "blocks.*.mlp.0" = "colums" } }',
            "which tensor parallelism does not have",
        ),
        ('{ use = "fsdp", tensor = 4 }', "2 heads of 8"),
        ('{ use = "pipeline", split_points = ["blocks.9"] }', "no part can begin with `blocks.9`"),
        ('{ use = "pipeline", split_points = ["blocks.0", "blocks.1"], stages = 2 }', "must name 1 steps"),
        ('{ use = "pipeline", schedule = "Interleaved1F1B", stages = 4 }', "too few for 8 parts"),
    ],
)
def test_a_model_that_the_strategy_cannot_shard_is_a_recipe_error_found_without_data(strategy: str, said: str) -> None:
    """Exits with 2, so that no launcher restarts it."""
    Path("tiny.toml").write_text(f"{GPT}strategy = {strategy}\n")
    refused = _check("tiny.toml", "--ranks", "4")
    assert refused.exit_code == 2, refused.stderr
    assert said in refused.stderr
    assert "there_is_no_such_file" not in refused.stderr


def test_a_model_that_the_strategy_can_shard_is_ok_without_data() -> None:
    Path("tiny.toml").write_text(f'{GPT}strategy = {{ use = "pipeline", stages = 2, tensor = 2 }}\n')
    assert _check("tiny.toml", "--ranks", "4").exit_code == 0
