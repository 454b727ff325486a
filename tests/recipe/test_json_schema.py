"""The JSON Schema accepts valid recipes and marks invalid keys; checked by a small draft-7 validator."""

import re
import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from ddpforge.components.installed import Entry
from ddpforge.components.registry import Registry
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.json_schema import recipe_schema

Load = Callable[..., LoadedRecipe]
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)
}  # fmt: skip


def _errors(schema: Any, value: Any, root: dict[str, Any], at: str = "") -> list[str]:
    """Returns paths in `value` that violate `schema`; supports the keywords of a recipe's schema."""
    if schema is True or schema == {}:
        return []
    found: list[str] = []

    def inner(part: Any) -> list[str]:
        return _errors(part, value, root, at)

    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        found += inner(target)
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        return [*found, at]
    if "const" in schema and value != schema["const"] or "enum" in schema and value not in schema["enum"]:  # noqa: RUF021
        found.append(at)
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(at)
    if isinstance(value, int | float):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
        if not (low <= value <= high and above < value < below):
            found.append(at)
    for part in schema.get("allOf", ()):
        found += inner(part)
    if "anyOf" in schema and all(inner(part) for part in schema["anyOf"]):
        found.append(at)
    if "not" in schema and not inner(schema["not"]):
        found.append(at)
    if "if" in schema and not inner(schema["if"]):
        found += inner(schema["then"])

    if isinstance(value, dict):
        found += [at for key in schema.get("required", ()) if key not in value]
        for key, one in value.items():
            rule = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            found += [f"{at}.{key}"] if rule is False else _errors(rule, one, root, f"{at}.{key}")
    if isinstance(value, list):
        for index, one in enumerate(value):
            found += _errors(schema.get("items", True), one, root, f"{at}[{index}]")
    return found


def _is(value: object, name: str) -> bool:
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


_schema = cache(recipe_schema)  # of the registry of all these tests


def _marked(registry: Registry, text: str) -> set[str]:
    schema = _schema(registry)
    return {path.removeprefix(".") for path in _errors(schema, tomllib.loads(text), schema)}


def test_valid_recipes_and_partial_recipes_pass(registry: Registry, load: Load, valid: str) -> None:
    text = valid + "[track.wandb]\nproject = 'p'\n[callbacks.ema]\n[callbacks.slow]\nuse = 'ema'\ndecay = 0.5\n"
    assert _marked(registry, text) == set()
    assert _marked(registry, load(text).dumps()) == set()
    assert _marked(registry, 'extends = ["a.toml"]\nvars.n = 3\ntrain.global_batch = "${vars.n}"\n') == set()
    assert _marked(registry, 'data.eval = { a = { use = "digits" }, b = { use = "folder", root = "." } }\n') == set()
    sources = 'a = { use = "digits", weight = 0.5 }, b = { use = "folder", weight = { 0st = 1, 3ep = 0 } }'
    assert _marked(registry, f"data.train = {{ {sources} }}\n") == set()
    assert _marked(registry, 'data.eval = { use = "folder", labels = { cat = 0 } }\ndata.workers = 1\n') == set()
    assert _marked(registry, 'data.eval.split = "test"\n') == set()
    assert _marked(registry, 'model.use = "./my.py:Net"\nmodel.anything = 3\nstrategy.use = "pkg:X"\n') == set()


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("train.lenght = '5ep'", "train.lenght"),
        ("trian.seed = 3", "trian"),
        ("train.global_batch = 0", "train.global_batch"),
        ("train.micro_batch = '32'", "train.micro_batch"),
        ("train.precision = 'int8'", "train.precision"),
        ("optimizer = { use = 'sgd', betas = [0.9, 0.9] }", "optimizer.betas"),
        ("optimizer = { use = 'sgd', lr = -1 }", "optimizer.lr"),
        ("optimizer = { use = 'lion' }", "optimizer.use"),
        ("data.train = { use = 'digits', split = 'tset' }", "data.train.split"),
        ("data.eval.a = { use = 'digits', split = 'tset' }", "data.eval.a.split"),
        ("data.eval = { use = 'digits', a = { use = 'digits' } }", "data.eval.a"),
        ("data.eval = 'digits'", "data.eval"),
        ("data.train.a = { use = 'digits', weight = 'much' }", "data.train.a.weight"),
        ("data.train.a = { use = 'digits', weigth = 1 }", "data.train.a.weigth"),
        ("data.temperature = 'high'", "data.temperature"),
        ("track.wandb.projct = 'p'", "track.wandb.projct"),
        ("callbacks.slow = { use = 'ema', decay = 2 }", "callbacks.slow.decay"),
        ("checkpoint.keep.lst = 3", "checkpoint.keep.lst"),
        ("model = 'cnn'", "model"),
        ("vars.x = [1]", "vars.x"),
    ],
)
def test_an_invalid_key_is_marked_at_its_path(registry: Registry, line: str, path: str) -> None:
    assert _marked(registry, line) == {path}


def test_a_component_that_cannot_be_imported_accepts_any_options(valid: str) -> None:
    broken = Registry([Entry("model", "cnn", "parts", "1.0", "no_such_module:CNN")])
    schema = recipe_schema(broken)
    assert "cannot be imported" in schema["$defs"]["model.cnn"]["description"]
    assert _marked(broken, 'model = { use = "cnn", whatever = 3 }') == set()


def test_the_schema_has_descriptions_and_defaults(registry: Registry) -> None:
    schema = recipe_schema(registry)
    train = schema["properties"]["train"]["properties"]
    assert train["eval_every"]["default"] == "1ep"
    assert train["length"]["description"].startswith("How long to train")
    assert schema["$defs"]["model.cnn"]["properties"]["width"]["description"] == "How many."
    assert "required" not in schema


def test_alternating_updates_have_their_own_keys_and_any_options() -> None:
    turns = recipe_schema(Registry.installed())["$defs"]["optimizer.adamw"]["properties"]["updates"]
    turn = turns["additionalProperties"]
    assert {"use", "parameters", "n_updates", "new_batch", "clip_norm", "schedule"} == set(turn["properties"])
    assert turn["properties"]["schedule"] == {"$ref": "#/$defs/schedule"}
    assert "additionalProperties" not in turn


def test_devices_are_those_of_installed_kinds() -> None:
    schema = recipe_schema(Registry.installed())
    for device, wrong in (("auto", 0), ("cuda", 0), ("${vars.device}", 0), ("tpu", 1)):
        assert len(_errors(schema, {"recipe": 2, "train": {"device": device}}, schema)) == wrong, device
