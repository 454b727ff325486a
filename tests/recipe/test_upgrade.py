"""Upgrade of recipes from version 1 to version 2, which changes only renamed keys, values and components."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe, load_recipe, render
from ddpforge.recipe.bundled import bundled
from ddpforge.recipe.renamed import Renamed, components, keys, options, renamed_plan_word
from ddpforge.recipe.toml import Source
from ddpforge.recipe.upgrade import upgrade_file, upgrade_tables, upgrade_text

Load = Callable[..., LoadedRecipe]
RELEASED = Path(__file__).parent / "data/v1"  # the recipes of 0.4, and in resolved/ their resolved form by 0.4
EVERY_KIND = {  # a table for each kind of component
    "data": "data.train",
    "sampler": "data.order",
    "model": "model",
    "task": "task",
    "schedule": "schedule",
    "strategy": "strategy",
    "callback": "callbacks.mine",
}


def upgraded(text: str) -> str:
    return upgrade_text(Source("recipe.toml", text)).text


def refused(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        upgrade_text(Source("recipe.toml", text))
    return render(caught.value)


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def at(tables: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = tables
    for key in path:
        found = found[key]
    return found


# ---------------------------------------------------------------------------------------------- all renames
def _named(row: Renamed) -> str:
    return f"{'|'.join(row.of)} {'.'.join(map(str, row.old))}".strip()


@pytest.mark.parametrize("row", keys(), ids=_named)
def test_every_renamed_key_gets_its_new_name_and_value(row: Renamed) -> None:
    old, new = (tuple(part if part != "*" else "some" for part in path) for path in (row.old, row.new))
    for value, changed in (row.values or {"5m": "5m"}).items():
        text = f'recipe = 1\n{".".join(old)} = "{value}"  # as it is\n'
        assert upgraded(text) == f"recipe = 2\n{'.'.join(new)} = {written(changed)}  # as it is\n"
        inline = f'recipe = 1\n{".".join(old[:-1])} = {{ a = 1, {old[-1]} = "{value}" }}\n'
        assert upgraded(inline) == f"recipe = 2\n{'.'.join(new[:-1])} = {{ a = 1, {new[-1]} = {written(changed)} }}\n"
        table = f'recipe = 1\n[{".".join(old[:-1])}]\n"{old[-1]}" = "{value}"\n'
        assert upgraded(table) == f'recipe = 2\n[{".".join(new[:-1])}]\n"{new[-1]}" = {written(changed)}\n'


@pytest.mark.parametrize("row", options(), ids=_named)
def test_every_renamed_option_gets_its_new_name_only_in_its_components(row: Renamed) -> None:
    old, new = (".".join("some" if part == "*" else str(part) for part in path) for path in (row.old, row.new))
    table = EVERY_KIND[row.kind]
    for use in row.of:
        before = {new: old for (_, old), new in components().items()}.get(use, use)
        for value, changed in (row.values or {"x": "x"}).items():
            text = f'[{table}]\nuse = "{before}"\n{old} = "{value}"  # as it is\n'
            after = text.replace(f'{old} = "{value}"', f"{new} = {written(changed)}").replace(before, use)
            assert upgraded(text) == after.replace("data.order", "data.sampler")
    other = f'[{table}]\nuse = "./mine.py:Own"\n{old} = "x"\n'
    assert upgraded(other) == other.replace("data.order", "data.sampler")


@pytest.mark.parametrize(("kind", "old"), components())
def test_every_renamed_component_gets_its_new_name(kind: str, old: str) -> None:
    new = components()[kind, old]
    for prefix in ("", "ddpforge:"):
        found = upgraded(f"[{EVERY_KIND[kind]}]\nuse = '{prefix}{old}'\n")
        assert found.endswith(f"use = '{prefix}{new}'\n")
    assert old not in Registry.installed().names(kind)
    assert new in Registry.installed().names(kind)


@pytest.mark.parametrize("row", options(), ids=_named)
def test_every_new_option_is_an_option_of_its_components(row: Renamed) -> None:
    for use in row.of:
        model = Registry.installed().options_model(row.kind, use)
        assert row.new[0] in model.model_fields
        assert row.old[0] == row.new[0] or row.old[0] not in model.model_fields


# ---------------------------------------------------------------------------------------------- unchanged text
ODD = """\
#:schema recipe.schema.json
recipe   =   1\t\t# the version

# stall = "5m" is a comment, and so is [optimizer.turns.a]
extends = ["base.toml"]
unset = [ "train.stall", 'optimizer.turns."a b".fresh', "schedule.final", "callbacks.ema" ]
name = "stall"

[vars]
stall = "9m"           # a name of one's own
last_batch = "drop"

[ "train" ]
"stall" = "${vars.stall}"
'timeout' = '''6m'''
last_batch='drop'# no space
elastic_shards = 1_000

[data . order]
use = "repeated"
order = { "use" = 'growing', start = 1, until = "9st" }

[optimizer]
turns.x = { repeats = 2, fresh = true }
turns.y.schedule = { use = "cosine", final = 0.1 }

[optimizer.turns."a b"]

[schedule]
use = "cosine"
final = 0.1

[model]
use = "lora"
base = { use = "moe_gpt", active = 2, capacity = 1.0 }
final = "an option of another component"

[task]
use = "./mine.py:Task"
share = 0.5

[callbacks.spike_guard]
lowest = 0.1

[callbacks.own]
use = "./mine.py:Guard"
lowest = 0.1

[strategy]
use = "fsdp"
plan = { "a.*" = "columns:3", "b.*" = "rowwise" }

[checkpoint]
keep = { last = 1,   best = 1, by = "eval/loss", }
"""
ODD = ODD.replace(', by = "eval/loss", }', ', by = "eval/loss" }')


def test_comments_order_blanks_quotes_and_other_names_are_unchanged() -> None:
    renamed = {
        "recipe   =   1": "recipe   =   2",
        '"train.stall", \'optimizer.turns."a b".fresh\', "schedule.final"': '"train.hang_timeout", '
        '\'optimizer.updates."a b".new_batch\', "schedule.min_lr_ratio"',
        '"stall" = "${vars': '"hang_timeout" = "${vars',
        "'timeout' = ": "'collective_timeout' = ",
        "last_batch='drop'# no": "drop_last=true# no",
        "elastic_shards": "virtual_ranks",
        "[data . order]": "[data . sampler]",
        'use = "repeated"\norder': 'use = "reuse_batches"\nsampler',
        "'growing'": "'batch_size_warmup'",
        "turns.x = { repeats = 2, fresh": "updates.x = { n_updates = 2, new_batch",
        "turns.y": "updates.y",
        'use = "cosine", final': 'use = "cosine", min_lr_ratio',
        '[optimizer.turns."a b"]': '[optimizer.updates."a b"]',
        "final = 0.1\n\n[model]": "min_lr_ratio = 0.1\n\n[model]",
        "active = 2, capacity": "top_k = 2, capacity_factor",
        "[callbacks.spike_guard]\nlowest": "[callbacks.spike_guard]\nmin_lr_ratio",
        '"columns:3"': '"colwise:3"',
        "by = ": "monitor = ",
    }
    expected = ODD
    for old, new in renamed.items():
        assert expected.count(old) == 1, old
        expected = expected.replace(old, new)
    assert upgraded(ODD) == expected
    assert upgraded(expected) == expected


@pytest.mark.parametrize("marks", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_keeps_its_line_ends_byte_order_mark_and_mode(tmp_path: Path, marks: bytes, end: bytes) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(marks + b'recipe = 1\ntrain.stall = "5m" # \xc3\xa9\n'.replace(b"\n", end))
    file.chmod(0o640)
    (link := tmp_path / "link.toml").symlink_to(file)
    upgrade_file(link)
    assert file.read_bytes() == marks + b'recipe = 2\ntrain.hang_timeout = "5m" # \xc3\xa9\n'.replace(b"\n", end)
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.toml", "recipe.toml"]


def test_check_writes_nothing_and_upgrade_is_idempotent(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(ODD)
    assert upgrade_file(file, check=True).changes
    assert file.read_text() == ODD
    assert [str(change) for change in upgrade_file(file).changes][:2] == [
        "line 2: recipe = 1 → recipe = 2",
        'line 6: unset[0] = "train.stall" → unset[0] = "train.hang_timeout"',
    ]
    text = file.read_text()
    assert upgrade_file(file).changes == ()
    assert file.read_text() == text


def test_a_recipe_of_version_2_is_not_changed() -> None:
    text = 'recipe = 2\n[train]\nstall = "5m"\n'
    assert upgraded(text) == text


# ---------------------------------------------------------------------------------------------- changed defaults
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[data.train]\nuse = "tokenized_text" # x\n', '[data.train]\n{}\nuse = "tokenized_text" # x\n'),
        (
            "[data]\n  train.use = 'ddpforge-transformers:tokenized_text'\n",
            "[data]\n  train.{}\n  train.use = 'ddpforge-",
        ),
        ('data.eval = { block_size = 8, use = "tokenized_text" }\n', "data.eval = { block_size = 8, {}, use = "),
        ('[data.train]\nuse = "collated"\nof = {use = "tokenized_text"}\n', 'of = {{}, use = "tokenized_text"}\n'),
        ('data = { train.use = "tokenized_text" }\n', 'data = { train.{}, train.use = "tokenized_text" }\n'),
    ],
)
def test_an_option_with_another_default_gets_the_default_of_before(before: str, after: str) -> None:
    found = upgraded(f"recipe = 1\n{before}")
    assert after.replace("{}", "document_mask = false") in found
    assert upgraded(found) == found
    tables = tomllib.loads(found)["data"]
    assert upgrade_tables(f"recipe = 1\n{before}")["data"] == tables  # of a run folder, which then resumes
    assert str(tables).count("'document_mask': False") == 1


def test_an_option_that_is_set_and_one_of_another_component_stay() -> None:
    for text in (
        '[data.train]\nuse = "tokenized_text"\ndocument_mask = true\n',
        '[data.train]\nuse = "tokenized_jsonl"\n',
        '[vars]\nuse = "tokenized_text"\n',
    ):
        assert upgraded(f"recipe = 1\n{text}") == f"recipe = 2\n{text}"
    change = upgrade_text(Source("recipe.toml", 'recipe = 1\n[data.train]\nuse = "tokenized_text"\n')).changes[-1]
    assert str(change) == "line 3: data.train.document_mask, which is absent → data.train.document_mask = false"


# ---------------------------------------------------------------------------------------------- extends
def test_the_component_of_an_option_is_found_in_base_files(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[schedule]\nuse = "cosine"\n[task]\nuse = "./mine.py:Task"\n')
    (tmp_path / "middle.toml").write_text('extends = "base.toml"\n[train]\nseed = 1\n')
    child = tmp_path / "child.toml"
    child.write_text('recipe = 1\nextends = ["middle.toml"]\n[schedule]\nfinal = 0.1\n[task]\nshare = 0.5\n')
    upgrade_file(child)
    after = 'recipe = 2\nextends = ["middle.toml"]\n[schedule]\nmin_lr_ratio = 0.1\n[task]\nshare = 0.5\n'
    assert child.read_text() == after
    assert "final" not in (tmp_path / "middle.toml").read_text()


def test_an_option_of_an_unknown_component_gets_the_new_name_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "child.toml").write_text('recipe = 1\nextends = "absent.toml"\n[schedule]\nfinal = 0.1\n')
    upgrade_file(tmp_path / "child.toml")
    assert "min_lr_ratio = 0.1" in (tmp_path / "child.toml").read_text()


def test_files_that_extend_each_other_can_be_upgraded(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "{other}.toml"\n[schedule]\nfinal = 0.1\n')
    upgrade_file(tmp_path / "a.toml")
    assert (tmp_path / "a.toml").read_text() == 'extends = "b.toml"\n[schedule]\nmin_lr_ratio = 0.1\n'


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe = 3\n", "`recipe` must be 1 or 2, not 3"),
        ("recipe = true\n", "`recipe` must be 1 or 2, not true"),
        ("[project]\nname = 'x'\n", "`recipe.toml` is not a recipe"),
        ("", "`recipe.toml` is not a recipe"),
        ("recipe = 1\nname = \n", "not valid TOML"),
        (
            'recipe = 1\ntrain.stall = "1m"\ntrain.hang_timeout = "1m"\n',
            "`train.stall` is now `train.hang_timeout`, and both are written",
        ),
        (
            "recipe = 1\n[optimizer.turns.a]\n[optimizer.updates.b]\n",
            "`optimizer.turns` is now `optimizer.updates`, and both are written",
        ),
        (
            'recipe = 1\n[vars]\nx = "drop"\n[train]\nlast_batch = "${vars.x}"\n',
            '`train.last_batch` is now `train.drop_last`, and "${vars.x}" has no counterpart',
        ),
        (
            'recipe = 1\ntrain.last_batch = "dorp"\n',
            '`train.last_batch` is now `train.drop_last`, and "dorp" has no counterpart',
        ),
        ("recipe = 1\ntrain.last_batch = true\n", "and true has no counterpart"),
        (
            'recipe = 1\n[checkpoint]\ncontents = "${env:KEEP}"\n',
            '`checkpoint.contents` is now `checkpoint.save`, and "${env:KEEP}" has no counterpart',
        ),
    ],
)
def test_an_error_of_an_upgrade_has_its_place(text: str, said: str) -> None:
    message = refused(text)
    assert said in message
    assert "recipe.toml" in message


def test_a_refused_file_is_not_changed(tmp_path: Path) -> None:
    (file := tmp_path / "recipe.toml").write_text('recipe = 1\n[train]\nstall = "5m"\nlast_batch = "dorp"\n')
    with pytest.raises(RecipeError):
        upgrade_file(file)
    assert file.read_text() == 'recipe = 1\n[train]\nstall = "5m"\nlast_batch = "dorp"\n'
    for odd in (tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(RecipeError, match="file"):
            upgrade_file(odd)


# ---------------------------------------------------------------------------------------------- errors for old names
def failed(load: Load, text: str, *sets: str, **others: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *sets, **others)
    return render(caught.value)


def test_an_old_key_in_a_recipe_of_version_2_is_an_error_with_the_new_name(load: Load, valid: str) -> None:
    assert (
        failed(load, valid + 'stall = "5m"\n')
        == """\
error: `stall` is now `hang_timeout`
  --> recipe.toml:27:1
   |
27 | stall = "5m"
   | ^^^^^

1 error in the recipe; nothing was started."""
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('last_batch = "drop"\n', ["`last_batch` is now `drop_last`", "= help: write drop_last = true"]),
        ("[checkpoint]\nkeep = { best = 1, by = 'train/loss' }\n", ["`by` is now `monitor`"]),
        ('[checkpoint]\nsave = "trained"\n', ["`trained` is now `trainable`", "one of: all, trainable"]),
        ('[track]\nplan = "on"\n', ["`plan` is now `memory_check`"]),
        ('[data.order]\nuse = "shuffled"\n', ["[data.order] is now [data.sampler]"]),
        ("[optimizer.turns.a]\nlr = 1.0\n", ["[optimizer.turns] is now [optimizer.updates]"]),
        ("[optimizer.updates.a]\nrepeats = 2\n", ["`repeats` is now `n_updates`"]),
        ("[schedule]\nuse = 'cosine'\nfinal = 0.1\n", ["`final` is now `min_lr_ratio`"]),
    ],
)
def test_each_old_name_is_one_error(load: Load, valid: str, more: str, said: list[str]) -> None:
    message = failed(load, valid + more)
    assert all(one in message for one in said)
    assert "1 error in the recipe" in message


def test_an_old_name_in_set_is_the_same_error(load: Load, valid: str) -> None:
    message = failed(load, valid, "train.elastic_shards=2")
    assert "`elastic_shards` is now `virtual_ranks`" in message
    assert "--> --set" in message
    assert "recipes upgrade" not in message


def test_an_old_component_is_an_error_with_the_new_name(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(bundled()["stdlib-lm"].read_text().replace('"language_modeling"', '"language_modelling"'))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert [problem.message for problem in caught.value.problems] == ["`language_modelling` is now `language_modeling`"]
    sampler = ['data.sampler={use="reuse_batches", times=2, sampler="growing"}']
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", sets=sampler)
    assert [problem.message for problem in caught.value.problems] == ["`growing` is now `batch_size_warmup`"]


def test_an_old_word_of_a_tensor_plan_is_an_error_with_the_new_word() -> None:
    assert list(renamed_plan_word("columns:3")) == ["`columns:3` is now `colwise:3`"]
    assert list(renamed_plan_word("colwise")) == []


def test_a_recipe_of_version_1_is_one_error_with_the_upgrade_command(load: Load, valid: str) -> None:
    old = valid.replace("recipe = 2", "recipe = 1") + 'stall = "5m"\nnonsense = 3\n'
    assert (
        failed(load, old)
        == """\
error: this recipe is of version 1, and this ddpforge reads version 2
 --> recipe.toml:1:10
  |
1 | recipe = 1
  |          ^
  = help: ddpforge recipes upgrade recipe.toml
  = help: it renames keys, and keeps comments

1 error in the recipe; nothing was started."""
    )


def test_the_error_names_each_old_file_and_files_without_a_version(load: Load, valid: str) -> None:
    old = valid.replace("recipe = 2", "recipe = 1")
    message = failed(load, 'recipe = 1\nextends = ["base.toml"]\n', base=old)
    assert "ddpforge recipes upgrade recipe.toml" in message
    assert "ddpforge recipes upgrade base.toml" in message
    assert "2 errors in the recipe" in message

    message = failed(
        load, valid.replace("recipe = 2", 'recipe = 2\nextends = "part.toml"'), part='train.stall = "5m"\n'
    )
    assert "`stall` is now `hang_timeout`" in message
    assert "ddpforge recipes upgrade part.toml" in message


# ---------------------------------------------------------------------------------------------- the last release
def without_new_options(tables: dict[str, Any]) -> dict[str, Any]:
    """Removes the defaults of options that components have had since the last release."""
    optimizer = tables["optimizer"]
    for table in (optimizer, *optimizer.get("updates", {}).values(), *optimizer.get("groups", {}).values()):
        assert table.pop("amsgrad", False) is False
    if tables["task"]["use"] in ("language_modeling", "masked_lm", "segmentation"):
        assert tables["task"].pop("label_smoothing", 0.0) == 0.0
    for table in tables.get("callbacks", {}).values():
        if table["use"] == "ema":
            assert table.pop("warmup") is False
    return tables


@pytest.mark.parametrize("name", sorted(path.stem for path in RELEASED.glob("*.toml")))
def test_an_upgraded_recipe_of_the_last_release_equals_todays(name: str, tmp_path: Path) -> None:
    for file in RELEASED.glob("*.toml"):  # one extends another
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / f"{name}.toml"
    assert upgrade_file(file).changes
    for other in tmp_path.glob("*.toml"):
        upgrade_file(other)
    now = without_new_options(load_recipe(name).tables)
    found = without_new_options(load_recipe(file).tables)
    resolved = upgrade_tables((RELEASED / f"resolved/{name}.toml").read_text())
    for tables in (found, resolved):
        if "warmup" in now.get("schedule", {}):  # was in epochs or steps, with which a short run failed
            tables["schedule"]["warmup"] = now["schedule"]["warmup"]
        tables["strategy"].pop("all_gather_dtype", None)  # absent now: accelerators gather in bf16 by default
    assert found == now
    assert resolved == now == without_new_options(upgrade_tables(load_recipe(name).dumps()))


def test_a_resolved_recipe_of_a_run_is_upgraded_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "recipe.resolved.toml"
    text = (RELEASED / "resolved/gan.toml").read_text()
    file.write_text(text)
    assert load_recipe(file).recipe == load_recipe("gan").recipe
    assert file.read_text() == text
    assert tomllib.loads(text)["recipe"] == 1


# ---------------------------------------------------------------------------------------------- dropped
@pytest.mark.parametrize(
    ("assigned", "message", "hint"),
    [
        ('train.device="mps"', '`train.device` cannot be "mps"', '"mps" was dropped in 0.6.0: install a package'),
        (
            'strategy={use="ddp",compression="powersgd"}',
            '`strategy.compression` cannot be "powersgd"',
            '"powersgd" was dropped in 0.6.0: set compression = "bf16"',
        ),
        (
            'strategy={use="ddp",powersgd_rank=2}',
            'unknown key `powersgd_rank` in [strategy], which uses "ddp"',
            '`powersgd_rank` was dropped in 0.6.0: set compression = "bf16", which halves the bytes',
        ),
        (
            'strategy={use="deepspeed",stage=3,offload_optimizer="nvme"}',
            '`strategy.offload_optimizer` cannot be "nvme"',
            '"nvme" was dropped in 0.6.0: set offload_optimizer = "cpu", or shard over more ranks',
        ),
        (
            'strategy={use="ddpforge:deepspeed",stage=3,nvme_path="/x"}',
            'unknown key `nvme_path` in [strategy], which uses "ddpforge:deepspeed"',
            "`nvme_path` was dropped in 0.6.0: offload to host memory",
        ),
    ],
)
def test_a_dropped_option_is_an_error_with_its_version_and_what_to_use_instead(
    assigned: str, message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", sets=[assigned])
    (problem,) = caught.value.problems
    assert problem.message == message
    assert problem.hints[0].startswith(hint)


def test_an_option_that_another_component_dropped_is_only_unknown() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", sets=['strategy={use="fsdp",powersgd_rank=2}'])
    assert "dropped" not in str(caught.value.problems)


def test_a_dropped_option_with_its_default_is_ignored() -> None:
    """Checks the recipe of an earlier version in a run's folder, which has every default."""
    found = load_recipe("digits", sets=['strategy={use="ddp",powersgd_rank=1,powersgd_start=1000}'])
    assert not {"powersgd_rank", "powersgd_start"} & found.tables["strategy"].keys()


def test_a_dropped_option_with_its_default_is_not_a_change_of_a_run() -> None:
    before = upgrade_tables('recipe = 2\n[strategy]\nuse = "ddp"\npowersgd_rank = 1\nbucket_cap_mb = 25\n')
    assert before == {"recipe": 2, "strategy": {"use": "ddp", "bucket_cap_mb": 25}}
