"""`ddpforge schema`: prints the JSON Schema for editors, or writes it to a file."""

import json
import re
from pathlib import Path

from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.components.registry import Registry


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
