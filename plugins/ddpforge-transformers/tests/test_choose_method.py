"""Tables of docs/guides/choose-method.md: made from docs/methods.json, which plans and probes of now agree with."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import features
import pytest
import torch
from tiny import TINY
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[3]
if not (ROOT / "docs/methods.py").exists():
    pytest.skip("the documentation is in the repository of ddpforge", allow_module_level=True)


@pytest.fixture(scope="module")
def methods() -> ModuleType:
    spec = importlib.util.spec_from_file_location("methods", ROOT / "docs/methods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/methods.json").read_text())
    return found


def test_the_page_has_the_tables_of_its_plans_and_probes(methods: ModuleType, known: dict[str, Any]) -> None:
    text = methods.PAGE.read_text()
    assert text == methods.written(text, known), "run: python docs/methods.py"
    assert text.count("<!-- generated: ") == 3


def test_every_cell_was_planned_with_the_present_recipe(methods: ModuleType, known: dict[str, Any]) -> None:
    assert methods.stale(known) == [], "run: python docs/methods.py --plan"
    assert known["plans"].keys() == {"/".join(map(str, one)) for one in methods.cells()}


def test_every_type_of_the_packing_tests_and_every_template_is_in_the_tables(known: dict[str, Any]) -> None:
    assert list(known["features"]) == list(features.KINDS)
    assert all(list(row) == list(features.PROBES) for row in known["features"].values())
    if features.templates() != ["None"]:  # without trl
        assert known["templates"] == features.templates()


@pytest.mark.parametrize("kind", ["llama", "opt", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_type_of_model_has_the_features_of_its_row(kind: str, known: dict[str, Any], tmp_path: Path) -> None:
    found = features.probed(kind, tmp_path)
    assert {name for name, said in found.items() if said == "yes"} == {
        name for name, said in known["features"][kind].items() if said == "yes"
    }, found


@pytest.mark.full
def test_all_types_of_models_have_the_features_of_their_rows(known: dict[str, Any], tmp_path: Path) -> None:
    wrong = {
        f"{kind}, {name}": said
        for kind, row in features.all_probed(tmp_path)
        for name, said in row.items()
        if (said == "yes") != (known["features"][kind][name] == "yes")
    }
    assert wrong == {}, "run: python docs/methods.py --probe"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LoRA", "QLoRA"])
def test_a_plan_without_saved_weights_is_that_of_saved_ones(
    methods: ModuleType, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`saved` of docs/methods.py has the tensors that `causal_lm` loads from a folder."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    size = {"model_type": "llama", **TINY["llama"], "hidden_size": 64, "tie_word_embeddings": True}
    size |= {"max_position_embeddings": 4096, "vocab_size": 4096}
    planned = methods.cell(method, size, 1, tmp_path)
    own = methods.recipe(method, 1).replace("./methods.py:saved", "causal_lm")
    monkeypatch.setattr(methods, "recipe", lambda *_: own)
    monkeypatch.setattr(methods, "_unread", nullcontext)
    weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**size), dtype=torch.bfloat16)
    write = Path.write_text

    def with_weights(path: Path, text: str, **options: Any) -> int:
        """Also writes the weights, when the config is written."""
        count = write(path, text, **options)
        if path.name == "config.json":
            weights.save_pretrained(path.parent)
        return count

    monkeypatch.setattr(Path, "write_text", with_weights)
    assert methods.cell(method, size, 1, tmp_path) == planned


@pytest.mark.slow
def test_a_small_cell_is_the_plan_of_now(methods: ModuleType, known: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = methods.cell("LoRA", methods.SIZES["0.6 B"], 1, tmp_path)
    assert found == {name: value for name, value in known["plans"]["LoRA/0.6 B/1"].items() if name != "hash"}
