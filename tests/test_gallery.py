"""Gallery of recipes and examples: complete, made from its sources, and not older than the files that were trained."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from support.docs_modules import docs_module

from ddpforge.recipe import bundled, load_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    return docs_module("gallery")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/gallery.json").read_text())
    return found


def test_every_bundled_recipe_and_example_is_in_the_gallery_or_has_a_reason(gallery: ModuleType) -> None:
    names = {*gallery.entries()}
    others = {f"recipes.{name}" for name in gallery.words()["others"]}
    assert names & others == set()
    examples = {f"examples.{path.name}" for path in (ROOT / "examples").iterdir() if path.is_dir()}
    examples -= {
        "examples.scripts",
        "examples.nano",
    }  # scripts, and several runs in a row
    assert names | others == {f"recipes.{name}" for name in bundled()} | examples


def test_the_curves_of_the_gallery_are_of_the_present_recipes_and_examples(gallery: ModuleType) -> None:
    assert gallery.stale() == [], "run: python docs/gallery.py --train NAME"


def test_page_readmes_and_pictures_are_made_from_the_gallery_s_sources(
    gallery: ModuleType, measured: dict[str, Any]
) -> None:
    files = gallery.files(measured)
    old = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text() != text]
    assert old == [], "run: python docs/gallery.py"
    assert {*(ROOT / "docs/assets/gallery").iterdir()} <= {*files}
    assert {*(ROOT / "examples").glob("*/README.md")} <= {*files, ROOT / "examples/scripts/README.md"}


def test_a_change_of_a_recipe_makes_its_entry_stale_and_a_comment_does_not(
    gallery: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = gallery.entries()["recipes.digits"]
    (tmp_path / "recipes").mkdir()
    (copy := tmp_path / "recipes/digits.toml").write_text(text := (ROOT / "recipes/digits.toml").read_text())
    now = gallery.digest("recipes.digits", entry)
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    copy.write_text(f"# another comment\n{text}")
    assert gallery.digest("recipes.digits", entry) == now
    copy.write_text(text.replace('"15ep"', '"16ep"'))
    assert gallery.digest("recipes.digits", entry) != now


def test_the_values_to_change_are_accepted_by_their_recipes(gallery: ModuleType) -> None:
    for name, entry in gallery.entries().items():
        assert len(entry["change"]) in (2, 3), name
        for value, _ in entry["change"]:
            if "recipe" in entry:
                load_recipe(str(ROOT / entry["recipe"]), sets=[value])


def test_curves_are_short_and_pictures_have_their_contents_in_words(
    gallery: ModuleType, measured: dict[str, Any]
) -> None:
    for name, entry in gallery.entries().items():
        found = measured[name]
        assert 0 < found["cpu_seconds"] < 180, name
        for lines in found["curves"].values():
            assert all(1 <= len(line) <= gallery.POINTS for line in lines), name
        root = ElementTree.fromstring(gallery.drawn(entry, found))
        assert root.get("aria-label") == gallery.described(entry, found)
        assert root[0].text == root.get("aria-label")
