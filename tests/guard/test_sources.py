"""Sources that cannot form one batch are refused before training, by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.small_recipe import CODE, RECIPE
from support.stages import Staged, staged

MORE = '''
from ddpforge.interfaces import ShardedDataset
class Padded:
    """Texts of different lengths as numbers, padded with `pad`."""
    random = False
    def __init__(self, pad: int = 0, key: str = "x", wide: bool = False) -> None:
        self.pad, self.key, self.wide = pad, key, wide
    def __len__(self):
        return 5
    def __getitem__(self, i):
        return {self.key: [i + 1] * (4 if self.wide else 3 + i % 2)}, i % 3
    def collate(self, samples):
        rows = [sample[self.key] for sample, _ in samples]
        x = torch.tensor([[*row, *[self.pad] * (4 - len(row))] for row in rows]).float()
        return x, torch.tensor([y for _, y in samples])

class Batched(Data):
    """Fetches whole batches."""
    def __getitems__(self, ids):
        pairs = [self[i] for i in ids]
        return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
    def collate(self, batch):
        return batch

class Unlike(Batched):
    """Fetches other samples alone than in batches."""
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 1, y
    def __getitems__(self, ids):
        x, y = super().__getitems__(ids)
        return x - 1, y

class Part(ShardedDataset):
    """Samples in two parts."""
    def __init__(self, width: int = 4) -> None:
        self.width, self.shard_sizes = width, [9, 7]
    def iter_shard(self, part, *, epoch, skip):
        yield from (self.shard_sizes[part] * part + i for i in range(skip, self.shard_sizes[part]))
    def prepare(self, i):
        return torch.full((self.width,), float(i)) / 16, i % 3

class Wide(Data):
    def __getitem__(self, i):
        return torch.zeros(5), 1

class Broken(Data):
    def __getitem__(self, i):
        raise OSError("no file")

class Noisy(Data):
    def __getitem__(self, i):
        return torch.rand(4), 1
'''
TWO = """
[data.train.one]
use = "./mine.py:{}"
[data.train.two]
use = "./mine.py:{}"
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Staged]:
    """Returns a builder of the small recipe with two sources: `parts("Data", "Wide", "data.train.two.top=1")`."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE + MORE)

    def build(one: str, two: str, *sets: str) -> Staged:
        Path("run.toml").write_text(RECIPE.replace('[data.train]\nuse = "./mine.py:Data"\n', TWO.format(one, two)))
        return staged("run.toml", *sets)

    return build


@pytest.mark.parametrize(
    ("one", "two", "sets"),
    [
        ("Data", "Data", []),
        ("Data", "Batched", []),
        ("Batched", "Noisy", []),
        ("Padded", "Padded", ["data.train.two.pad=0"]),
        ("Data", "Data", ["data.workers=1"]),
        ("Part", "Part", []),
    ],
)
def test_sources_of_one_structure_are_mixed(parts: Callable[..., Staged], one: str, two: str, sets: list[str]) -> None:
    assert parts(one, two, *sets).errors() == {}


@pytest.mark.parametrize(
    ("one", "two", "sets", "message"),
    [
        (
            "Data",
            "Wide",
            [],
            "(float32 [1, 5], int64 [1]), but one of [data.train.one] is a list (float32 [1, 4]",
        ),
        ("Data", "Data", ["data.train.two.gives=dict"], "is a dict with x float32 [1, 4], y int64 [1], but one of"),
        ("Data", "Data", ["data.train.two.gives=text"], "is a list (float32 [1, 4], a tuple of 1 text)"),
        (
            "Padded",
            "Padded",
            ["data.train.two.pad=9"],
            "their batch of a sample differs from the batch that this source makes alone",
        ),
        ("Padded", "Padded", ["data.train.two.key=y"], "this fails with samples of this source: KeyError: 'x'"),
        (
            "Data",
            "Padded",
            [],
            "fetched one by one, and this fails with samples of this source",
        ),
        ("Data", "Unlike", [], "their batch of a sample differs from the batch that this source makes alone"),
        ("Part", "Part", ["data.train.two.width=5"], "(float32 [1, 5], int64 [1]), but one of [data.train.one] is"),
        ("Part", "Data", [], "the sources of a mixture are of one kind"),
        ("Part", "Part", ["train.max_tokens=4"], "needs the length of every sample in advance"),
        ("Data", "Stream", [], "Stream is an iterable dataset without parts of known length"),
    ],
)
def test_other_sources_are_refused_by_name(
    parts: Callable[..., Staged], one: str, two: str, sets: list[str], message: str
) -> None:
    errors = parts(one, two, *sets).errors()
    assert [key for key in errors if key.startswith(("data.train.", "train.max_tokens"))] == list(errors)
    assert message in " ".join(errors.values())


def test_a_sample_that_cannot_be_read_is_left_to_training(parts: Callable[..., Staged]) -> None:
    assert parts("Data", "Broken").errors() == {}


def test_weights_that_cannot_work_are_refused_at_their_key(parts: Callable[..., Staged]) -> None:
    weights = ["data.train.one.weight={0st=1, 2st=0}", "data.train.two.weight={0st=1, 1ep=0}"]
    errors = parts("Data", "Data", *weights, "train.length=9st").errors()
    assert errors == {"data.train": "from step 4 on, all sources have the weight 0"}
    errors = parts("Data", "Data", weights[0], "data.train.two.weight={0st=1, 4st=2, 1ep=3}").errors()
    assert errors == {"data.train.two.weight": "`data.train.two.weight` has two weights from step 4 on"}


def test_weights_that_change_after_the_end_of_the_run_are_a_warning(
    parts: Callable[..., Staged], caplog: pytest.LogCaptureFixture
) -> None:
    weights = ["data.train.one.weight={0st=1, 3st=2}", "data.train.two.weight={0st=1, 4st=2}"]
    parts("Data", "Data", *weights, "train.length=5st")
    assert not caplog.text
    parts("Data", "Data", *weights, "train.length=4st")
    assert "data.train: the run ends at step 4, before weights change at step 4" in caplog.text


def test_every_source_is_compared_with_the_model(parts: Callable[..., Staged], tmp_path: Path) -> None:
    Path("mine.py").write_text(CODE + MORE)
    built = parts("Data", "Data")
    built.stage.model.outputs = 3
    for name, source in built.stage.data["train"].items():
        source.classes = 3 if name == "one" else 7
    from ddpforge.training.checks import check_built

    check_built(built.stage, built.problems)
    assert "the data has 7 classes and the model 3 outputs" in " ".join(built.errors().values())
