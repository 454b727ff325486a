"""`ddpforge export` to torch.export and ONNX, and to the hub."""

import json
from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
import torch
from click.testing import CliRunner
from support.forked import in_ranks
from support.hub_stub import HubStub
from torch import nn

import ddpforge
from ddpforge.cli.export import export
from ddpforge.errors import ForgeError

RECIPES = {
    "mlp": """
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification" }
callbacks.ema = { decay = 0.5, evaluate = false }
""",
    "gpt": """
model = { use = "gpt", vocab_size = 256, block_size = 16, layers = 2, heads = 2, width = 16 }
data.train = { use = "text_stream", path = "text.txt", block_size = 16 }
data.eval.one = { use = "text_stream", path = "text.txt", block_size = 16 }
task = { use = "language_modeling" }
""",
    "odd": """
model = { use = "./net.py:Odd" }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification" }
""",
}
REST = """
recipe = 2
name = "{name}"
optimizer = {{ use = "sgd", lr = 0.1 }}
strategy = {{ use = "single" }}
train = {{ length = "2st", global_batch = 8, device = "cpu", eval_every = "2st" }}
checkpoint = {{ every = "1st", keep = {{ last = 2 }} }}
"""
NET = """
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer(x.flatten(1))
        return x if x.sum() > 0 else -x
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(NET)
    (folder / "text.txt").write_text("to be, or not to be: that is the question. " * 40)
    for name, text in RECIPES.items():
        (folder / f"{name}.toml").write_text(REST.format(name=name) + text)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        in_ranks(1, lambda _: [ddpforge.run(f"{name}.toml").exit_code for name in RECIPES])
    return folder


@pytest.fixture(autouse=True)
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for path in trained.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def call(*arguments: str) -> str:
    done = CliRunner().invoke(export, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def complaint(*arguments: str) -> str:
    error = CliRunner().invoke(export, arguments).exception
    assert isinstance(error, ForgeError), error
    return " | ".join([error.message, *error.hints])


def model_and_inputs(run: str, samples: int) -> tuple[nn.Module, torch.Tensor]:
    """Returns the model and the inputs of `samples` samples."""
    loaded = ddpforge.load(f"runs/{run}", weights="model")
    return loaded.model(), loaded.batch(samples)[0]


@pytest.mark.parametrize("run", [pytest.param("mlp", marks=pytest.mark.full), "gpt"])
def test_programs_equal_the_model_for_any_batch_size(folder: Path, run: str) -> None:
    said = json.loads(call(run, "-o", "model.pt2", "--json"))
    program = torch.export.load("model.pt2").module()
    call(run, "--format", "onnx")
    session = onnxruntime.InferenceSession(f"{run}.onnx", providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    for samples in (1, 3, 7):
        model, inputs = model_and_inputs(run, samples)
        with torch.no_grad():
            expected = model(inputs)
        torch.testing.assert_close(program(inputs), expected)
        (found,) = session.run(None, {name: inputs.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert (said["step"], said["bytes"]) == (2, Path("model.pt2").stat().st_size)
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


def test_other_weights_and_checkpoints_can_be_exported(folder: Path) -> None:
    call("mlp", "-o", "ema.pt2", "--weights", "ema")
    call("mlp", "-o", "first.pt2", "--step", "1")
    _, inputs = model_and_inputs("mlp", 2)
    for file, model in (
        ("ema.pt2", ddpforge.load("runs/mlp", weights="ema").model()),
        ("first.pt2", ddpforge.load("runs/mlp", checkpoint=1, weights="model").model()),
    ):
        torch.testing.assert_close(torch.export.load(file).module()(inputs), model(inputs).detach())


def test_impossible_exports_are_refused_and_write_no_file(folder: Path) -> None:
    before = set(folder.iterdir())
    assert "torch.export cannot process the model Odd" in complaint("odd", "-o", "odd.pt2")
    assert "--dtype cannot be combined with --format pt2" in complaint("mlp", "-o", "a.pt2", "--dtype", "bf16")
    assert "does not match the file name a.onnx" in complaint("mlp", "-o", "a.onnx", "--format", "pt2")
    assert "MLP is not a model of transformers" in complaint("mlp", "--format", "transformers")
    assert set(folder.iterdir()) == before
    (folder / "there.pt2").write_text("mine")
    assert "there.pt2 exists" in complaint("mlp", "-o", "there.pt2")


# ---------------------------------------------------------------------------------------------- the hub
def test_push_to_hub_uploads_the_exported_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = HubStub("secret")
    with stub.serving() as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "secret")
        said = call("mlp", "-o", "hf/", "--max-shard-size", "1KB", "--push-to-hub", "me/mine", "--private")
        assert said.endswith("from step 2; http://127.0.0.1/me/mine/commit/1\n")
        assert stub.files["me/mine"] == {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}
        assert len(stub.files["me/mine"]) == 3
        assert "private" in (stub.made["me/mine"].get("visibility"), *stub.made["me/mine"])
        assert stub.messages == ["Step 2 of mlp"]

        monkeypatch.setenv("HF_TOKEN", "wrong")
        refused = complaint("mlp", "-o", "other.safetensors", "--push-to-hub", "me/mine")
        assert refused.startswith("the request to the hub for me/mine failed: ")
        assert "401" in refused
        assert "hf auth login" in refused
    assert not (folder / "other.safetensors").exists()
    assert "expected USER/NAME" in complaint("mlp", "--push-to-hub", "mine")
    assert "the request to the hub" in complaint("mlp", "--push-to-hub", "me/mine")  # the stub has stopped
