"""Checks of every component: it can be imported, has a docstring, and has strict, documented options."""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import ValidationError

from ddpforge.components.errors import RefusedOptions
from ddpforge.components.kinds import KINDS
from ddpforge.components.options_table import options_table
from ddpforge.errors import PluginError
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, blame
from ddpforge.testing.settings import SETTINGS
from ddpforge.testing.trial import settle

_STRANGE: Any = {"no such": {"option": [[]]}}  # a value that no option should accept


@check("importable")
def importable(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the registry can load the component."""
    try:
        case.component  # noqa: B018
        case.registry.options_model(case.kind, case.use, case.base)
    except PluginError as error:
        raise Breach("a component that can be imported", error.message, hints=error.hints) from error


@check("docstring")
def docstring(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the component has its own docstring."""
    component: Any = case.component
    component = component.func if isinstance(component, functools.partial) else component
    if not (component.__doc__ or "").strip():
        raise Breach("a docstring with its purpose: `ddpforge plugins show` prints it", "none of its own")


@check("options-documented")
def documented(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that every option has a description."""
    rows = options_table(case.registry.options_model(case.kind, case.use, case.base))
    if bare := [row.name for row in rows if not row.description]:
        raise Breach(
            "every option with a description",
            f"none of {_names(bare)}",
            hints=[f'{bare[0]}: Annotated[…, Field(description="…")], with pydantic\'s Field'],
        )


@check("options-reachable")
def reachable(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a recipe can set every option: no name is a key that ddpforge reads itself."""
    own = ("use", *KINDS[case.kind].framework_keys)
    rows = options_table(case.registry.options_model(case.kind, case.use, case.base))
    if taken := [row.name for row in rows if row.name in own]:
        raise Breach(
            f"no option named {_names(list(own))}: ddpforge itself reads these keys of [{case.kind}]",
            f"an option {_names(taken)}, which no recipe can set",
            hints=[f"give `{taken[0]}` another name"],
        )


@check("builds")
def builds(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the component can be built with the options for tests, and is of its kind."""
    try:
        built = case.build(**case.given())
    except Breach:
        raise
    except RefusedOptions as error:
        hint = f"its options for tests are below [{case.kind}.{case.name}] in {case.said or SETTINGS}"
        raise Breach("options that the component accepts", error.message, hints=[hint, *error.hints]) from error
    except Exception as error:
        raise blame(error, "the component to be built", case.component) from error
    if expected := KINDS[case.kind].mismatch(built):
        raise Breach(f"{expected}, as its kind is `{case.kind}`", f"a {type(built).__name__}")


@check("takes-a-batch", "model", "task", "metric")
def takes_a_batch(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the component works with the author's model, data and task, or with some of ddpforge's own."""
    settle(case)


@check("options-strict")
def strict(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the types of options are checked before the component is called."""
    model = case.registry.options_model(case.kind, case.use, case.base)
    options = case.options()
    if model.model_config.get("extra") != "allow" and _takes(model, {**options, "no_such_option_": 1}):
        raise Breach("an unknown option to be refused", "`no_such_option_` was accepted")
    typed = [row.name for row in options_table(model) if "table" not in row.type]
    loose = [name for name in typed if _takes(model, {**options, name: _STRANGE})]
    if loose:
        raise Breach(
            "options with checked types",
            f"{_names(loose)} accepted {json.dumps(_STRANGE)}",
            hints=["annotate each parameter with the type of its values in a recipe, such as `int` or `Literal[…]`"],
        )


def _takes(model: Any, options: dict[str, Any]) -> bool:
    try:
        model.model_validate_json(json.dumps(options))
    except ValidationError:
        return False
    return True


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
