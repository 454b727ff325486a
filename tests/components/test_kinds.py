"""Component kinds: the table of kinds, and the check that a component is an instance of its kind's base class."""

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
from ddpforge.errors import PluginError, SetupError
from ddpforge.recipe.schema import Component, Recipe


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_rejected_for_every_kind(kind: str) -> None:
    assert KINDS[kind].mismatch(None)


@pytest.mark.parametrize(
    ("kind", "built"), [("schedule", lambda step: 1.0), ("data", [1, 2]), ("data", (number for number in (1, 2)))]
)
def test_data_and_schedules_need_no_base_class(kind: str, built: Any) -> None:
    assert KINDS[kind].mismatch(built) is None


def test_error_names_the_component_and_its_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def net():\n    """A network."""\n    return {"a": 1}\n')
    with pytest.raises(PluginError, match=r"model `\./mine\.py:net` is a dict, and must be a torch\.nn\.Module"):
        build(Registry(), "model", Component(use="./mine.py:net", options={}, base=tmp_path))


# ---------------------------------------------------------------------------------------------- one table of kinds
PLACES = """
model: [model]; data: [data.train] [data.eval]; sampler: [data.sampler]; task: [task]; metric: task.metrics
optimizer: [optimizer]; schedule: [schedule]; strategy: [strategy]; device: train.device; tracker: [track.NAME]
callback: [callbacks.NAME]
"""


def places(spec: KindSpec) -> str:
    """Returns the places in a recipe that name a component of a kind, in the notation of PLACES."""
    tables = [f"[{'.'.join(path)}]" for path in spec.tables]
    named = [f"[{spec.named_in}.NAME]"] * bool(spec.named_in)
    listed = ".".join(spec.listed_in or ())
    return " ".join([*tables, *named, *filter(None, [listed, spec.key])])


def test_each_kind_has_its_places_in_a_recipe() -> None:
    said = dict(one.strip().split(": ") for line in PLACES.strip().splitlines() for one in line.split(";"))
    assert {kind: places(spec) for kind, spec in KINDS.items()} == said


def test_tables_of_every_kind_are_fields_of_a_recipe() -> None:
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

# From here on, the tenth kind is in the table as if it had always been there.
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


def test_a_new_kind_needs_only_an_entry_in_the_table(tmp_path: Path) -> None:
    """Lists, JSON schema, command line, options and test kit read the kinds from the table."""
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


def test_class_of_a_plugin_that_is_not_installed_names_the_plugin() -> None:
    spec = KindSpec(name="task", adopted={"pathlib:Path": "ddpforge_absent.trainer:adopted"})
    with pytest.raises(SetupError, match="this class needs ddpforge-absent, which is not installed") as caught:
        spec.adopt(Path)
    assert caught.value.hints == ("pip install ./plugins/ddpforge-absent, in the clone of ddpforge",)
