"""Kinds of components: one table with the properties of each kind. All other modules read it.

A new kind needs an entry in `KINDS` and a template for `ddpforge plugins new`, `templates/plugin/kinds/NAME.txt`. If it
has its own table in recipes, `recipe.schema` needs this table, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, MappingProxyType
from typing import Any

from ddpforge.errors import SetupError

__all__ = ["FUNCTION", "KINDS", "KindSpec", "spec_of"]


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """Properties of one kind of components.

    A recipe names a component in one of four ways: in one of `tables`; in a table below `named_in` (its key is
    the default of `use`); in the array of components `listed_in`, which is an option of another component; or, without
    options, as the value of `key`.
    """

    name: str
    base: str = ""  # "module:Class": base class of components; with `fits`, only the type of options that take one
    noun: str = ""  # for messages; `name` if it is empty

    # -- recognition of kinds that have no base class
    fits: Callable[[Any], bool] | None = None  # True for a built component
    must_be: str = ""  # describes `fits` in messages
    resembles: Callable[[type], bool] = lambda _: False  # True for a class of components
    parameter: str = ""  # parameter that marks a function as a component of this kind

    # -- construction
    given: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Parameters that ddpforge passes itself and a recipe may not set. Each has a function that returns a value for
    tests of a component, given the settings of its author."""
    nested: bool = False  # an option annotated with `base` takes a component
    adopted: Mapping[str, str] = field(default_factory=dict)
    """Classes of other libraries, "module:Class", each with the function that turns its subclasses into components."""
    adopts_function: str = ""  # "module:function" that turns a plain function into a component, or returns it unchanged
    api: int = 1  # version of the plugin API that last changed the contract of this kind
    renamed: Mapping[str, str] = field(default_factory=dict)  # attributes of classes: name before plugin API 3 to name

    # -- its place in a recipe
    tables: tuple[tuple[str, ...], ...] = ()
    named_in: str = ""
    listed_in: tuple[str, str] | None = None
    key: str = ""
    framework_keys: tuple[str, ...] = ()  # keys in its table that ddpforge reads and does not pass to it

    # -- tests by the conformance kit
    settings: Callable[[], Mapping[str, Any]] = dict  # returns the types of further keys in ddpforge_testing.toml
    jobs: Mapping[int, str] = field(default_factory=dict)  # number of ranks to the job that they run, see `testing.job`

    @property
    def place(self) -> str:
        """Returns the dotted name of the recipe's table that contains components of this kind, or of the key."""
        return self.named_in or self.key or (self.listed_in[0] if self.listed_in else ".".join(self.tables[0]))

    @property
    def template(self) -> str:
        """Returns the name of the template file for `ddpforge plugins new`."""
        return f"{self.name}.txt"

    def base_class(self) -> type | None:
        """Imports and returns the class `base`; None if the kind has none."""
        found: type | None = _located(self.base) if self.base else None
        return found

    def mismatch(self, built: Any) -> str | None:
        """Returns None if `built` is a component of this kind, else a description of the expected type."""
        if self.fits:
            return None if self.fits(built) else self.must_be
        base = self.base_class()
        assert base is not None, f"no base class for {self.name}"
        return None if isinstance(built, base) else f"a {self.base.replace(':', '.')}"

    def adopt(self, component: Any) -> Any:
        """Turns a class of another library or a plain function into a component; returns other objects unchanged."""
        if self.adopts_function and isinstance(component, FunctionType):
            return _located(self.adopts_function)(component)
        for base, function in self.adopted.items():
            module, _, name = base.partition(":")
            if isinstance(component, type) and issubclass(component, getattr(sys.modules.get(module), name, ())):
                return _adoption(function)(component)
        return component

    def derives(self, component: type) -> bool:
        """True if the class derives from the base class of this kind."""
        return not self.fits and issubclass(component, self.base_class() or ())


def _located(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def _adoption(where: str) -> Any:
    """Returns the function `where`; raises SetupError if it is in a plugin that is not installed."""
    plugin = where.partition(".")[0]
    try:
        return _located(where)
    except ModuleNotFoundError as error:
        if error.name != plugin:
            raise
        name = plugin.replace("_", "-")
        hints = [f"pip install ./plugins/{name}, in the clone of ddpforge"]
        raise SetupError(f"this class needs {name}, which is not installed", hints=hints) from error


# ---------------------------------------------------------------------------------------------- recognising
def _has_samples(built: Any) -> bool:
    return hasattr(built, "__iter__") or (hasattr(built, "__len__") and hasattr(built, "__getitem__"))


def _offers_samples(component: type) -> bool:
    offers = hasattr(component, "__getitem__") or hasattr(component, "__iter__")
    return offers and not issubclass(component, dict | list | tuple)


# ---------------------------------------------------------------------------------------------- trying
def _parameters(settings: Mapping[str, Any]) -> Any:
    from torch import nn, zeros

    return [{"params": [nn.Parameter(zeros(2, 2))]}]


def _model(settings: Mapping[str, Any]) -> Any:
    from torch import nn

    return nn.Linear(2, 2)


def _horizon(settings: Mapping[str, Any]) -> Any:
    from ddpforge.interfaces.durations import Horizon

    return Horizon(**({"total": 100, "steps_per_epoch": 10} | settings.get("horizon", {})))


class _Samples:
    """Dataset of integers with columns for orders: those in the author's settings, or common ones."""

    random = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        usual = {"labels": [n % 7 % 3 for n in range(100)], "lengths": [n * 37 % 101 for n in range(100)]}
        columns = settings.get("columns") or usual | {"weights": usual["lengths"], "difficulty": usual["lengths"]}
        self.__dict__.update(columns)
        self._length = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def _columns() -> Mapping[str, Any]:
    from typing import Annotated

    from pydantic import Field

    return {
        "columns": Annotated[dict[str, Annotated[list[int | float | str], Field(min_length=1)]], Field(min_length=1)]
    }


def _ranks() -> Mapping[str, Any]:
    from typing import Annotated

    from pydantic import Field  # imported here, because lists of plugins do not need it

    return {"ranks": Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]}


# ---------------------------------------------------------------------------------------------- the table
KINDS: Mapping[str, KindSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            KindSpec(
                name="model",
                base="torch.nn:Module",
                nested=True,
                tables=(("model",),),
                settings=lambda: {"unused": list[str], "meta": bool},
                jobs={2: "train", 1: "train"},
            ),
            KindSpec(
                name="data",
                noun="dataset",
                base="ddpforge.interfaces:Data",
                fits=_has_samples,
                must_be="data with __len__ and __getitem__, or with __iter__",
                resembles=_offers_samples,
                given={"seed": lambda _: 0},
                nested=True,
                renamed={
                    "parts": "shard_sizes",
                    "jumps": "seekable",
                    "window": "shuffle_buffer",
                    "lanes": "interleave",
                },
                tables=(("data", "train"), ("data", "eval")),
                settings=lambda: {"duplicates": bool},
                jobs={2: "data"},
            ),
            KindSpec(
                name="sampler",
                base="ddpforge.interfaces:BatchSampler",
                given={
                    "data": _Samples,
                    "seed": lambda _: 0,
                    "global_batch": lambda _: 8,
                    "drop_last": lambda _: False,
                },
                nested=True,
                api=3,
                tables=(("data", "sampler"),),
                settings=_columns,
            ),
            KindSpec(
                name="task",
                base="ddpforge.interfaces:Task",
                adopted={"transformers.trainer:Trainer": "ddpforge_transformers.trainer:adopted"},
                adopts_function="ddpforge.builtin.tasks.loss_function:adopted",
                nested=True,
                api=3,
                renamed={
                    "turns": "updates",
                    "draws": "rng",
                    "beside": "auxiliary_modules",
                    "show": "log_media",
                    "scores_in_model": "loss_in_model",
                },
                tables=(("task",),),
            ),
            KindSpec(
                name="metric",
                base="ddpforge.interfaces:Metric",
                nested=True,
                adopted={"torchmetrics.metric:Metric": "ddpforge.builtin.metrics.torchmetrics:adopted"},
                listed_in=("task", "metrics"),
            ),
            KindSpec(
                name="optimizer",
                base="torch.optim:Optimizer",
                renamed={"explore": "perturb"},
                parameter="params",
                given={"params": _parameters, "model": _model},
                tables=(("optimizer",),),
                framework_keys=("no_decay", "layer_decay", "groups", "updates", "schedules"),
                settings=lambda: {"elementwise": bool, "matrices": bool},
            ),
            KindSpec(
                name="schedule",
                fits=callable,
                must_be="a function of the step",
                adopts_function="ddpforge.builtin.optim.schedules:adopted",
                parameter="horizon",
                given={"horizon": _horizon, "model": _model, "scheduled": lambda _: "lr"},
                tables=(("schedule",),),
                settings=lambda: {"horizon": dict[str, int]},
            ),
            KindSpec(
                name="strategy",
                base="ddpforge.interfaces:Strategy",
                nested=True,
                api=3,
                renamed={
                    "refusals": "unsupported",
                    "building": "init_context",
                    "evaluating": "for_evaluation",
                    "joins_alone": "needs_process_group",
                    "cuts_model": "splits_model",
                    "beside": "place_auxiliary",
                },
                tables=(("strategy",),),
                settings=_ranks,
            ),
            KindSpec(
                name="device",
                noun="kind of devices",
                base="ddpforge.interfaces:DeviceKind",
                key="train.device",
            ),
            KindSpec(
                name="tracker",
                base="ddpforge.interfaces:Tracker",
                nested=True,
                api=3,
                renamed={"show": "log_media"},
                named_in="track",
                settings=lambda: {"raises": bool},
            ),
            KindSpec(
                name="callback",
                base="ddpforge.interfaces:Callback",
                nested=True,
                api=3,
                named_in="callbacks",
                jobs={2: "callback"},
            ),
        )
    }
)
"""All kinds by name, in the order of a recipe."""

FUNCTION = "function"
"""Kind of an option that is a plain function, `Annotated[Callable[…], Field(…)]`; the component gets the function."""


def spec_of(kind: str) -> KindSpec:
    """Returns the properties of a kind of components, or of functions."""
    return KindSpec(name=FUNCTION, fits=callable) if kind == FUNCTION else KINDS[kind]
