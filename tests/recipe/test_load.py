"""Loading a recipe: files and `extends`, `--set`, variables, origins of values, `unset`, and updates and groups."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError, UsageError
from ddpforge.interfaces.durations import Duration
from ddpforge.recipe import LoadedRecipe, load_recipe, render

Load = Callable[..., LoadedRecipe]


def _messages(load: Load, *arguments: str | None, **files: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(*arguments, **files)
    return [problem.message for problem in caught.value.problems]


# ---------------------------------------------------------------------------------------------- results
def test_a_recipe_is_typed_and_complete(load: Load) -> None:
    recipe = load().recipe
    assert recipe.name == "digits"
    assert recipe.model.use == "cnn"
    assert recipe.model.options == {"classes": 10, "width": 32, "dropout": 0.0}
    assert recipe.schedule.options == {"warmup": Duration(0, "st")}
    assert recipe.strategy.use == "ddp"
    assert recipe.train.length == Duration(5, "ep")
    assert recipe.train.clip_norm is None
    assert recipe.optimizer.no_decay == ()


def test_trackers_and_callbacks_use_their_key_as_component_unless_use_is_set(load: Load, valid: str) -> None:
    text = valid + '[track.wandb]\nproject = "p"\n[callbacks.ema]\n[callbacks.slow]\nuse = "ema"\ndecay = 0.9999\n'
    recipe = load(text).recipe
    assert recipe.track.trackers["wandb"].options == {"project": "p", "tags": []}
    assert [component.use for component in recipe.callbacks.values()] == ["ema", "ema"]
    assert recipe.callbacks["slow"].options == {"decay": 0.9999}


def test_the_resolved_recipe_loads_as_an_equal_recipe(load: Load, valid: str, registry: Registry) -> None:
    text = valid.replace(
        "[task]", '[vars]\nrate = 0.5\n\n[task]\nmetrics = ["accuracy", { use = "accuracy", top = 5 }]'
    )
    text = text.replace("lr = 1e-3", 'lr = "${vars.rate}"\nbetas = [0.1, 0.2]\nno_decay = ["a $${b}"]')
    text += '[track]\nevery = "3st"\nwandb = { project = "$${x}" }\n'
    first = load(text, "train.clip_norm=0.5")
    assert "vars" not in first.tables
    Path("resolved.toml").write_text(first.dumps(), encoding="utf-8")

    second = load_recipe("resolved.toml", registry=registry)
    assert second.recipe == first.recipe
    assert second.tables == first.tables
    assert second.dumps() == first.dumps()
    assert second.recipe.optimizer.no_decay == ("a ${b}",)


def test_the_resolved_recipe_omits_defaults_without_effect(load: Load, valid: str, registry: Registry) -> None:
    first = load(valid.replace('[data.eval]\nuse = "digits"\nsplit = "test"\n', ""))
    Path("resolved.toml").write_text(first.dumps(), encoding="utf-8")
    assert load_recipe("resolved.toml", registry=registry).recipe == first.recipe
    assert "eval_every" not in first.dumps()


def test_local_code_is_found_in_the_folder_of_the_file_that_names_it(
    load: Load, valid: str, registry: Registry
) -> None:
    Path("nets").mkdir()
    Path("nets/my.py").write_text("def Net(*, depth: int = 2) -> None: ...\n", encoding="utf-8")
    Path("nets/base.toml").write_text('[model]\nuse = "./my.py:Net"\n', encoding="utf-8")
    loaded = load('extends = "nets/base.toml"\n' + valid.replace('use = "cnn"\nclasses = 10\n', "depth = 3\n"))

    file = Path("nets/my.py").absolute()
    assert loaded.recipe.model.options == {"depth": 3}
    assert loaded.recipe.model.base == file.parent
    assert loaded.local_files() == {file: file.parent}
    assert 'use = "./nets/my.py:Net"' in loaded.dumps()
    assert 'use = "./code/0/my.py:Net"' in loaded.dumps({file: "code/0/my.py"})

    Path("resolved.toml").write_text(loaded.dumps(), encoding="utf-8")
    assert load_recipe("resolved.toml", registry=registry).local_files().keys() == {file}


def test_local_code_is_not_searched_in_other_folders(load: Load, valid: str) -> None:
    Path("deep").mkdir()
    Path("my.py").write_text("def Net() -> None: ...\n", encoding="utf-8")
    Path("deep/base.toml").write_text('[model]\nuse = "./my.py:Net"\n', encoding="utf-8")
    child = 'extends = "deep/base.toml"\n' + valid.replace('use = "cnn"\nclasses = 10\n', "")
    (message,) = _messages(load, child)
    assert "deep/my.py is not there" in message


# ---------------------------------------------------------------------------------------------- extends
def test_a_bundled_recipe_is_extended_by_its_name(load: Load, registry: Registry) -> None:
    child = 'recipe = 2\nextends = ["digits"]\nname = "mine"\ntrain.seed = 3\n'
    loaded = load(child)
    ours = load_recipe("digits", registry=registry)
    assert loaded.recipe.train == ours.recipe.train.model_copy(update={"seed": 3})
    assert "recipes/digits.toml" in str(loaded.origins["train", "global_batch"])
    with pytest.raises(RecipeError, match="no such recipe: `digit`"):
        load(child.replace('"digits"', '"digit"'))


def test_later_layers_win_tables_merge_and_arrays_are_replaced(load: Load, valid: str) -> None:
    child = 'extends = ["one.toml", "two.toml"]\n[optimizer]\nbetas = [0.5, 0.6]\n[train]\nseed = 3\n'
    one = valid + "seed = 1\n[checkpoint]\nkeep = { last = 7 }\n"
    two = "[train]\nseed = 2\nmicro_batch = 64\n[checkpoint]\nkeep = { best = 1, monitor = 'train/loss' }\n"
    loaded = load(child, one=one, two=two)
    recipe = loaded.recipe
    assert (recipe.train.seed, recipe.train.micro_batch, recipe.train.global_batch) == (3, 64, 256)
    assert (recipe.checkpoint.keep.last, recipe.checkpoint.keep.best) == (7, 1)
    assert recipe.optimizer.options["betas"] == (0.5, 0.6)
    assert loaded.source == Path("recipe.toml")
    assert loaded.text == child


def test_another_component_drops_options_of_the_old_one_but_keeps_framework_keys(load: Load, valid: str) -> None:
    base = valid.replace("lr = 1e-3", 'lr = 1e-3\nweight_decay = 0.5\nno_decay = ["bias"]')
    recipe = load('extends = "base.toml"\n[optimizer]\nuse = "sgd"\nlr = 0.1\n', base=base).recipe
    assert recipe.optimizer.options == {"lr": 0.1, "momentum": 0.0, "nesterov": False}
    assert recipe.optimizer.no_decay == ("bias",)

    same = load('extends = "base.toml"\n[optimizer]\nuse = "adamw"\nlr = 0.1\n', base=base).recipe
    assert same.optimizer.options["weight_decay"] == 0.5


def test_a_base_may_have_options_whose_component_the_child_names(load: Load, valid: str) -> None:
    base = valid.replace('use = "cnn"\n', "width = 8\n")
    assert load('extends = "base.toml"\nmodel.use = "cnn"\n', base=base).recipe.model.options["width"] == 8


def test_a_file_may_be_extended_twice_but_not_by_itself(load: Load, valid: str) -> None:
    files = {"root": valid, "left": 'extends = "root.toml"\n', "right": 'extends = "root.toml"\ntrain.seed = 4\n'}
    assert load('extends = ["left.toml", "right.toml"]\n', **files).recipe.train.seed == 4
    assert _messages(load, 'extends = "recipe.toml"\n') == ["`extends` is circular"]


def test_all_missing_and_mistyped_bases_are_reported(load: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        load('extends = ["bse.toml", 3, "no/where.toml", "."]\n', base="")
    text = render(caught.value)
    assert [problem.message for problem in caught.value.problems] == [
        "no such recipe: `bse.toml`",
        "`extends` must be a file name or an array of file names, not an integer",
        "no such recipe: `no/where.toml`",
        "`.` is a folder, not a recipe",
    ]
    assert "did you mean `base.toml`?" in text
    assert "recipe.toml:1:24" in text


# ---------------------------------------------------------------------------------------------- --set
def test_set_takes_toml_values_and_bare_words(load: Load) -> None:
    sets = ["train.clip_norm=0.5", "name = 2026-11-20", "optimizer.betas=[0.1, 0.2]", "train.precision=bf16"]
    recipe = load(None, *sets).recipe
    assert recipe.train.clip_norm == 0.5
    assert recipe.name == "2026-11-20"
    assert recipe.optimizer.options["betas"] == (0.1, 0.2)
    assert recipe.train.precision == "bf16"


def test_later_sets_win_and_the_order_of_use_and_options_does_not_matter(load: Load) -> None:
    assert load(None, "train.seed=1", "train.seed=2").recipe.train.seed == 2
    for sets in (["optimizer.lr=0.5", "optimizer.use=sgd"], ["optimizer.use=sgd", "optimizer.lr=0.5"]):
        optimizer = load(None, *sets).recipe.optimizer
        assert (optimizer.use, optimizer.options["lr"]) == ("sgd", 0.5)
    assert _messages(load, None, "optimizer.use=sgd") == ['missing key `lr` in [optimizer], which uses "sgd"']


@pytest.mark.parametrize("sets", [["decay=0.9", "use=ema"], ["use=ema", "decay=0.9"]], ids=str)
def test_options_may_be_set_before_their_component(load: Load, sets: list[str]) -> None:
    found = load(None, *(f"callbacks.mine.{one}" for one in sets)).recipe.callbacks["mine"]
    assert (found.use, found.options["decay"]) == ("ema", 0.9)


@pytest.mark.parametrize(
    "text",
    ["", "seed", "=3", "train.seed=", "# train.seed=3", "train.seed=3\nname='x'", "a b=3", "train.=3", "x=[", 'x="',
     "train.seed=99999999999999999999", "extends=base.toml", "name=\udcff"],
)  # fmt: skip
def test_a_set_that_assigns_nothing_is_refused(load: Load, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(None, text)
    assert "--set:1:" in render(caught.value)


# ---------------------------------------------------------------------------------------------- variables
def test_a_reference_that_is_the_whole_value_keeps_the_variables_type(
    load: Load, valid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "here")
    monkeypatch.setenv("EMPTY", "")
    text = valid.replace("256", '"${vars.batch}"').replace('name = "digits"', 'name = "x-${vars.batch}-${env:WHERE}"')
    text = text.replace("[train]", 'no_decay = ["${vars.folder}", "$${x}"]\n[train]')
    text += '[vars]\nbatch = 64\nfolder = "${env:EMPTY:-a}/b"\n'
    recipe = load(text).recipe
    assert recipe.train.global_batch == 64
    assert recipe.name == "x-64-here"
    assert recipe.optimizer.no_decay == ("a/b", "${x}")
    assert load(text, "vars.batch=32").recipe.train.global_batch == 32


def test_a_boolean_variable_in_text_is_written_as_in_toml(load: Load, valid: str) -> None:
    text = valid.replace('name = "digits"', 'name = "x-${vars.flag}-${vars.other}"')
    assert load(text + "[vars]\nflag = true\nother = false\n").recipe.name == "x-true-false"


def test_an_environment_variable_with_control_characters_is_refused(
    load: Load, valid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME", "a\x1b[0m")
    text = valid.replace('name = "digits"', 'name = "${env:NAME}"')
    assert "`name`: the environment variable NAME is not plain text" in _messages(load, text)


def test_framework_keys_in_a_components_table_cannot_be_secrets(load: Load, valid: str) -> None:
    text = valid.replace("[train]", 'no_decay = ["${secret:HOME}"]\n[train]')
    (message,) = _messages(load, text)
    assert message.startswith("`optimizer.no_decay")
    assert message.endswith("cannot be a secret: only options of components can")


def test_each_unresolvable_reference_is_reported_once(load: Load, valid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    text = valid.replace("256", '"${vars.batch}"').replace("1e-3", '"${env:NOWHERE}"').replace("= 32", '= "${ 32"')
    text += '[vars]\nbatch = "${env:NOWHERE}"\nother = "${vars.batch}"\nlist = [1]\n'
    assert _messages(load, text) == [
        "`optimizer.lr`: the environment variable NOWHERE is not set",
        "`train.micro_batch`: `${` without its `}`",
        "`vars.batch`: the environment variable NOWHERE is not set",
        "`vars.other`: a variable cannot refer to a variable",
        "`vars.list` must be a single value, not an array",
    ]


def test_a_variable_counts_as_used_even_if_a_later_layer_replaces_the_reference(load: Load, valid: str) -> None:
    text = valid.replace("= 32", '= "${vars.micro}"') + "[vars]\nmicro = 32\n"
    assert load(text, "train.micro_batch=64").recipe.train.micro_batch == 64


def test_an_environment_variable_as_a_number_is_an_error_with_a_hint(
    load: Load, valid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH", "256")
    with pytest.raises(RecipeError) as caught:
        load(valid.replace("256", '"${env:BATCH}"'))
    assert caught.value.problems[0].hints == (
        "environment variables are text: use --set train.global_batch=… for numbers, true and false",
    )


# ---------------------------------------------------------------------------------------------- origins
def test_every_value_has_an_origin(load: Load, valid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED_NAME", "x")
    child = 'extends = "base.toml"\n[train]\nglobal_batch = "${vars.batch}"\n'
    base = valid + "[track.wandb]\nproject = '${env:SEED_NAME}'\n[vars]\nbatch = 128\n"
    loaded = load(child, "optimizer.lr=0.1", base=base)
    told = {".".join(map(str, path)): str(origin) for path, origin in loaded.origins.items()}
    assert told["train.length"] == "base.toml:24"
    assert told["train.global_batch"] == "recipe.toml:3, vars.batch from base.toml:30"
    assert told["optimizer.lr"] == "--set"
    assert told["optimizer.weight_decay"] == "default"
    assert told["track.wandb.project"] == "base.toml:28, env:SEED_NAME"
    assert told["track.wandb.use"] == "base.toml:27"
    assert told["strategy.use"] == "default"


# ---------------------------------------------------------------------------------------------- unreadable files
@pytest.mark.parametrize(
    ("data", "line", "said"),
    [
        (b"recipe = 2\nname = \xff\n", ":2:8", "not UTF-8 text: byte 0xff"),
        (b"recipe = \x00", ":1:10", "not valid TOML"),
        (b'name = "a', ":1:10", "is its closing quote missing?"),
        (b"train = { length = ", ":1:19", "not valid TOML"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "", "nested too deeply"),
        (b"a." * 5000 + b"b = 1", ":1:", "nested too deeply"),
        (b"[model]\nx = " + b"9" * 6000, "", "not valid TOML"),
        (b"[model]\nx = 0x" + b"f" * 6000, ":2:5", "does not fit into 64 bits"),
        (b"[model]\nuse = 2026-11-20", ":2:7", 'add quotes: use = "2026-11-20"'),
        (b"[model]\nclasses = ten", ":2:11", 'text needs quotes: classes = "ten"'),
        (b"[model]\nclasses = None", ":2:11", "remove the key"),
        (b"[model]\nx = True", ":2:5", "write x = true"),
        (b"[model]\nx = .5", ":2:5", "x = 0.5"),
        (b"model: cnn", ":1:6", "TOML writes `key = value`"),
        (b"[model]\nx =", ":2:4", "a value is missing"),
        (b"x = 1\nx = 2", ":2:6", "it is set twice"),
        (b"x = [1, 2", ":1:10", "is a closing bracket or quote missing?"),
        (b"train = {\n  length = 1,\n}", ":1:10", "an inline table stays on one line"),
        (b"train = { length = 1, }", ":1:23", "no comma at its end: write [train] and a line"),
        (b"a = { use = 1 }\n[a.b.c]\nd = 1", ":2:7", "the inline table `a` of line 1 is complete"),
        (b"a.b = { use = 1 }\na.b.c = 1", ":2:", "the inline table `a.b` of line 1 is complete"),
        (b"a = { use = 1 }\na = { use = 2 }", ":2:", "it is set twice"),
        ("a = { use = \u201cadamw\u201d }".encode(), ":1:13", "TOML has straight quotes"),
        (b'a = "C:\\Users"', ":1:", "write the text in single quotes, or a path with /"),
        (b"a = { lr = .003 }", ":1:12", "a number needs digits on both sides of its point: 0.003"),
        (b'{"recipe": 2}', ":1:1", "this looks like JSON"),
        (b"[a]\nlr = 1,000", ":2:7", "a number has no commas: lr = 1_000"),
        (b"[a]\nlr = 1e-3;", ":2:10", "a line has no ';' at its end: lr = 1e-3"),
        (b"[a]\nlr = 1e-3,", ":2:10", "a line has no ',' at its end: lr = 1e-3"),
        (b"[a]\nlr = 1e-3 // rate", ":2:11", "a comment begins with #: lr = 1e-3"),
        (b"[a]\nlr = 1.e-3", ":2:7", "a number needs digits on both sides of its point: lr = 1.0e-3"),
        (b"[a]\nn = 064", ":2:6", "a number does not begin with 0: n = 64"),
        (b"[a]\nn = 8*8", ":2:6", "TOML does not calculate"),
        (b"[a]\nn => 8", ":2:4", "TOML writes `key = value`: n = 8"),
        (b"[a]\nx = [1 2]", ":2:8", "the elements of an array are separated by commas"),
        (b'[a]\nx = f"b"', ":2:5", "text has no letter before its quotes"),
        (b'[a]\nx = "2ep" -- two', ":2:11", "after a text the line ends; a comment begins with #"),
        (b"[a\nx = 1", ":1:3", "a header is alone on its line, with its closing bracket: [a]"),
        (b"[a] x = 1", ":1:5", "a header is alone on its line, with its closing bracket: [a]"),
        (b"[a]\nlearning rate = 1", ":2:10", "a key has letters, digits, `_` and `-`, and no spaces"),
        (b"[a]\nx = 1\n[b]\n[a]", ":4:3", "the table [a] is there twice: move the keys of both into one"),
        (b"[a]\nx = 1\n[a.x]", ":3:5", "it is a value above, so it cannot be a table as well"),
    ],
)
def test_an_invalid_file_is_refused_with_the_place_of_the_error(
    data: bytes, line: str, said: str, tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_bytes(data)
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.toml", registry=registry)
    text = render(caught.value)
    assert f"--> r.toml{line}" in text
    assert said in text
    assert max(map(len, text.split("\n"))) < 200


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(load: Load, valid: str, registry: Registry) -> None:
    load()
    Path("w.toml").write_bytes(b"\xef\xbb\xbf" + valid.replace("\n", "\r\n").encode())
    assert load_recipe("w.toml", registry=registry).recipe == load_recipe("recipe.toml", registry=registry).recipe


# ---------------------------------------------------------------------------------------------- unset
BASE = "\n[callbacks.ema]\ndecay = 0.9\n"


@pytest.mark.parametrize("gone", ["callbacks.ema", "callbacks"])
def test_unset_removes_a_table_of_the_base(load: Load, valid: str, gone: str) -> None:
    child = f'extends = "base.toml"\nunset = ["{gone}", "train.micro_batch"]\n'
    loaded = load(child, base=valid + BASE)
    assert loaded.recipe.callbacks == {}
    assert loaded.recipe.train.micro_batch is None
    assert "unset" not in loaded.tables


def test_a_removed_table_can_be_written_again(load: Load, valid: str) -> None:
    child = 'extends = "base.toml"\nunset = "callbacks"\n[callbacks.ema]\n'
    assert load(child, base=valid + BASE).tables["callbacks"]["ema"] != {"use": "ema", "decay": 0.9}


def test_the_command_line_removes_keys_before_it_sets_values(load: Load, valid: str) -> None:
    loaded = load(valid + BASE, "train.seed=3", "~callbacks.ema", "~data.eval", "~train.micro_batch")
    assert (loaded.recipe.callbacks, loaded.recipe.data.eval, loaded.recipe.train.seed) == ({}, None, 3)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("~callbacks.emma", "`unset`: there is no `callbacks.emma` to remove"),
        ("~", "`~` names no key"),
        ("~train.seed=3", "`~train.seed=3` names no key"),
        ('unset=["callbacks"]', "`unset` can be set only in a file"),
    ],
)
def test_unset_of_a_missing_key_is_an_error(load: Load, valid: str, sets: str, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        load(valid + BASE, sets)


def test_an_empty_table_over_a_nonempty_one_is_an_error(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load('extends = "base.toml"\ncallbacks = {}\n', base=valid + BASE)
    (problem,) = caught.value.problems
    assert problem.message == "`callbacks` is empty, and removes nothing from the table that this recipe extends"
    assert problem.hints == ('to remove it, write unset = ["callbacks"] at the top of the recipe',)
    assert load('extends = "base.toml"\ntrack = {}\n', base=valid).recipe.track.trackers == {}


def test_unset_must_be_an_array_of_keys(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError, match="`unset` must be an array of keys"):
        load("unset = 3\n" + valid)


# ---------------------------------------------------------------------------------------------- paths and names
@pytest.mark.parametrize("key", ["output_dir"])
@pytest.mark.parametrize("value", ["s3://bucket/x", "gs://b", "file:/x", "a\\nb", "a\\u0000b", "a\\u007fb"])
def test_the_output_folder_must_be_a_local_path(load: Load, valid: str, key: str, value: str) -> None:
    with pytest.raises(RecipeError, match=f"`{key}` cannot be"):
        load(f'{key} = "{value}"\n{valid}')


@pytest.mark.parametrize(
    "text",
    [
        *["clip_norm=1e-300", "clip_norm=0", "clip_norm=true", "collective_timeout=0.01s", "global_batch=8.0"],
        *["seed=true", "eval_every=0st", "micro_batch=0", "virtual_ranks=true"],
    ],
)
def test_absurd_values_and_wrong_types_are_refused(load: Load, text: str) -> None:
    with pytest.raises(RecipeError):
        load(None, f"train.{text}")


def test_the_name_of_a_metric_must_be_one_line(load: Load) -> None:
    with pytest.raises(RecipeError, match="must not contain control characters"):
        load(None, "checkpoint.keep.best=1", 'checkpoint.keep.monitor="eval/\\nloss"')


@pytest.mark.parametrize("table", ["callbacks", "track"])
@pytest.mark.parametrize("name", ["a\\nb", "a\\u0000", "\\u001b[31m", "a\\u007fb"])
def test_the_name_of_a_callback_or_tracker_must_be_one_line(load: Load, valid: str, table: str, name: str) -> None:
    use = {"callbacks": "ema", "track": "wandb"}[table]
    more = 'project = "p"\n' if table == "track" else ""
    with pytest.raises(RecipeError, match="must not contain control characters, such as newlines") as caught:
        load(f'{valid}\n[{table}."{name}"]\nuse = "{use}"\n{more}')
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"the name of [{table}.")
    assert problem.message.isprintable()
    assert problem.place
    assert problem.place.text == f'[{table}."{name}"]'
    load(f'{valid}\n[{table}."Größe 2"]\nuse = "{use}"\n{more}')


@pytest.mark.parametrize("value", ["runs/a\\nb", "a\\u0000b", "a\\u007fb"])
def test_the_path_of_initial_weights_must_be_one_line(load: Load, value: str) -> None:
    with pytest.raises(RecipeError, match=r"`checkpoint\.init_from` cannot be .*must not contain control characters"):
        load(None, f'checkpoint.init_from="{value}"')
    with pytest.raises(RecipeError, match=r"`checkpoint\.init_from` must be"):
        load(None, 'checkpoint.init_from=""')
    assert load(None, "checkpoint.init_from=runs/Größe 2").recipe.checkpoint.init_from == "runs/Größe 2"


# ------------------------------------------------------------------------------------ alternating updates, groups
def test_an_update_inherits_options_that_it_does_not_set(load: Load, valid: str) -> None:
    text = f"""{valid}
[optimizer.updates.d]
lr = 0.5
clip_norm = 1.0
[optimizer.updates.g]
[optimizer.updates.h]
use = "sgd"
lr = 0.25
schedule = {{ use = "cosine" }}
"""
    loaded = load(text, "optimizer.betas=[0.5, 0.6]")
    turns = loaded.recipe.optimizer.updates
    assert (turns["d"].options["lr"], turns["d"].options["betas"], turns["d"].clip_norm) == (0.5, (0.5, 0.6), 1.0)
    assert turns["g"].options == loaded.recipe.optimizer.options
    assert turns["h"].options == {"lr": 0.25, "momentum": 0.0, "nesterov": False}
    assert ("optimizer", "updates", "h", "schedule") in loaded.recipe.components()
    # The resolved recipe has only the update's own keys, so that it still inherits a change of [optimizer].
    assert loaded.tables["optimizer"]["updates"]["g"] == {"parameters": [], "n_updates": 1, "new_batch": False}
    again = load(loaded.dumps(), "optimizer.betas=[0.7, 0.8]").recipe.optimizer.updates
    assert [again[name].options.get("betas") for name in "dgh"] == [(0.7, 0.8), (0.7, 0.8), None]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lrr = 0.1", "unknown key `lrr` in [optimizer.updates.d], which uses"),
        ("n_updates = 0", "`optimizer.updates.d.n_updates` must be at least 1, not 0"),
        ("n_updates = true", "`optimizer.updates.d.n_updates` must be an integer, not a boolean"),
        ('n_updates = "2"', "`optimizer.updates.d.n_updates` must be an integer, not a string"),
        ("new_batch = 1", "`optimizer.updates.d.new_batch` must be true or false, not an integer"),
        ('clip_norm = "1"', "`optimizer.updates.d.clip_norm` must be a number, not a string"),
        ('schedule = "cosine"', "[optimizer.updates.d.schedule] must be a table, not a string"),
        ('use = "sgdd"', "there is no optimizer named `sgdd`"),
    ],
)
def test_an_error_in_an_update_has_its_key(load: Load, valid: str, line: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(f"{valid}\n[optimizer.updates.d]\n{line}\n")
    assert said in caught.value.problems[0].message
    assert caught.value.problems[0].key.startswith("optimizer.updates.d")


def test_a_group_inherits_options_that_it_does_not_set(load: Load, valid: str) -> None:
    text = f"{valid}\n[optimizer.groups.head]\nparameters = ['head.*', '!*.bias']\nlr = 0.5\n"
    loaded = load(text, "optimizer.betas=[0.5, 0.6]")
    group = loaded.recipe.optimizer.groups["head"]
    assert (group.parameters, group.options["lr"], group.options["betas"]) == (("head.*", "!*.bias"), 0.5, (0.5, 0.6))
    assert loaded.tables["optimizer"]["groups"]["head"] == {"parameters": ["head.*", "!*.bias"], "lr": 0.5}


def test_groups_and_updates_cannot_be_combined(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError, match="cannot be used together"):
        load(f"{valid}\n[optimizer.updates.d]\n[optimizer.groups.head]\nparameters = ['head.*']\n")


def test_a_group_needs_parameters(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError, match=r"missing key `parameters` in \[optimizer.groups.head\]"):
        load(f"{valid}\n[optimizer.groups.head]\nlr = 0.5\n")


def test_sets_as_a_single_string_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sets is the string 'train.seed=1', but must be a list") as told:
        load_recipe("digits", sets="train.seed=1")
    assert told.value.hints == ("sets = ['train.seed=1']",)
