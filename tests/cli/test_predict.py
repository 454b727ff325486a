"""`ddpforge predict`: each sample once, in the order of the dataset, on any number of ranks; and its errors."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from support import SUPPORT
from support.forked import in_ranks, refused
from support.launched import Ranks

import ddpforge
from ddpforge.app.prediction_tables import writing
from ddpforge.errors import ForgeError, PluginError, SetupError, UsageError

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
data.eval.test = { use = "digits", split = "test" }
data.eval.seen = { use = "digits", split = "train" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.1 }
strategy = { use = "ddp" }
train = { length = "6st", global_batch = 64, eval_every = "2st", device = "cpu" }
checkpoint = { every = "2st", keep = { last = 3, best = 1, monitor = "eval/test/accuracy" } }
callbacks.ema = { decay = 0.5, evaluate = false }
"""
POINTS = """\
recipe = 2
name = "points"
model = { use = "mlp", inputs = 4, outputs = 1, hidden = [9] }
data.train = { use = "./parts.py:Points" }
data.eval = { use = "./own.py:InParts" }
task = { use = "./own.py:Own" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8, device = "cpu", eval_every = "2st" }
checkpoint = { every = "2st" }
"""


LANGUAGE = """\
recipe = 2
name = "language"
model = { use = "gpt", vocab_size = 16, block_size = 8, layers = 2, heads = 2, width = 16 }
data.train = { use = "./parts.py:RaggedTokens" }
data.eval = { use = "./parts.py:RaggedTokens", samples = 11 }
task = { use = "language_modeling" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8, device = "cpu", eval_every = "2st" }
checkpoint = { every = "2st" }
"""
OWN = """
import torch
from ddpforge.builtin.tasks.regression import Regression
from ddpforge.interfaces import ShardedDataset

class InParts(ShardedDataset):
    shard_sizes = (4, 12, 7)
    shuffle, shuffle_buffer, random = True, 3, False

    def iter_shard(self, part, *, epoch, skip):
        first = sum(self.shard_sizes[:part])
        yield from range(first + skip, first + self.shard_sizes[part])

    def collate(self, samples):
        return torch.tensor([[n, 0, 1, 2] for n in samples]).float(), torch.zeros(len(samples), 1)

class Own(Regression):
    def predict(self, model, batch):
        numbers = batch[0][:, 0]
        odd = torch.where(numbers % 2 == 0, numbers + 0.5, torch.nan)
        return {"x": batch[0], "name": [f"number {int(n)}" for n in numbers], "sometimes": odd}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a classifier, a custom task with a sharded dataset, and a language model; returns the folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "points.toml").write_text(POINTS)
    (folder / "language.toml").write_text(LANGUAGE)
    copy(SUPPORT / "parts.py", folder)
    (folder / "own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        in_ranks(1, lambda _: [ddpforge.run(f"{name}.toml").exit_code for name in ("tiny", "points", "language")])
    return folder


@pytest.fixture(autouse=True)
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predicted(ranks: int = 1, run: str = "tiny", out: str = "out.jsonl", **choice: Any) -> list[dict[str, Any]]:
    """Returns the rows that `ranks` ranks write."""
    in_ranks(ranks, lambda _: ddpforge.predict(run, out, force=True, **choice).samples)
    return [json.loads(line) for line in Path(out).read_text().splitlines()]


def complaint(run: str = "tiny", out: str = "other.jsonl", kind: type[ForgeError] = UsageError, **choice: Any) -> str:
    """Returns the error message of a single rank."""
    (said,) = in_ranks(1, lambda _: refused(kind, lambda: ddpforge.predict(run, out, **choice)))
    return str(said)


def by_hand(weights: str = "model", checkpoint: Any = "newest", run: str = "tiny") -> list[dict[str, Any]]:
    """Returns the predictions of the module itself for the test data, one sample at a time."""
    loaded = ddpforge.load(f"runs/{run}", checkpoint=checkpoint, weights=weights)
    model, rows = loaded.model(), []
    for place, (image, digit) in enumerate(loaded.data("eval.test")):
        with torch.no_grad():
            probability, found = model(image[None]).softmax(1).max(1)
        rows.append(
            {
                "index": place,
                "class": found.item(),
                "probability": pytest.approx(probability.item(), rel=1e-5),
                "target": digit.item(),
            }
        )
    return rows


@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (1, []),
        (3, ["train.eval_batch=7"]),  # 360 = 17 * 21 + 3: one sample per rank in the last step
        (2, ["train.eval_batch=359", "strategy.use=fsdp"]),  # a rank with 180, in one step
        (4, ["strategy.use=fsdp", "data.workers=2", "train.eval_batch=120"]),  # the last step is empty on no rank
    ],
)
def test_each_sample_is_predicted_once_in_order_on_any_number_of_ranks(ranks: int, sets: list[str]) -> None:
    assert predicted(ranks, data=["eval.test"], sets=sets) == by_hand()


def test_weights_and_checkpoint_can_be_chosen() -> None:
    """Predicts with the model, with the EMA, which this recipe does not evaluate, and with an earlier checkpoint."""
    found = [
        predicted(data=["eval.test"]),
        predicted(2, data=["eval.test"], weights="ema", sets=["strategy.use=fsdp"]),
        predicted(data=["eval.test"], checkpoint=2),
    ]
    assert found[1] == by_hand("ema")
    assert found[2] == by_hand(checkpoint=2)
    assert len({json.dumps(rows) for rows in found}) == 3
    # If evaluations use the averages, predictions do, too, unless other weights are named.
    evaluates = {"data": ["eval.test"], "sets": ["callbacks.ema.evaluate=true"]}
    assert predicted(**evaluates) == found[1]
    assert predicted(weights="model", **evaluates) == found[0]
    assert "no weights called 'eam'" in complaint(data=["eval.test"], weights="eam")


def test_the_dataset_and_a_limit_can_be_chosen() -> None:
    seen = predicted(data=["eval.seen"], limit=100)
    assert [row["index"] for row in seen] == [*range(100)]
    assert predicted(data=["train"], limit=100) == seen
    mixture = ["~data.train", "data.train.one={use='digits', split='train'}"]
    assert predicted(data=["train.one"], sets=mixture, limit=100) == seen
    again = predicted(2, data=["eval.test", "split=train"], limit=100, sets=["train.eval_batch=3"])
    assert [row | {"probability": pytest.approx(row["probability"])} for row in again] == seen

    assert "several evaluation sets" in complaint()
    assert "--data eval.test" in complaint()
    assert "did you mean `eval.test`?" in complaint(data=["eval.tset"])
    assert "expected one dataset" in complaint(data=["eval.test", "train"])
    assert "splt" in complaint(data=["eval.test", "splt=train"], kind=ForgeError)


def test_parquet_has_the_same_rows_with_types() -> None:
    lines = predicted(2, data=["eval.test"])
    in_ranks(2, lambda _: ddpforge.predict("tiny", "out.parquet", data=["eval.test"]).samples)
    table = pq.read_table("out.parquet")
    assert [str(field.type) for field in table.schema] == ["int64", "int64", "float", "int64"]
    assert [{**row, "probability": pytest.approx(row["probability"])} for row in table.to_pylist()] == lines


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        ["strategy.use=pipeline"],
        ["strategy.use=fsdp", "strategy.tensor=2"],
        ["strategy.use=fsdp", "strategy.tensor=2", "strategy.loss_parallel=vocabulary"],
        ["strategy.use=deepspeed", "strategy.stage=3"],
    ],
    ids=lambda sets: "-".join(word.rpartition("=")[2] for word in sets),
)
def test_ranks_that_shard_a_model_predict_each_sample_once(strategy: list[str]) -> None:
    """Predicts 11 samples in batches of 3."""
    alone = predicted(1, "language", sets=["strategy.use=single", "train.eval_batch=3"])
    together = predicted(2, "language", sets=["train.eval_batch=3", *strategy])
    assert together == [
        row | {name: pytest.approx(row[name], rel=1e-4, abs=1e-6) for name in ("loss", "losses")} for row in alone
    ]
    assert [row["index"] for row in alone] == [*range(11)]
    assert alone[0]["tokens"] == sum(loss > 0 for loss in alone[0]["losses"])


@pytest.mark.full
def test_context_parallelism_is_refused() -> None:
    sets = ["strategy.use=fsdp", "strategy.context=2"]
    said = in_ranks(2, lambda _: refused(UsageError, lambda: ddpforge.predict("language", "other.jsonl", sets=sets)))
    assert said[0].startswith("the strategy splits the positions of every sample over ranks")
    assert not Path("other.jsonl").exists()


def test_a_sharded_dataset_and_a_custom_task_are_predicted_in_order(folder: Path) -> None:
    """Reads sequentially on three ranks, although training reads several shards at once."""
    rows = predicted(3, "points", sets=["train.eval_batch=2"])
    assert [row["index"] for row in rows] == [*range(23)]
    assert [row["x"][0] for row in rows] == [*range(23)]
    assert [row["name"] for row in rows[:2]] == ["number 0", "number 1"]
    assert rows[5]["sometimes"] is None
    assert rows[6]["sometimes"] == 6.5
    in_ranks(1, lambda _: ddpforge.predict("points", "out.parquet", limit=9))
    table = pq.read_table("out.parquet")
    assert [str(field.type) for field in table.schema][1:4] == ["list<element: float>", "string", "float"]
    assert len(table) == 9


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("[1]", "Own.predict returns a list (an int), not columns by name"),
        ("{}", "Own.predict returns an empty dict"),
        ("{'index': batch[0]}", "a column `index`"),
        ("{'a': batch[0].sum()}", "`a` is float32 [], but there are 8 samples"),
        ("{'a': [object()] * 8}", "JSON cannot represent a prediction"),
    ],
)
def test_invalid_return_values_of_a_task_are_errors(folder: Path, columns: str, said: str) -> None:
    own = folder / "runs/points/code"
    (file,) = own.rglob("own.py")
    file.write_text(file.read_text() + f"\n    def predict(self, model, batch):\n        return {columns}\n")
    assert said in complaint("points", kind=PluginError)
    assert [path.name for path in folder.glob("*other.jsonl*")] == []


# ---------------------------------------------------------------------------------------------- files
def test_the_file_appears_only_when_it_is_complete(folder: Path) -> None:
    def fill() -> None:
        with writing(folder / "out.jsonl") as table:
            table.add({"a": [1]})
            assert len(list(folder.glob("*out.jsonl*"))) == 1
            assert not (folder / "out.jsonl").exists()
            raise OSError(28, "No space left on device")

    assert refused(SetupError, fill).endswith("out.jsonl could not be written: No space left on device")
    assert list(folder.glob("*out.jsonl*")) == []


def test_an_existing_file_is_not_overwritten(folder: Path) -> None:
    (folder / "out.jsonl").write_text("mine")
    said = complaint(out="out.jsonl", data=["eval.test"])
    assert said == "out.jsonl exists | choose another file with --out, or replace it with --force"
    assert (folder / "out.jsonl").read_text() == "mine"
    assert "must be .jsonl or .parquet" in complaint(out="out.csv")
    assert "there is no folder nowhere" in complaint(out="nowhere/out.jsonl", data=["eval.test"])


def test_the_command_prints_json(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Prints only JSON on stdout; without --out the file is named after the run."""
    ranks = ddpforge("predict", "tiny", "--data", "eval.test", "--limit", "40", "--json", nproc=2)
    assert json.loads(ranks.stdout) == {"file": "tiny-predictions.jsonl", "samples": 40, "step": 6}
    assert len((folder / "tiny-predictions.jsonl").read_text().splitlines()) == 40
