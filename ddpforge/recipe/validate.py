"""Validates composed tables: returns a Recipe, or all problems."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ddpforge.components.registry import Registry
from ddpforge.errors import Diagnostic, PluginError, RecipeError
from ddpforge.interfaces.durations import Duration
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.recipe.explain import Explainer
from ddpforge.recipe.layers import (
    NAMED_SLOTS,
    SCHEDULES,
    SETS,
    SLOTS,
    SOURCES,
    VARIATIONS,
    Layers,
    framework_keys,
    holds_sets,
    inside,
    kind_at,
    strings,
    used_name,
)
from ddpforge.recipe.renamed import new_component, without_dropped
from ddpforge.recipe.report import KeyPath, dotted, shown
from ddpforge.recipe.run_plan import plan_batch
from ddpforge.recipe.schema import VERSION, Recipe, SourceComponent, TrackSection, TrainSection, on_one_line, written
from ddpforge.recipe.toml import Table, Value

_LOCAL_CODE = re.compile(r"([^:]*\.py):[A-Za-z_][\w.]*")
_OF_TRACK = TrackSection.model_fields.keys() - {"trackers"}  # no names of trackers
_DEFAULTS = ("schedule", "strategy")  # components that a recipe need not name


def local_file(text: str, base: Path) -> Path | None:
    """Returns the file in the folder `base` that `text` names, if it has the form `./file.py:Name`, else None."""
    match = _LOCAL_CODE.fullmatch(text)
    return base / match[1] if match and os.path.isfile(base / match[1]) else None


def validate(layers: Layers, file: str, registry: Registry) -> tuple[Recipe | None, Table, list[Diagnostic]]:
    """Returns the recipe (None if it is invalid), the same as plain tables with all defaults, and its problems."""
    return _Validation(layers, file, registry).run()


class _Validation:
    def __init__(self, layers: Layers, file: str, registry: Registry) -> None:
        self.layers = layers
        self.registry = registry
        self.explainer = Explainer(layers, file, registry)
        self.options: dict[KeyPath, Table] = {}
        self.plain: dict[KeyPath, Table] = {}
        self.said: dict[KeyPath, set[str]] = {}  # explicit keys of a variation

    def run(self) -> tuple[Recipe | None, Table, list[Diagnostic]]:
        for key in _DEFAULTS:
            self.layers.tables.setdefault(key, {"use": Recipe.model_fields[key].default.use})

        self._inherit()
        components = {path: self._component(path, table) for path, table in self._slots()}
        for path in components:
            self._check_options(path)
        recipe = self._recipe(components)
        tables = self._plain(recipe) if recipe else {}
        if recipe:
            for path, component in recipe.components().items():
                component.options.update(self.options.get(path, ()))  # before other code uses the recipe
            _cross_check(recipe, self.explainer)
        return recipe, tables, self.explainer.problems()

    def _inherit(self) -> None:
        """Adds the missing keys to each variation: `use`, and if that is the same, the options."""
        for path, table in self._variations():
            base = inside(self.layers.tables, path[:-2])
            if table.get("use", base.get("use")) == base.get("use"):
                self.said[path] = set(table)
                table |= {key: base[key] for key in base.keys() - framework_keys(path[:-2]) - table.keys()}

    def _variations(self) -> Iterator[tuple[KeyPath, Table]]:
        for path in VARIATIONS:
            outer = self.layers.tables.get(path[0])
            tables = outer.get(path[1]) if isinstance(outer, dict) else None
            for name, table in tables.items() if isinstance(tables, dict) else ():
                if isinstance(table, dict):
                    yield (*path, name), table

    def _slots(self) -> Iterator[tuple[KeyPath, Value]]:
        """Yields the paths at which a component's table belongs, with the values there."""
        tables = self.layers.tables
        for path in SLOTS:
            if path in SETS and holds_sets(tables, path):
                yield from (((*path, name), table) for name, table in inside(tables, path).items())
                continue
            outer = inside(tables, path[:-1]) if path[0] in tables else None
            if isinstance(outer, dict) and path[-1] in outer:
                yield path, outer[path[-1]]
        for path, table in self._variations():
            yield path, table
            if "schedule" in framework_keys(path) and "schedule" in table:
                yield (*path, "schedule"), table["schedule"]
        outer = tables.get(SCHEDULES[0])
        inner = outer.get(SCHEDULES[1]) if isinstance(outer, dict) else None
        yield from (((*SCHEDULES, key), value) for key, value in inner.items()) if isinstance(inner, dict) else ()
        for section in NAMED_SLOTS:
            inner = tables.get(section)
            for key, value in inner.items() if isinstance(inner, dict) else ():
                if section != "track" or key not in _OF_TRACK:
                    yield (section, key), value

    def _component(self, path: KeyPath, table: Value) -> Table:
        """Returns the component in the form of the schema, without options; adds their model to the vocabulary."""
        try:
            on_one_line(str(path[-1]))  # the name may be chosen by the user: a callback's or a tracker's
        except ValueError as error:
            self.explainer.add(path, f"the name of [{dotted(path)}] {error}", on_key=True)
        if not isinstance(table, dict):
            self._not_a_table(path, table)
            return {"use": ""}
        use = used_name(path, table)
        if use is None:
            self.explainer.missing((*path, "use"))
            return {"use": ""}
        if not isinstance(use, str):
            self.explainer.wrong_type((*path, "use"), use, ["a string"])
            return {"use": ""}

        base = self._base(path, table)
        try:
            self.explainer.vocabulary.models[path] = self.registry.options_model(self._kind(path), use, base)
        except PluginError as error:
            now = new_component(self._kind(path), use)
            message, hints = (error.message, error.hints) if now == use else (f"`{use}` is now `{now}`", ())
            self.explainer.add((*path, "use"), message, *hints)
        return {"use": use, "base": written(base), **_framework_keys(path, table)}

    def _not_a_table(self, path: KeyPath, value: object) -> None:
        if path[0] == "track" and path[-1] not in self.registry.names(self._kind(path)):
            self.explainer.unknown(path, value)  # rather a key of [track] than a tracker
        elif path[:-1] in SETS:
            section, kind = dotted(path[:-1]), "sources" if path[:-1] == SOURCES else "sets"
            hints = (
                f'if it is an option of one {kind[:-1]}, add `use = "…"` to [{section}]',
                f"or write [{section}.{path[-1]}]",
            )
            self.explainer.add(
                path, f"[{section}] contains several {kind}, but `{path[-1]}` is not a table", *hints, on_key=True
            )
        else:
            self.explainer.wrong_type(path, value, ["a table"])

    def _kind(self, path: KeyPath) -> str:
        return str(kind_at(path, self.layers.tables))

    def _base(self, path: KeyPath, table: Table) -> Path:
        """Returns the folder of relative paths to local code: that of the file which names the code."""
        for inner, text in strings(table):
            source = self.layers.origin((*path, *inner)).source
            if source and _LOCAL_CODE.fullmatch(text):
                return source.folder
        return Path()

    def _check_options(self, path: KeyPath) -> None:
        model = self.explainer.vocabulary.models.get(path)
        if model is None:
            return
        table = inside(self.layers.tables, path)
        table = without_dropped(table, path, used_name(path, table))
        options = {key: table[key] for key in table.keys() - {"use"} - _framework_keys(path, table).keys()}
        try:
            self.options[path], self.plain[path] = _complete(model, options)
        except ValidationError as error:
            self.explainer.explain(error.errors(), options, path)

    # -- the whole recipe
    def _recipe(self, components: dict[KeyPath, Table]) -> Recipe | None:
        shaped = copy.deepcopy(self.layers.tables)
        for path, component in components.items():
            inside(shaped, path[:-1])[path[-1]] = component
        if isinstance(track := shaped.get("track"), dict):
            own = {key: track.pop(key) for key in _OF_TRACK if key in track}
            shaped["track"] = {**own, "trackers": track}

        version = shaped.get("recipe", VERSION)
        if version != VERSION or isinstance(version, bool | float):  # for pydantic, 2.0 is 2 as well
            hint = f"it is the recipe format version: this ddpforge reads version {VERSION}"
            self.explainer.add(("recipe",), f"`recipe` must be {VERSION}, not {shown(version)}", hint)
            shaped["recipe"] = VERSION
        try:
            return Recipe.model_validate_json(json.dumps(shaped))
        except ValidationError as error:
            self.explainer.explain(error.errors(), shaped)
            return None

    def _plain(self, recipe: Recipe) -> Table:
        """Returns the recipe as plain TOML tables with defaults, but without None and without keys of no effect."""
        tables = recipe.model_dump(mode="json", exclude_none=True)
        if not recipe.train.activation_offload:
            del tables["train"]["activation_offload"]  # the same
        if not recipe.data.evaluations or recipe.train.eval_by == "run":
            del tables["train"]["eval_by"]  # absent in recipes of versions before 0.6, too
        if not recipe.data.evaluations or recipe.train.eval_by == "follower":
            del tables["train"]["eval_every"]
        tables["track"] |= tables["track"].pop("trackers")
        for path in recipe.components():
            component = inside(tables, path)
            del component["options"]
            component |= self.plain.get(path, {})
            for key in {"use", *self.plain.get(path, ())} - self.said.get(path, component.keys()):
                del component[key]
        for outer, key in (*VARIATIONS, SCHEDULES):
            if not tables[outer][key]:
                del tables[outer][key]
        return {key: value for key, value in tables.items() if value != {}}


def _framework_keys(path: KeyPath, table: Table) -> Table:
    return {key: copy.deepcopy(table[key]) for key in framework_keys(path) if key in table}


def _complete(model: type[BaseModel], options: Table) -> tuple[Table, Table]:
    """Returns the options with their defaults: validated, and as plain TOML values. Raises pydantic's ValidationError.

    Validates the plain values once more, so that they load to the same options. The plain values omit a default that
    this rejects, or that TOML cannot express.
    """
    first = model.model_validate_json(json.dumps(options))
    plain = first.model_dump(mode="json", exclude_none=True, warnings=False, fallback=lambda _: None)
    plain = {key: value for key, value in plain.items() if _is_writable(value)}
    try:
        return dict(model.model_validate_json(json.dumps(plain))), plain
    except ValidationError as error:
        odd = {one["loc"][0] for one in error.errors() if one["loc"]} - options.keys()
        plain = {key: value for key, value in plain.items() if key not in odd}
    return dict(model.model_validate_json(json.dumps(plain))), plain


def _is_writable(value: Value) -> bool:
    """True if TOML can express the JSON value `value`: it contains no None."""
    if isinstance(value, dict | list):
        return all(map(_is_writable, value.values() if isinstance(value, dict) else value))
    return value is not None


# ---------------------------------------------------------------------------------------------- between keys
_SET = re.compile(r"[\w-]+")
# Schedules that do not need the length of the run
_NEEDS_NO_TOTAL = ("constant", "step", "exponential", "cosine_restarts", "inverse_sqrt")


def _cross_check(recipe: Recipe, explainer: Explainer) -> None:
    """Reports contradictions between keys, as far as they do not depend on the machine or the number of ranks."""
    _check_batch(recipe, explainer)
    _check_sources(recipe, explainer)
    _check_evaluation(recipe, explainer)
    _check_best(recipe, explainer)
    _check_initial(recipe, explainer)
    _check_schedule(recipe, explainer)
    _check_starts(recipe, explainer)
    _check_compile(recipe, explainer)
    _check_float8(recipe, explainer)
    if recipe.optimizer.groups and recipe.optimizer.updates:
        message = "[optimizer.groups] and [optimizer.updates] cannot be used together"
        explainer.add(("optimizer", "groups"), message, "give each update the settings that its parameters need")


def _check_compile(recipe: Recipe, explainer: Explainer) -> None:
    if recipe.train.compile_blocks and recipe.train.compile == "off":
        message = '`train.compile_blocks` has no effect while `train.compile` is "off"'
        explainer.add(("train", "compile_blocks"), message, 'set a mode, e.g. compile = "default"', on_key=True)
    if not recipe.train.activation_offload or recipe.train.compile == "off":
        return
    if recipe.train.uses_cuda_graphs or not recipe.train.compile_blocks:
        message = "`train.activation_offload` copies tensors between blocks, and the whole model is one compiled graph"
        hint = 'set compile = "default" and compile_blocks = true, or remove activation_offload'
        explainer.add(("train", "activation_offload"), message, hint, on_key=True)
    elif recipe.train.activation_checkpointing == "selective":
        message = 'under `train.activation_offload`, compiled blocks cannot be recomputed by `"selective"`'
        explainer.add(("train", "activation_checkpointing"), message, "set activation_checkpointing = true")


def _check_float8(recipe: Recipe, explainer: Explainer) -> None:
    train = recipe.train
    if train.fp8 != "off" and train.precision != "bf16":
        message = f'`train.fp8` needs bf16 in the other layers, but `train.precision` is "{train.precision}"'
        explainer.add(("train", "fp8"), message, 'set precision = "bf16", or remove fp8', on_key=True)
    if train.fp8 == "off" and train.fp8_skip != TrainSection.model_fields["fp8_skip"].default:
        message = '`train.fp8_skip` has no effect while `train.fp8` is "off"'
        explainer.add(("train", "fp8_skip"), message, 'set fp8 = "tensorwise" or "rowwise"', on_key=True)


def _check_batch(recipe: Recipe, explainer: Explainer) -> None:
    try:
        plan_batch(recipe.train, data_ranks=1)
    except RecipeError as error:
        for problem in error.problems:
            explainer.add(("train", "micro_batch"), problem.message, *problem.hints)

    if recipe.data.lengths is not None and recipe.train.max_tokens is None:
        message = "`data.lengths` has no effect without `train.max_tokens`"
        explainer.add(("data", "lengths"), message, "set train.max_tokens, or remove it", on_key=True)
    if recipe.train.virtual_ranks and recipe.train.sync_batchnorm:
        message = "`train.sync_batchnorm` computes statistics over all ranks, but `train.virtual_ranks` over none"
        explainer.add(("train", "sync_batchnorm"), message, "remove one of them", on_key=True)


def _check_initial(recipe: Recipe, explainer: Explainer) -> None:
    if recipe.checkpoint.init_ignore and recipe.checkpoint.init_from is None:
        message = "`checkpoint.init_ignore` has no effect without `init_from`"
        explainer.add(("checkpoint", "init_ignore"), message, on_key=True)


def _check_evaluation(recipe: Recipe, explainer: Explainer) -> None:
    _check_names("eval", "set", recipe.data.evaluations, explainer)
    if (
        recipe.data.evaluations
        and recipe.train.eval_by == "follower"
        and ("train", "eval_every") in explainer.layers.origins
    ):
        message = '`train.eval_every` has no effect with `train.eval_by = "follower"`: each checkpoint is evaluated'
        explainer.add(("train", "eval_every"), message, "set checkpoint.every, and remove eval_every", on_key=True)
    for key in ("eval_batch", "eval_by", "eval_every"):
        if not recipe.data.evaluations and ("train", key) in explainer.layers.origins:
            explainer.add(("train", key), f"`train.{key}` has no effect without a section [data.eval]", on_key=True)


def _check_sources(recipe: Recipe, explainer: Explainer) -> None:
    data, sources = recipe.data, recipe.data.sources
    _check_names("train", "source", sources, explainer)
    weighted = [name for name, one in sources.items() if isinstance(one, SourceComponent) and one.weight is not None]
    for name in [name for name, one in sources.items() if weighted and one.use and name not in weighted]:
        message = f"[{dotted((*SOURCES, name))}] has no weight, but [{dotted((*SOURCES, weighted[0]))}] has one"
        explainer.add((*SOURCES, name), message, "set a weight for each source, or for none", on_key=True)
    if data.temperature is not None and "" in sources:
        message = "`data.temperature` has no effect with a single source [data.train]"
        explainer.add(("data", "temperature"), message, "name several sources: [data.train.NAME]", on_key=True)
    elif data.temperature is not None and weighted:
        message = f"`data.temperature` makes weights of the sizes, but [{dotted((*SOURCES, weighted[0]))}] has a weight"
        explainer.add(("data", "temperature"), message, "remove `temperature`, or all weights", on_key=True)
    if data.sampler and "" not in sources:
        message = "the sources [data.train.NAME] have an order of their own, so [data.sampler] has no effect"
        explainer.add(("data", "sampler"), message, "remove it; `weight` sets the shares of the sources", on_key=True)


def _check_names(key: str, noun: str, names: Iterable[str], explainer: Explainer) -> None:
    """Reports names of evaluation sets or sources that cannot be a part of the name of a metric."""
    for name in filter(None, names):
        path = ("data", key, name)
        at = f"[{dotted(path)}]"
        if not _SET.fullmatch(name):
            message = f"{at}: the name of a {noun} may contain only letters, digits, `_` and `-`: it is in {key}/NAME/…"
            explainer.add(path, message, on_key=True)
        elif lower_is_better(name) is not None or (key, name) == ("train", "time"):
            message = f"{at}: a {noun} cannot have the name of a metric: `{key}/{name}/loss` would be ambiguous"
            explainer.add(path, message, "name it after its samples", on_key=True)


def _check_best(recipe: Recipe, explainer: Explainer) -> None:
    keep, at = recipe.checkpoint.keep, ("checkpoint", "keep")
    if keep.best and keep.monitor is None:
        example = next((f"eval/{name}/loss" if name else "eval/loss" for name in recipe.data.evaluations), "train/loss")
        hint = f'name the metric, e.g. monitor = "{example}"'
        explainer.add((*at, "best"), "`checkpoint.keep.best` needs `monitor`", hint)
    for key in ("monitor", "mode"):
        if getattr(keep, key) is not None and not keep.best:
            hint = "set the number of the best to keep, e.g. best = 1"
            explainer.add((*at, key), f"`checkpoint.keep.{key}` has no effect without `best`", hint, on_key=True)

    if keep.monitor is None:
        return
    prefix, _, metric = keep.monitor.partition("/")
    if prefix not in ("train", "eval") or not metric:
        message = f'`checkpoint.keep.monitor` must be a metric "train/…" or "eval/…", not "{keep.monitor}"'
        explainer.add((*at, "monitor"), message)
    elif prefix == "eval" and not recipe.data.evaluations:
        message = f'`checkpoint.keep.monitor` is "{keep.monitor}", but there is no section [data.eval]'
        explainer.add((*at, "monitor"), message)
    elif prefix == "eval" and not _is_of_a_set(metric, recipe):
        last = metric.rpartition("/")[2]
        message = f'`checkpoint.keep.monitor` is "{keep.monitor}", but it must name one of the evaluation sets'
        hint = f"one of: {', '.join(f'eval/{name}/{last}' for name in recipe.data.evaluations)}"
        explainer.add((*at, "monitor"), message, hint)


def _is_of_a_set(metric: str, recipe: Recipe) -> bool:
    name, _, rest = metric.partition("/")
    return "" in recipe.data.evaluations or (name in recipe.data.evaluations and bool(rest))


def _check_starts(recipe: Recipe, explainer: Explainer) -> None:
    length = recipe.train.length
    for name, group in recipe.optimizer.groups.items():
        path = ("optimizer", "groups", name, "start")
        if group.start and group.start.is_time:
            explainer.add(path, f"`{dotted(path)}` is a wall time", "write it in epochs or steps")
        elif group.start and group.start.unit == length.unit and group.start.value >= length.value:
            explainer.add(path, f"`{dotted(path)}` is {group.start}, but the run ends after {length}")


def _check_schedule(recipe: Recipe, explainer: Explainer) -> None:
    length, schedule = recipe.train.length, recipe.schedule
    name = schedule.use.removeprefix("ddpforge:")
    if length.is_time and ":" not in name and name not in _NEEDS_NO_TOTAL:
        message = f'`train.length` is a wall time, but the schedule "{schedule.use}" needs the number of steps'
        hints = (
            "set the length in epochs or steps",
            f"schedules for a wall time: {', '.join(_NEEDS_NO_TOTAL)}",
        )
        explainer.add(("train", "length"), message, *hints)

    for key, value in schedule.options.items():
        if not isinstance(value, Duration) or value.unit not in (length.unit, "%"):
            continue
        most = 100 if value.unit == "%" else length.value
        if value.value > most:
            message = f"`schedule.{key}` is {value}, longer than the run, which is {length}"
            explainer.add(("schedule", key), message, "shorten it, or raise `train.length`")
        elif key == "warmup" and value.value == most:
            message = f"`schedule.warmup` is {value}, but it must be shorter than the run, which is {length}"
            hint = 'set a share of the run, e.g. schedule.warmup = "5%", or a longer train.length'
            explainer.add(("schedule", key), message, hint)
