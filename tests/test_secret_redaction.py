"""Secrets reach only the component that needs them: no file, no message, no tracker."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpforge.errors import RecipeError
from ddpforge.ranks.logs import setup_logging
from ddpforge.recipe import load_recipe
from ddpforge.runs.environment import describe_environment
from ddpforge.secret_redaction import redact, redacted, reveal

VALUE = "hunter2-very-secret"
RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
outputs = 1
[data.train]
use = "./mine.py:Data"
token = "Bearer ${secret:MY_TOKEN}"
deep = { list = ["${secret:MY_TOKEN}"] }
[task]
use = "regression"
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "2st"
global_batch = 8
[checkpoint]
every = "1st"
[track.mine]
use = "./mine.py:Told"
[callbacks.says]
use = "./mine.py:Says"
"""
CODE = f"""
import json, logging
import torch
from ddpforge.interfaces import Callback, Tracker
TOKEN = "".join(reversed("{VALUE[::-1]}"))
class Data:
    def __init__(self, token: str, deep: dict[str, list[str]]) -> None:
        assert token == "Bearer " + TOKEN and deep == {{"list": [TOKEN]}}
        self.token = token
    def __len__(self): return 16
    def __getitem__(self, i): return torch.zeros(4), torch.zeros(1)
class Told(Tracker):
    def start(self, *, name, folder, config, resumed_at):
        (folder / "told.json").write_text(json.dumps(config))
class Says(Callback):
    def __init__(self, fails: bool = False) -> None: self.fails = fails
    def on_start(self, run): logging.getLogger("ddpforge").warning("token %s", TOKEN)
    def on_step(self, info):
        if self.fails: raise RuntimeError("401 for " + TOKEN)
"""


def holders(folder: Path) -> list[Path]:
    """Returns the files that contain the secret."""
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and file.name != "mine.py" and VALUE.encode() in file.read_bytes()
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", VALUE)
    Path("run.toml").write_text(RECIPE)
    Path("mine.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize("fails", [False, True])
def test_run_writes_only_the_reference_to_a_secret(ddpforge: Callable[..., object], folder: Path, fails: bool) -> None:
    sets = ["--set", "callbacks.says.fails=true"] if fails else []
    ranks = ddpforge("run", "run.toml", "--json", *sets, env={"MY_TOKEN": VALUE}, fails=True)
    assert set(ranks.codes) == {1 if fails else 0}  # type: ignore[attr-defined]
    assert holders(folder) == []
    assert VALUE not in ranks.stderr + ranks.stdout  # type: ignore[attr-defined]
    assert "token ${secret:MY_TOKEN}" in ranks.stderr  # type: ignore[attr-defined]
    run = folder / "runs" / "run"
    for file in ("recipe.resolved.toml", "told.json", *([] if fails else ["checkpoints/*/manifest.json"])):
        assert all("Bearer ${secret:MY_TOKEN}" in found.read_text() for found in run.glob(file))
    if fails:
        assert "401 for ${secret:MY_TOKEN}" in json.loads((run / "status.json").read_text())["error"]
    else:
        resumed = ["run", str(run / "recipe.resolved.toml"), "--set", "train.length=3st"]
        assert "done at step 3" in ddpforge(*resumed, env={"MY_TOKEN": VALUE}).stdout  # type: ignore[attr-defined]


def test_dumped_recipe_has_the_reference_and_loads_to_the_same_recipe(folder: Path) -> None:
    loaded = load_recipe("run.toml")
    Path("again.toml").write_text(loaded.dumps())
    assert VALUE not in loaded.dumps() + str(loaded.recipe) + str(loaded.tables)
    assert load_recipe("again.toml").tables == loaded.tables


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "${secret:MY_TOKEN}"', "`name` cannot be a secret"),
        ('checkpoint.init_from = "${secret:MY_TOKEN}"', "`checkpoint.init_from` cannot be a secret"),
        ('schedule.use = "${secret:MY_TOKEN}"', "`schedule.use` cannot be a secret"),
        ('track.mine.use = "${secret:MY_TOKEN}"', "`track.mine.use` cannot be a secret"),
        ('data.train.token = "${secret:NOT_SET}"', "the environment variable NOT_SET is not set"),
        ('data.train.token = "${secret:A:-b}"', "is not a reference"),
        ('data.train.token = "$${secret:MY_TOKEN}"', "cannot be written as text"),
    ],
)
def test_invalid_places_and_references_of_secrets_are_rejected(folder: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace("$", r"\$")):
        load_recipe("run.toml", sets=[text])


def test_secrets_and_credentials_are_redacted_from_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONG_SECRET", "abcdef")
    monkeypatch.setenv("SHORT_SECRET", "a")
    assert reveal("x ${secret:LONG_SECRET} ${secret:SHORT_SECRET}") == "x abcdef a"
    assert redact("an abcdef") == "an ${secret:LONG_SECRET}"
    assert redact("see https://me:pa%24s@host:1/x and ftp://host/a@b") == "see https://***@host:1/x and ftp://host/a@b"
    assert redacted({"a": ["http://u:p@h", 1], "b": {"c": None}}) == {"a": ["http://***@h", 1], "b": {"c": None}}


def test_credentials_in_proxies_are_not_in_env_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_HTTPS_PROXY", "http://me:hunter2@proxy:3128")
    monkeypatch.setattr("sys.argv", ["ddpforge", "--set", "data.train.url=https://me:hunter2@host/x"])
    found = describe_environment()
    assert "hunter2" not in json.dumps(found)
    assert found["environment"]["WANDB_HTTPS_PROXY"] == "http://***@proxy:3128"


def test_tracebacks_in_logs_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setenv("LOGGED_SECRET", "s3cr3t-value")
    reveal("${secret:LOGGED_SECRET}")
    setup_logging(0, tmp_path)
    try:
        raise RuntimeError("s3cr3t-value")
    except RuntimeError:
        logging.getLogger("ddpforge").exception("failed with s3cr3t-value")
    assert "s3cr3t-value" not in (tmp_path / "logs/rank-0.log").read_text()
    setup_logging(0)
