"""Loads thousands of damaged recipes: each gives a recipe or a RecipeError that names the damaged key."""

import random
from collections.abc import Callable

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, render

Load = Callable[..., LoadedRecipe]

RECIPE = """\
recipe = 2
name = "digits"
output_dir = "runs"
model.use = "cnn"
model.classes = 10
model.dropout = 0.1
data.workers = 2
data.train.use = "digits"
data.train.split = "train"
data.eval.use = "folder"
data.eval.root = "/data"
data.eval.labels = { cat = 0, dog = 1 }
task.use = "classification"
task.metrics = ["accuracy", { use = "accuracy", top = 5 }]
optimizer.use = "adamw"
optimizer.lr = 1e-3
optimizer.betas = [0.9, 0.95]
optimizer.no_decay = ["bias"]
schedule.use = "cosine"
schedule.warmup = "1ep"
strategy.use = "ddp"
strategy.bucket = 50
train.length = "5ep"
train.global_batch = 256
train.micro_batch = 32
train.eval_every = "1ep"
train.clip_norm = 1.0
train.precision = "bf16"
train.seed = 3
checkpoint.every = "100st"
checkpoint.keep = { last = 2, best = 1, monitor = "eval/loss" }
track.every = "10st"
track.wandb.project = "p"
callbacks.ema.decay = 0.99
""".splitlines()

KEYS = [line.partition(" = ")[0] for line in RECIPE]
NUMBERS = (
    "data.workers",
    "strategy.bucket",
    "train.global_batch",
    "train.micro_batch",
    "model.classes",
    "optimizer.lr",
)
DURATIONS = ("schedule.warmup", "train.length", "train.eval_every", "checkpoint.every", "track.every")
NONSENSE = {
    **dict.fromkeys(KEYS, ("{ a.b = [] }", "[[[]]]", "9" * 30, "1979-05-27", "0x" + "f" * 5000, "[" * 600 + "]" * 600)),
    **dict.fromkeys(NUMBERS, ("-1", "nan", "-inf", "inf", '"1"', "true", '"ten"', "1e308", "99999999999999", "[1]")),
    **dict.fromkeys(DURATIONS, ("5", "1.5", '"5"', '"-5ep"', '"0ep"', '"5 epochs"', '"1.5st"', '"9e9st"', '""')),
    "schedule.warmup": ('"6ep"', '"5.1ep"', '"-1st"', "100", '"soon"'),
    "train.micro_batch": ("0", "48", "257", "512", "1.0"),
    "train.precision": ('"int8"', '"BF16"', "16", '"bf16 "', '"名"'),
    "model.dropout": ("1", "1.5", "-0.1", '"half"'),
    "optimizer.betas": ("[0.9]", "[0.9, 1.0]", "[0.9, 0.9, 0.9]", "0.9", '["a", "b"]', "{ a = 1 }"),
    "checkpoint.keep": ("{ best = 1 }", '{ monitor = "eval/loss" }', '{ best = 1, monitor = "x" }', "{ lst = 2 }"),
    "task.metrics": ('["acuracy"]', "[{ top = 5 }]", '[{ use = "accuracy", top = 0 }]', '"accuracy"', "[3]"),
    "model.use": ('"cn"', '""', '"./nowhere.py:Net"', '"no.such.module:Net"', '"\\u0000"', '"名"', "3", '["cnn"]'),
    "name": ('""', '"../up"', '"a/b"', '"-x"', '"' + "x" * 5000 + '"', "3"),
    "recipe": ("3", "0", "true", '"2"', "2.0"),
}  # fmt: skip
UNKNOWN = (
    "x",
    "lenght",
    "Learning-Rate",
    "epochs",
    "名前",
    "a b",
    'q"uote',
    "new\nline",
    "\x1b[31mred",
    "k" * 3000,
    "",
)


def _nonsense(random: random.Random) -> tuple[str, list[str]]:
    key = random.choice(KEYS)
    value = random.choice(NONSENSE[key])
    return key, [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in RECIPE]


def _unknown_key(random: random.Random) -> tuple[str, list[str]]:
    table = random.choice(["", "model.", "train.", "data.", "optimizer.", "checkpoint.keep.", "task."])
    name = random.choice(UNKNOWN) + str(random.randrange(100))
    quoted = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' else c for c in name)
    extra = f'{table}"{quoted}" = {random.choice(["1", "true", "[]", "{}"])}'
    lines = [line for line in RECIPE if not (table == "checkpoint.keep." and line.startswith("checkpoint.keep"))]
    return name.split("\n")[0].split("\x1b")[0].split('"')[0], [*lines, extra]


def _missing_key(random: random.Random) -> tuple[str, list[str]]:
    needed = (".use", "lr", "length", "global_batch", "root", "name")
    key = random.choice([key for key in KEYS if key.endswith(needed)])
    return key.rpartition(".")[0] or key, [line for line in RECIPE if not line.startswith(f"{key} = ")]


def _noise(random: random.Random) -> tuple[str, list[str]]:
    text = "\n".join(RECIPE)
    for _ in range(random.randint(1, 4)):
        at, gone = random.randrange(len(text)), random.randint(0, 3)
        new = random.choice([*'="[]{}.é#0', "", "\n", "\t", "\0", "$${", "${"])
        text = text[:at] + new + text[at + gone :]
    return "", text.split("\n")


@pytest.mark.parametrize(
    ("damage", "count"),
    [
        *((_nonsense, 200), (_unknown_key, 100), (_missing_key, 150), (_noise, 150)),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in ((_nonsense, 1000), (_unknown_key, 350), (_noise, 500))
        ),
    ],
)
def test_the_error_names_the_damaged_key(
    load: Load, damage: Callable[[random.Random], tuple[str, list[str]]], count: int
) -> None:
    load("\n".join(RECIPE))
    generator = random.Random(count)
    for _ in range(count):
        named, lines = damage(generator)
        refusal = _refusal(load, "\n".join(lines))
        if refusal is None:
            assert damage is _noise, lines
            continue

        text = render(refusal)
        assert refusal.problems
        if damage is not _noise:  # noise may be anywhere
            assert named in text
            assert any(named in f"{one.key} {one.message}" or not one.key for one in refusal.problems)
        assert "\0" not in text
        assert "\x1b" not in text
        assert len(text) < 20_000


def _refusal(load: Load, text: str) -> RecipeError | None:
    try:
        load(text)
    except RecipeError as error:
        return error
    return None
