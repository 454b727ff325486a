"""Options of a component: builds a strict pydantic model from its signature."""

from __future__ import annotations

import collections.abc as abc
import inspect
import json
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError, PydanticSerializationError

from ddpforge.components.kinds import FUNCTION, KINDS
from ddpforge.errors import PluginError

__all__ = ["Components", "Nested", "any_options", "options_model"]


class Components(Protocol):
    """Lookup of nested components; a Registry has these methods."""

    def names(self, kind: str) -> list[str]:
        """Returns the registered names of a kind."""

    def options_model(self, kind: str, use: str, base: Path) -> type[BaseModel]:
        """Returns the pydantic model of a component's options."""

    def function(self, use: str, base: Path) -> Callable[..., Any]:
        """Returns the function of an option."""


def _nestable(annotation: Any) -> str | None:
    """Returns the kind of component for a parameter with this annotation; None if it is not a component."""
    for kind, spec in KINDS.items():
        # An annotation cannot be a class of a module that is not imported, and importing torch takes seconds.
        if spec.nested and re.split("[.:]", spec.base)[0] in sys.modules and annotation is spec.base_class():
            return kind
    return None


class Nested(BaseModel):
    """Validated component in the options of another component; `Registry.build` builds it first.

    A dump has the form of the recipe, with defaults.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    use: str
    options: dict[str, Any]
    base: Path
    plain: str | dict[str, Any]

    @model_serializer
    def _dump(self) -> str | dict[str, Any]:
        return self.plain


# ------------------------------------------------------------------------------------------ signature → model
def options_model(
    component: Callable[..., Any], given: frozenset[str], registry: Components, base: Path
) -> type[BaseModel]:
    """Builds a strict model of the keyword parameters of `component`.

    Parameters in `given` without a default are excluded: ddpforge passes them. A parameter in `given` with a default is
    an option of the component. `registry` and `base` resolve nested components. Raises PluginError if the signature
    breaks the contract; its message is the rest of a sentence that begins with the component's name.
    """
    try:
        fields, extra = _fields(component, given, partial(_nested, registry=registry, base=base))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Field name")  # `copy` and `json` are good option names
            return create_model(
                getattr(component, "__name__", "Options"),
                __config__=ConfigDict(extra=extra, strict=True, frozen=True, allow_inf_nan=False),
                __validators__={"_not_given": _reject(given)},
                **fields,
            )
    except PluginError:
        raise
    except Exception as problem:  # signatures and annotations run a plugin's own code
        raise PluginError(f"has a signature that cannot be read: {problem}") from problem


def any_options() -> type[BaseModel]:
    """Returns a model that accepts any options, for a component that must not be imported."""
    return create_model("Options", __config__=ConfigDict(extra="allow", frozen=True))


def _fields(
    component: Callable[..., Any], given: frozenset[str], nested: Callable[[str], Any]
) -> tuple[dict[str, Any], Literal["forbid", "allow"]]:
    """Returns the fields of the model, and "allow" if **kwargs takes further options, else "forbid"."""
    namespace = _namespace(component)
    fields: dict[str, Any] = {}
    extra: Literal["forbid", "allow"] = "forbid"

    for name, parameter in _parameters(component).items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue  # *args may be empty
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise PluginError(f"takes `{parameter}` by position only")
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
            continue
        if name in given and parameter.default is parameter.empty:
            continue

        required = parameter.default is parameter.empty
        try:
            annotation = _writable(_hint(parameter, namespace), nested)
        except _NotInTOML:
            if required:
                raise PluginError(f"requires `{parameter}`, which TOML cannot write") from None
            continue
        fields[name] = (annotation, ... if required else parameter.default)
    return fields, extra


_BARE = (object.__init__, object.__new__, type.__call__)


def _parameters(component: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a component."""
    # For a class without a constructor, `inspect` would parse that of `object`, which takes 7 ms in every rank.
    if isinstance(component, type) and not hasattr(component, "__signature__"):
        own: Any = component
        if (own.__init__, own.__new__, type(own).__call__) == _BARE:
            return {}
    return inspect.signature(component).parameters


def _reject(given: frozenset[str]) -> Any:
    """Returns a validator that refuses parameters passed by ddpforge, which **kwargs would otherwise accept."""

    def validate(options: BaseModel) -> BaseModel:
        error = PydanticCustomError("given", "ddpforge passes this value; a recipe cannot set it")
        extra = options.model_extra or {}
        if taken := sorted(given & extra.keys()):
            raise _located([{"type": error, "loc": (name,), "input": extra[name]} for name in taken])
        return options

    return model_validator(mode="after")(validate)


def _located(details: list[InitErrorDetails]) -> ValidationError:
    """Returns an error. Pydantic reports its locations below the field that raises it."""
    return ValidationError.from_exception_data("options", details)


# ------------------------------------------------------------------------------------------------ annotations
class _NotInTOML(Exception):
    """Raised for a type that has no values in TOML."""


_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # TOML's range, and that of a tensor's sizes

# Containers whose items are checked, and the type for pydantic, which would check an Iterable only during iteration.
_CONTAINERS: Mapping[Any, Any] = {kind: kind for kind in (list, tuple, dict, set, frozenset)} | {
    abc.Iterable: abc.Sequence,
    abc.Collection: abc.Sequence,
    abc.Sequence: abc.Sequence,
    abc.Mapping: abc.Mapping,
}


def _namespace(component: Any) -> dict[str, Any]:
    """Returns the globals of the component's function, in which its annotations are evaluated."""
    while isinstance(component, partial):
        component = component.func
    names = ("__init__", "__new__") if isinstance(component, type) else ("__call__",)
    for function in (component, *(getattr(component, name) for name in names)):
        if found := getattr(inspect.unwrap(function), "__globals__", None):
            return dict(found)
    return {}


def _hint(parameter: inspect.Parameter, namespace: dict[str, Any]) -> Any:
    """Evaluates the annotation of one parameter; raises PluginError if a name in it is not imported."""
    # One at a time: annotations of skipped parameters may use names that only type checkers import.
    if parameter.annotation is parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return get_type_hints(holder, globalns=namespace, include_extras=True)["it"]
    except NameError as missing:
        raise PluginError(
            f"has the parameter `{parameter}`, but {missing}; import it outside `if TYPE_CHECKING`"
        ) from missing


def _writable(annotation: Any, nested: Callable[[str], Any]) -> Any:
    """Narrows `annotation` to values that TOML can write; raises _NotInTOML if there are none, or only None."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)

    if origin is Annotated and get_origin(arguments[0]) is abc.Callable:  # without Annotated it is not an option
        return Annotated[(nested(FUNCTION), *annotation.__metadata__)]
    if origin is Annotated:
        return Annotated[(_writable(arguments[0], nested), *annotation.__metadata__)]
    if origin in (Union, types.UnionType):
        return Union[tuple(_writable_members(arguments, nested))]  # noqa: UP007
    if origin in _CONTAINERS:
        items = tuple(item if item is ... else _writable(item, nested) for item in arguments)
        return _CONTAINERS[origin][items] if items else _CONTAINERS[origin]
    if kind := _nestable(origin):
        return nested(kind)
    if origin is int:
        return _Integer
    if origin is Literal:
        return Annotated[annotation, BeforeValidator(partial(_literally, arguments))]

    # TOML can write a value exactly when pydantic can write a JSON Schema for its type. `type[X]` is the
    # exception: its schema is empty.
    try:
        TypeAdapter(annotation).json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation, PydanticSerializationError):
        raise _NotInTOML from None
    if origin is type:
        raise _NotInTOML
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        values = tuple(member.value for member in annotation)
        return Annotated[annotation, BeforeValidator(partial(_literally, values))]
    return annotation


def _literally(choices: tuple[Any, ...], value: Any) -> Any:
    """Returns `value`; raises if it equals a choice only across types, as true and 1.0 equal 1."""
    if any(value == choice for choice in choices) and not any(
        value == choice and type(value) is type(choice) for choice in choices
    ):
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, choices))})
    return value


def _writable_members(members: Iterable[Any], nested: Callable[[str], Any]) -> list[Any]:
    """Returns the members of a union that TOML can write: `float | Tensor` becomes `float`."""
    kept = []
    for member in members:
        with suppress(_NotInTOML):
            kept.append(_writable(member, nested))
    if all(member is types.NoneType for member in kept):
        raise _NotInTOML
    return kept


# ------------------------------------------------------------------------------------------ nested components
def _nested(kind: str, *, registry: Components, base: Path) -> Any:
    """Returns the type of an option that is a component of `kind`: a name, or a table with `use`."""
    table = {"type": "object", "properties": {"use": {"type": "string"}}, "required": ["use"]}
    schema: dict[str, Any] = {"anyOf": [{"type": "string", "examples": registry.names(kind)}, table], "x-toml": kind}
    if kind == FUNCTION:
        schema = {"type": "string", "examples": ["./my_code.py:function"], "x-toml": kind}

    def validate(value: object) -> Nested:
        if kind == FUNCTION:
            return _validate_function(value, registry, base)
        if isinstance(value, str):
            return _validate_nested(kind, {"use": value}, registry, base, ())
        if isinstance(value, dict) and isinstance(value.get("use"), str):
            return _validate_nested(kind, value, registry, base, ("use",))
        raise PydanticCustomError("component", 'Input should be a name, or a table with `use = "name"`')

    return Annotated[Any, PlainValidator(validate), WithJsonSchema(schema)]


def _validate_function(value: object, registry: Components, base: Path) -> Nested:
    if not isinstance(value, str):
        raise PydanticCustomError("component", 'Input should be the place of a function: "./file.py:name"')
    try:
        registry.function(value, base)
    except PluginError as error:
        details = PydanticCustomError("component", "{message}", {"message": error.message, "error": error})
        raise _located([{"type": details, "loc": (), "input": value}]) from error
    return Nested(kind=FUNCTION, use=value, options={}, base=base, plain=value)


def _validate_nested(
    kind: str, table: dict[str, Any], registry: Components, base: Path, place: tuple[str, ...]
) -> Nested:
    use = table["use"]
    try:
        model = registry.options_model(kind, use, base)
    except PluginError as error:
        details = PydanticCustomError("component", "{message}", {"message": error.message, "error": error})
        raise _located([{"type": details, "loc": place, "input": use}]) from error

    options = model.model_validate_json(json.dumps({key: table[key] for key in table if key != "use"}))
    plain = options.model_dump(mode="json", exclude_none=True, fallback=str)
    return Nested(kind=kind, use=use, options=dict(options), base=base, plain={"use": use, **plain} if plain else use)
