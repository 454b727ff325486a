"""A component that is not of its kind is refused when it is built, by its name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_distributions import install

from ddpforge.components import scaffold
from ddpforge.components.kinds import KINDS, KindSpec
from ddpforge.components.registry import Registry, build
from ddpforge.errors import PluginError
from ddpforge.recipe.schema import Component, Recipe


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_no_component_of_any_kind(kind: str) -> None:
    assert KINDS[kind].mismatch(None)


@pytest.mark.parametrize(
    ("kind", "built"), [("schedule", lambda step: 1.0), ("data", [1, 2]), ("data", (number for number in (1, 2)))]
)
def test_data_and_schedules_need_no_base_class(kind: str, built: Any) -> None:
    assert KINDS[kind].mismatch(built) is None


def test_what_is_built_instead_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def net():\n    """A network."""\n    return {"a": 1}\n')
    with pytest.raises(PluginError, match=r"model `\./mine\.py:net` is a dict, and must be a torch\.nn\.Module"):
        build(Registry(), "model", Component(use="./mine.py:net", options={}, base=tmp_path))


# ---------------------------------------------------------------------------------------------- one table of kinds
AS_IT_WAS = """
model: [model]; data: [data.train] [data.eval]; sampler: [data.sampler]; task: [task]; metric: task.metrics
optimizer: [optimizer]; schedule: [schedule]; strategy: [strategy]; tracker: [track.NAME]; callback: [callbacks.NAME]
"""


def places(spec: KindSpec) -> str:
    """Where a recipe names a component of a kind, as AS_IT_WAS writes it."""
    tables = [f"[{'.'.join(path)}]" for path in spec.tables]
    named = [f"[{spec.named_in}.NAME]"] * bool(spec.named_in)
    return " ".join([*tables, *named, *([".".join(spec.listed_in)] if spec.listed_in else [])])


def test_where_a_recipe_names_each_kind() -> None:
    said = dict(one.strip().split(": ") for line in AS_IT_WAS.strip().splitlines() for one in line.split(";"))
    assert {kind: places(spec) for kind, spec in KINDS.items()} == said


def test_a_recipe_has_a_place_for_every_kind_that_has_a_table() -> None:
    for spec in KINDS.values():
        for table in [*(path[0] for path in spec.tables), *([spec.named_in] if spec.named_in else [])]:
            assert table in Recipe.model_fields


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_template(kind: str) -> None:
    assert (Path(scaffold.__file__).parent / "templates" / "plugin" / "kinds" / KINDS[kind].template).is_file()


TENTH = """
from types import MappingProxyType

from ddpforge.components import kinds

probe = kinds.KindSpec(
    name="probe",
    base="collections:Counter",
    given={"seed": lambda settings: settings.get("weights", {}).get("one", 7)},
    nested=True,
    named_in="callbacks",  # a table that recipes have; which kind is read last has it
    settings=lambda: {"weights": dict[str, int]},
    jobs={2: "data"},
)
kinds.KINDS = MappingProxyType({**kinds.KINDS, "probe": probe})

# From here on as if the table had said so from the start.
import json
from collections import Counter
from pathlib import Path

from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.components.registry import build
from ddpforge.components.options import options_model
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError, UsageError
from ddpforge.recipe.layers import kind_at
from ddpforge.recipe.json_schema import recipe_schema
from ddpforge.recipe.schema import Component
from ddpforge.testing.cases import find_cases

found = {}
registry = Registry.installed()
found["listed"] = [(entry.kind, entry.name) for entry in registry.entries("probe")]
found["kind at"] = kind_at(("callbacks", "mine"), {})
schema = recipe_schema(registry)
found["schema"] = [name for name in schema["$defs"] if name.startswith("probe")]
shown = CliRunner().invoke(main, ["plugins", "show", "tally"])
found["example"] = shown.output.splitlines()[-1]
found["help"] = "probe" in CliRunner().invoke(main, ["plugins", "new", "--help"]).output


def holder(it: Counter) -> None: ...


found["nested"] = options_model(holder, frozenset(), registry, Path()).model_validate({"it": "tally"}).it.kind
for name, options in {"given": {"seed": 1}, "wrong": {}}.items():
    use = "tally" if name == "given" else "fractions:Fraction"
    try:
        build(registry, "probe", Component(use=use, options=options))
    except PluginError as error:
        found[name] = error.message
(case,) = find_cases("tally.py")
found["case"] = case.kind, case.settings, case.given()
found["job"] = probe.jobs
print(json.dumps(found))
"""


def test_a_tenth_kind_is_one_entry_of_the_table(tmp_path: Path) -> None:
    """Lists, schema, command line, options and kit know of a kind as soon as the table does."""
    code = 'from collections import Counter\nclass Tally(Counter):\n    """Counts."""\n'
    install(
        tmp_path,
        "tallies",
        {"ddpforge.probe": {"tally": "tallies:Tally"}},
        modules={"tallies.py": code, "tally.py": code},
    )
    (tmp_path / "ddpforge_testing.toml").write_text("[probe.Tally]\nweights = { one = 3 }\n")
    done = subprocess.run(
        [sys.executable, "-c", TENTH],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "listed": [["probe", "tally"]],
        "kind at": "probe",
        "schema": ["probe", "probe.tally"],
        "example": "[callbacks.tally]",
        "help": True,
        "nested": "probe",
        "given": "`seed` is not an option of probe `tally`: ddpforge passes it",
        "wrong": "probe `fractions:Fraction` is a Fraction, and must be a collections.Counter",
        "case": ["probe", {"weights": {"one": 3}}, {"seed": 3}],
        "job": {"2": "data"},
    }
