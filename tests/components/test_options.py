"""Options from a signature: accepted and rejected values, nested components, and the table of options."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn

from ddpforge.components.errors import BrokenComponent, UnknownComponent
from ddpforge.components.installed import Entry
from ddpforge.components.kinds import KINDS
from ddpforge.components.options import options_model
from ddpforge.components.options_table import OptionRow, options_table
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError
from ddpforge.interfaces import Callback, Data, Duration, Metric, Task, Total
from ddpforge.recipe.schema import Component

if TYPE_CHECKING:
    from torch.utils.data import Sampler


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Weights(Enum):
    """Enumeration whose values TOML cannot write, such as torchvision's weights."""

    IMAGENET = functools.partial(torch.zeros, 3)


def everything(  # type: ignore[no-untyped-def]
    *,
    count: Annotated[int, Field(ge=1, le=100, description="How many.")] = 1,
    number: int = 0,
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    flag: bool = False,
    mode: Literal["a", "b"] = "a",
    colour: Colour = Colour.RED,
    name: str = "x",
    path: Path = Path("data"),
    warmup: Duration = Duration(1, "ep"),
    words: Sequence[str] = (),
    some: Iterable[int] = (),
    pair: tuple[float, float] = (0.9, 0.999),
    sizes: tuple[int, ...] = (),
    table: Mapping[str, int] | None = None,
    plain: dict = {},  # type: ignore[type-arg]  # noqa: B006 (users write mutable defaults)
    either: str | list[str] = "all",
    limit: Annotated[int | None, Field(ge=1)] = None,
    whatever=None,  # noqa: ANN001
) -> None:
    """Takes one option of every type."""


KEYS = list(inspect.signature(everything).parameters)


def model_of(function: Callable[..., Any], given: Iterable[str] = ()) -> type[BaseModel]:
    return options_model(function, frozenset(given), REGISTRY, Path())


def read(function: Callable[..., Any], **table: Any) -> dict[str, Any]:
    return dict(model_of(function).model_validate_json(json.dumps(table)))


def errors(function: Callable[..., Any], **table: Any) -> list[tuple[tuple[int | str, ...], str]]:
    with pytest.raises(ValidationError) as caught:
        read(function, **table)
    return [(error["loc"], error["type"]) for error in caught.value.errors()]


# --------------------------------------------------------------------------------------------- values and types
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("count", 100, 100),
        ("number", 2**63 - 1, 2**63 - 1),
        ("number", -(2**63), -(2**63)),
        ("rate", 0, 0.0),
        ("rate", 0.25, 0.25),
        ("mode", "b", "b"),
        ("colour", "blue", Colour.BLUE),
        ("path", "a/b", Path("a/b")),
        ("warmup", "100st", Duration(100, "st")),
        ("words", ["a", "b"], ["a", "b"]),
        ("some", [1, 2], [1, 2]),
        ("pair", [0, 1], (0.0, 1.0)),
        ("sizes", [1, 2, 3], (1, 2, 3)),
        ("table", {"a": 1}, {"a": 1}),
        ("plain", {"a": [1, {"b": "c"}]}, {"a": [1, {"b": "c"}]}),
        ("either", "bias", "bias"),
        ("either", ["bias"], ["bias"]),
        ("limit", 3, 3),
        ("whatever", [1, "two", {"three": 3.0}], [1, "two", {"three": 3.0}]),
    ],
)
def test_valid_values_are_accepted(option: str, value: object, expected: object) -> None:
    found = read(everything, **{option: value})[option]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("cuont", 1, "extra_forbidden"),
        ("count", 0, "greater_than_equal"),
        ("count", 101, "less_than_equal"),
        ("count", "3", "int_type"),
        ("count", 3.0, "int_type"),
        ("count", True, "int_type"),
        ("count", None, "int_type"),
        ("number", 2**63, "less_than"),
        ("number", -(2**63) - 1, "greater_than_equal"),
        ("number", 10**400, "less_than"),
        ("rate", 1.0, "less_than"),
        ("rate", "0.5", "float_type"),
        ("rate", True, "float_type"),
        ("rate", float("inf"), "finite_number"),
        ("rate", float("nan"), "finite_number"),
        ("rate", 10**400, "finite_number"),
        ("flag", 1, "bool_type"),
        ("flag", "true", "bool_type"),
        ("mode", "c", "literal_error"),
        ("colour", "green", "enum"),
        ("name", 1, "string_type"),
        ("warmup", 100, "string_type"),
        ("warmup", "100", "value_error"),
        ("words", "abc", "list_type"),
        ("pair", [1.0], "missing"),
        ("pair", [1.0, 2.0, 3.0], "too_long"),
        ("table", [1], "dict_type"),
        ("limit", 0, "greater_than_equal"),
    ],
)
def test_invalid_values_are_rejected(option: str, value: object, error: str) -> None:
    ((place, found),) = errors(everything, **{option: value})
    assert found == error
    assert place[0] == option


def test_all_errors_are_reported_at_once_with_their_location() -> None:
    assert errors(everything, sizes=[1, "2", 2**64], rate=-1, x=1) == [
        (("rate",), "greater_than_equal"),
        (("sizes", 1), "int_type"),
        (("sizes", 2), "less_than"),
        (("x",), "extra_forbidden"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "metrics", "best", "x"]), JSON))
def test_every_table_passes_or_fails_validation_without_another_error(table: dict[str, Any]) -> None:
    for model in (EVERYTHING, REPORT):
        with contextlib.suppress(ValidationError):
            model.model_validate_json(json.dumps(table))


def test_defaults_are_not_validated_or_converted() -> None:
    def part(size: int = "large", where: Path = 3, kind: str | type = torch.float32) -> None: ...  # type: ignore[assignment]

    assert read(part) == {"size": "large", "where": 3, "kind": torch.float32}


def test_options_may_have_names_of_pydantic_methods() -> None:
    def part(copy: bool, json: str = "", schema: int = 1) -> None: ...

    assert read(part, copy=True, schema=2) == {"copy": True, "json": "", "schema": 2}


def test_options_are_frozen() -> None:
    options = EVERYTHING.model_validate_json("{}")
    with pytest.raises(ValidationError):
        options.count = 2  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- signatures
def test_a_parameter_without_default_is_required() -> None:
    def part(lr: float, decay: float = 0.0) -> None: ...

    assert errors(part) == [(("lr",), "missing")]
    assert read(part, lr=1) == {"lr": 1.0, "decay": 0.0}


def test_types_that_toml_cannot_write_are_dropped_from_a_union() -> None:
    def part(
        lr: float | Tensor = 1.0, betas: tuple[float | Tensor, float] = (0, 0), pick: str | Callable[[], int] = "a"
    ) -> None: ...

    assert read(part, lr=0.5, betas=[1, 0.5], pick="b") == {"lr": 0.5, "betas": (1.0, 0.5), "pick": "b"}
    assert errors(part, lr="0.5") == [(("lr",), "float_type")]


def test_parameter_that_toml_cannot_write_is_not_an_option() -> None:
    def part(
        size: int = 1,
        activation: Callable[[Tensor], Tensor] | None = None,
        norm: type[nn.Module] = nn.LayerNorm,
        dtype: torch.dtype = torch.float32,
        buffers: dict[str, Tensor] | None = None,
        weights: Weights | None = None,
    ) -> None: ...

    assert read(part) == {"size": 1}
    assert errors(part, activation="relu") == [(("activation",), "extra_forbidden")]


def test_argument_passed_by_ddpforge_is_not_an_option() -> None:
    def part(params: Sampler[int], lr: float = 1.0) -> None: ...

    model = model_of(part, given={"params"})

    assert dict(model.model_validate_json("{}")) == {"lr": 1.0}
    with pytest.raises(ValidationError, match="Extra inputs"):
        model.model_validate_json('{"params": 1}')


def test_var_keyword_accepts_other_options_but_not_arguments_passed_by_ddpforge() -> None:
    def part(lr: float = 1.0, **rest: Any) -> None: ...

    model = model_of(part, given={"params"})

    assert dict(model.model_validate_json('{"momentum": 0.5}')) == {"lr": 1.0, "momentum": 0.5}
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json('{"params": 1}')
    ((place, kind),) = [(error["loc"], error["type"]) for error in caught.value.errors()]
    assert (place, kind) == (("params",), "given")


class Plain:
    def __init__(self, size: int = 2) -> None: ...


class Inheriting(Plain): ...


class Empty: ...


class Making:
    def __new__(cls, size: int = 2) -> Making:
        return super().__new__(cls)


class Announcing:
    __signature__ = inspect.signature(Plain)


class Meta(type):
    def __call__(cls, size: int = 2) -> Any: ...


class Called(metaclass=Meta): ...


class Calling:
    def __call__(self, size: int = 2) -> None: ...


@dataclass
class Data2:
    size: int = 2


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def sized(colour: str, size: int = 2) -> None: ...
def variadic(first: int = 1, /, *sizes: int, size: int = 2) -> None: ...


@pytest.mark.parametrize(
    "component",
    [
        Plain,
        Inheriting,
        Making,
        Announcing,
        Called,
        Calling(),
        Data2,
        functools.partial(sized, "red"),
        wrapped(functools.partial(sized, "red")),
        wrapped(Plain),
    ],
)
def test_any_callable_with_a_signature_is_a_component(component: Callable[..., Any]) -> None:
    assert read(component) == {"size": 2}
    assert read(component, size=3) == {"size": 3}
    assert errors(component, size="3") == [(("size",), "int_type")]


def test_optional_positional_only_parameters_are_not_options() -> None:
    assert read(variadic) == {"size": 2}
    assert errors(variadic, sizes=[1]) == [(("sizes",), "extra_forbidden")]


def test_a_class_without_constructor_has_no_options() -> None:
    assert read(Empty) == {}
    assert errors(Empty, size=3) == [(("size",), "extra_forbidden")]


def test_keyword_of_a_partial_is_the_new_default() -> None:
    assert read(functools.partial(sized, colour="red")) == {"colour": "red", "size": 2}


def positional(size: int, /) -> None: ...
def unwritable(activation: Callable[[], int]) -> None: ...
def unresolved(sampler: Sampler[int] | None = None) -> None: ...
def reserved(model_dump: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("component", "said"),
    [
        (positional, "takes `size: 'int'` by position only"),
        (unwritable, "requires `activation: 'Callable[[], int]'`, which TOML cannot write"),
        (unresolved, "name 'Sampler' is not defined; import it outside `if TYPE_CHECKING`"),
        (reserved, "has a signature that cannot be read: "),
        (type, "has a signature that cannot be read: "),
    ],
)
def test_signatures_that_break_the_contract_are_rejected(component: Callable[..., Any], said: str) -> None:
    with pytest.raises(PluginError) as caught:
        model_of(component)
    assert said in caught.value.message


def test_registry_error_names_the_component_that_breaks_the_contract() -> None:
    registry = Registry([Entry("model", "net", "nets", "1.0", f"{__name__}:unwritable")])

    with pytest.raises(BrokenComponent) as caught:
        registry.options_model("model", "net")

    assert caught.value.message == (
        "model `net` of nets 1.0 requires `activation: 'Callable[[], int]'`, which TOML cannot write"
    )


# --------------------------------------------------------------------------------------------- nested components
def test_parameter_annotated_as_module_accepts_a_model() -> None:
    def teach(teacher: nn.Module, pupil: nn.Module | None = None) -> None: ...

    table = {"use": "torch.nn:Linear", "in_features": 2, "out_features": 3}
    assert read(teach, teacher=table)["teacher"].kind == "model"
    with pytest.raises(ValidationError, match="there is no model named `nobody`"):
        read(teach, teacher="nobody")


class Accuracy(Metric):
    name = "accuracy"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        return Total(torch.tensor(1.0), 1)


class TopK(Metric):
    def __init__(
        self, *, k: Annotated[int, Field(ge=1)], after: Duration = Duration(1, "ep"), note: str | None = None
    ) -> None:
        if k == 13:
            raise ValueError("unlucky")
        self.name = f"top{k}"
        self.after = after

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        return Total(torch.tensor(1.0), 1)


class Best(Metric):
    name = "best"

    def __init__(self, of: Metric) -> None:
        self.of = of

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        return self.of(outputs, targets)


class Report(Task):
    def __init__(
        self,
        metrics: Annotated[Sequence[Metric], Field(max_length=3, description="What to report.")] = (),
        best: Metric | None = None,
        by_name: Mapping[str, Metric] | None = None,
        watch: tuple[Callback, ...] = (),
    ) -> None:
        self.metrics_given = metrics
        self.best = best
        self.by_name = by_name

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError


def seeded(seed: int, size: int = 1) -> tuple[int, int]:
    return seed, size


def joined(parts: list[Data]) -> list[Data]:
    return parts


REGISTRY = Registry(
    [
        Entry("metric", "accuracy", "test", "1.0", f"{__name__}:Accuracy"),
        Entry("metric", "topk", "test", "1.0", f"{__name__}:TopK"),
        Entry("metric", "best", "test", "1.0", f"{__name__}:Best"),
        Entry("task", "report", "test", "1.0", f"{__name__}:Report"),
        Entry("data", "seeded", "test", "1.0", f"{__name__}:seeded"),
        Entry("data", "joined", "test", "1.0", f"{__name__}:joined"),
    ]
)
EVERYTHING = model_of(everything)
REPORT = model_of(Report)


def built(**table: Any) -> Report:
    options = REGISTRY.options_model("task", "report").model_validate_json(json.dumps(table))
    task = REGISTRY.build("task", Component(use="report", options=dict(options)))
    assert isinstance(task, Report)
    return task


def test_nested_metric_is_a_name_or_a_table() -> None:
    task = built(metrics=["accuracy", {"use": "topk", "k": 5, "after": "3st"}], best="accuracy")

    first, second = task.metrics_given
    assert isinstance(first, Accuracy)
    assert isinstance(second, TopK)
    assert (second.name, second.after) == ("top5", Duration(3, "st"))
    assert isinstance(task.best, Accuracy)
    assert built().metrics_given == ()
    assert built().best is None


def test_metrics_nest_in_metrics_and_in_mappings() -> None:
    task = built(by_name={"first": {"use": "best", "of": {"use": "best", "of": "accuracy"}}})

    assert task.by_name is not None
    outer = task.by_name["first"]
    assert isinstance(outer, Best)
    assert isinstance(outer.of, Best)
    assert isinstance(outer.of.of, Accuracy)


def test_nested_metric_can_be_in_a_file_next_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from {__name__} import Accuracy as Mine")
    model = REGISTRY.options_model("task", "report", base=tmp_path)

    options = dict(model.model_validate_json('{"best": "./mine.py:Mine"}'))

    task = REGISTRY.build("task", Component(use="report", options=options))
    assert isinstance(task.best, Accuracy)


@pytest.mark.parametrize(
    ("table", "place", "kind"),
    [
        ({"metrics": ["accuracy", {"use": "topk"}]}, ("metrics", 1, "k"), "missing"),
        ({"metrics": [{"use": "topk", "k": True}]}, ("metrics", 0, "k"), "int_type"),
        ({"metrics": [{"use": "topk", "k": 2**63}]}, ("metrics", 0, "k"), "less_than"),
        ({"metrics": [{"use": "topk", "k": 1, "x": 1}]}, ("metrics", 0, "x"), "extra_forbidden"),
        ({"metrics": [{"use": "topk", "k": 1, "after": "1"}]}, ("metrics", 0, "after"), "value_error"),
        ({"metrics": ["acuracy"]}, ("metrics", 0), "component"),
        ({"metrics": [{"use": "acuracy", "k": 1}]}, ("metrics", 0, "use"), "component"),
        ({"metrics": [{"k": 1}]}, ("metrics", 0), "component"),
        ({"metrics": [{"use": 1}]}, ("metrics", 0), "component"),
        ({"metrics": [1]}, ("metrics", 0), "component"),
        ({"metrics": "accuracy"}, ("metrics",), "list_type"),
        ({"metrics": ["accuracy"] * 4}, ("metrics",), "too_long"),
        ({"best": {"use": "topk", "k": 0}}, ("best", "k"), "greater_than_equal"),
        ({"best": "topk"}, ("best", "k"), "missing"),
        ({"best": {"use": "best", "of": {"use": "no"}}}, ("best", "of", "use"), "component"),
    ],
)
def test_error_in_a_nested_component_has_its_location(
    table: dict[str, Any], place: tuple[str | int, ...], kind: str
) -> None:
    assert errors(Report, **table) == [(place, kind)]


def test_validation_error_carries_the_error_of_a_nested_component_that_cannot_be_loaded() -> None:
    with pytest.raises(ValidationError) as caught:
        read(Report, metrics=["acuracy"])

    (error,) = caught.value.errors()
    assert error["msg"] == "there is no metric named `acuracy`"
    assert error["input"] == "acuracy"
    assert isinstance(error["ctx"]["error"], UnknownComponent)
    assert error["ctx"]["error"].hints[0] == "did you mean `accuracy`?"


def test_error_names_the_nested_component_that_rejects_its_options() -> None:
    with pytest.raises(PluginError, match="metric `topk` cannot be built: unlucky"):
        built(metrics=[{"use": "topk", "k": 13}])


def test_nested_components_are_dumped_as_in_a_recipe() -> None:
    options = REPORT.model_validate_json('{"metrics": ["accuracy", {"use": "topk", "k": 5}]}')

    dumped = options.model_dump(mode="json")
    assert dumped["metrics"] == ["accuracy", {"use": "topk", "k": 5, "after": "1ep"}]
    assert REPORT.model_validate_json(json.dumps(dumped)) == options
    assert options.model_dump()["metrics"] == dumped["metrics"]


def test_nested_components_receive_the_arguments_that_ddpforge_passes_to_their_kind() -> None:
    model = REGISTRY.options_model("data", "joined")
    options = dict(model.model_validate_json('{"parts": ["seeded", {"use": "seeded", "size": 3}]}'))

    assert REGISTRY.build("data", Component(use="joined", options=options), seed=7) == [(7, 1), (7, 3)]
    assert KINDS["data"].given.keys() == {"seed"}


# --------------------------------------------------------------------------------------------------- table of options
def test_options_table_uses_names_of_toml_types() -> None:
    rows = {row.name: row for row in options_table(EVERYTHING)}

    assert list(rows) == KEYS
    assert rows["count"] == OptionRow("count", "integer", "1", "How many.", ">= 1, <= 100", "1")
    assert {name: row.type for name, row in rows.items()} == {
        "count": "integer",
        "number": "integer",
        "rate": "float",
        "flag": "boolean",
        "mode": '"a" | "b"',
        "colour": '"red" | "blue"',
        "name": "string",
        "path": "path",
        "warmup": "duration",
        "words": "array of string",
        "some": "array of integer",
        "pair": "[float, float]",
        "sizes": "array of integer",
        "table": "table of integer",
        "plain": "table",
        "either": "string | array of string",
        "limit": "integer",
        "whatever": "any",
    }
    assert {name: row.default for name, row in rows.items()} == {
        "count": "1",
        "number": "0",
        "rate": "0.5",
        "flag": "false",
        "mode": '"a"',
        "colour": '"red"',
        "name": '"x"',
        "path": '"data"',
        "warmup": '"1ep"',
        "words": "[]",
        "some": "[]",
        "pair": "[0.9, 0.999]",
        "sizes": "[]",
        "table": "unset",
        "plain": "{}",
        "either": '"all"',
        "limit": "unset",
        "whatever": "unset",
    }
    assert rows["rate"].limits == ">= 0, < 1"
    assert rows["limit"].limits == ">= 1"
    assert rows["number"].limits == ""


def test_options_table_shows_nested_required_and_unusual_options() -> None:
    def part(
        tasks: list[Metric],
        scores: Sequence[Annotated[float, Field(gt=0)]],
        by_name: Mapping[str, Metric] | None = None,
        eps: float = 1e-8,
        most: float = float("inf"),
        dtype: str | torch.dtype = torch.float32,
        shape: Annotated[dict[str, int], Field(description="By name.")] | None = {"a": 1},  # noqa: B006
    ) -> None: ...

    rows = {row.name: row for row in options_table(model_of(part))}

    assert rows["tasks"] == OptionRow("tasks", "array of metric", None, "", "", '["accuracy"]')
    assert rows["scores"].limits == "each > 0"
    assert rows["by_name"].type == "table of metric"
    assert (rows["eps"].default, rows["most"].default) == ("1e-08", "inf")
    assert rows["dtype"].default == '"torch.float32"'
    assert rows["shape"].default == '{ "a" = 1 }'
    assert rows["shape"].description == "By name."


@pytest.mark.parametrize(
    ("annotation", "example"),
    [
        (Annotated[int, Field(ge=2)], "2"),
        (Annotated[int, Field(gt=6)], "7"),
        (Annotated[int, Field(le=-3)], "-3"),
        (Annotated[float, Field(gt=0, lt=1)], "0.5"),
        (Annotated[int, Field(ge=1, examples=[10])], "10"),
        (Literal["sum", "mean"], '"sum"'),
        (Colour, '"red"'),
        (bool, "true"),
        (Duration, '"1ep"'),
        (Metric, '"accuracy"'),
        (tuple[int, str], '[1, "..."]'),
        (Annotated[list[int], Field(min_length=2)], "[1, 1]"),
        (dict[str, int], "{}"),
        (str | None, '"..."'),
    ],
)
def test_examples_in_the_options_table_are_valid_values(annotation: object, example: str) -> None:
    def part(it) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001

    part.__annotations__["it"] = annotation
    (row,) = options_table(model_of(part))

    assert row.example == example
    value = {"[1, 1]": [1, 1], '[1, "..."]': [1, "..."]}.get(example) or json.loads(example)
    assert model_of(part).model_validate_json(json.dumps({"it": value}))


class Level(IntEnum):
    LOW = 1
    HIGH = 2


def exact(
    stage: Literal[1, 2] = 1,
    level: Level = Level.LOW,
    mixed: Literal[1, "auto"] | None = None,
    several: list[Literal[1, 2]] = [1],  # noqa: B006
    count: int = 1,
    rate: float = 1.0,
    flag: bool = True,
) -> None: ...


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in ("stage", "level", "mixed", "count") for value in (True, 1.0)],
        *[("several", [True]), ("several", [1.0]), ("rate", True), ("flag", 1), ("flag", 1.0)],
    ],
)
def test_equal_value_of_another_type_is_rejected(key: str, value: object) -> None:
    model = options_model(exact, frozenset(), Registry(), Path())
    assert dict(model.model_validate_json('{"stage": 2, "level": 2, "mixed": "auto"}'))["stage"] == 2
    with pytest.raises(ValidationError):
        model.model_validate_json(json.dumps({key: value}))


# ------------------------------------------------------------------------------------------------- functions
def takes_functions(
    *,
    rewards: Sequence[Annotated[Callable[..., Any], Field(description="Functions.")]] = (),
    update: Annotated[Callable[..., Any], Field(description="A function.")] | None = None,
) -> dict[str, Any]:
    return {"rewards": rewards, "update": update}


def test_an_option_is_a_function_of_a_file_or_a_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(x):\n    return 2 * x\n")
    registry = Registry([], objects={("task", "<object> it"): takes_functions})
    model = options_model(takes_functions, frozenset(), registry, tmp_path)
    found = model.model_validate_json(json.dumps({"rewards": ["./mine.py:twice", "math:sqrt"], "update": None}))
    assert found.model_dump(mode="json")["rewards"] == ["./mine.py:twice", "math:sqrt"]
    built = registry.build("task", Component(use="<object> it", options=dict(found), base=tmp_path))
    assert [one(9.0) for one in built["rewards"]] == [18.0, 3.0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("./mine.py:twise", "did you mean|cannot be found"),
        ("./none.py:f", "none.py"),
        ("twice", "twice"),
        (3, "the place of a function"),
        ({"use": "math:sqrt"}, "the place of a function"),
        ("./mine.py:NUMBER", "cannot be called"),
    ],
)
def test_another_value_than_a_function_is_refused(tmp_path: Path, value: object, said: str) -> None:
    (tmp_path / "mine.py").write_text("NUMBER = 1\n\ndef twice(x):\n    return 2 * x\n")
    model = options_model(takes_functions, frozenset(), Registry([]), tmp_path)
    with pytest.raises(ValidationError, match=said):
        model.model_validate_json(json.dumps({"rewards": [value]}))
