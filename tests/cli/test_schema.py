"""`ddpforge schema`: prints the JSON Schema for editors, or writes it to a file."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.components.registry import Registry


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddpforge"


def test_the_schema_is_built_once_for_the_installed_components(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def recipe_schema(registry: Registry) -> dict[str, int]:
        built.append(1)
        return {"number": len(built)}

    monkeypatch.setattr("ddpforge.recipe.json_schema.recipe_schema", recipe_schema)
    shown = [json.loads(CliRunner().invoke(main, ["schema"]).stdout) for _ in range(2)]
    assert shown == [{"number": 1}] * 2
    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", "ddpforge")  # other components
    assert json.loads(CliRunner().invoke(main, ["schema"]).stdout) == {"number": 2}
    for file in cache.iterdir():
        file.write_text("{")  # damaged
    assert json.loads(CliRunner().invoke(main, ["schema"]).stdout) == {"number": 3}


def test_the_schema_has_the_installed_components() -> None:
    schema = json.loads(CliRunner().invoke(main, ["schema"]).stdout)
    chain = schema["$defs"]["optimizer"]["allOf"]
    assert [link["if"]["properties"]["use"]["const"] for link in chain] == Registry.installed().names("optimizer")
    assert "weight_decay" in schema["$defs"]["optimizer.adamw"]["properties"]


def test_out_writes_the_schema_to_a_file(tmp_path: Path) -> None:
    target = tmp_path / "recipe.schema.json"
    result = CliRunner().invoke(main, ["schema", "--out", str(target)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(target.read_text(encoding="utf-8"))["title"] == "ddpforge recipe"


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["schema", "--out", str(tmp_path / "no" / "where.json")])
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_durations_have_a_pattern() -> None:
    schema = json.loads(CliRunner().invoke(main, ["schema"]).stdout)
    for duration in (
        schema["properties"]["train"]["properties"]["length"],
        schema["$defs"]["schedule.cosine"]["properties"]["warmup"],
    ):
        matches = [bool(re.search(duration["pattern"], text)) for text in ("5ep", "1.5ep", "10%", "${vars.x}")]
        assert matches == [True] * 4
        assert not re.search(duration["pattern"], "2 epochs")
