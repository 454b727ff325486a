"""The notebook examples/notebook.ipynb: its cells run, and give the results that it shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.docs_modules import docs_module

ROOT = Path(__file__).parents[2]
RESULTS = {  # the text of the last result of a cell that begins with these words
    "torch.manual_seed(0)\noutcome =": r"Outcome\(runs/notebook: done at step 92, eval/loss .+, eval/accuracy .+\)",
    "longer = recipe": r"Outcome\(runs/notebook: done at step 184, .*\)",
    "torch.manual_seed(0)\nddpforge.train(longer": r"Outcome\(runs/wide: done at step 184, .*\)",
    "wide = ddpforge.load": r"0\.9\d+",
    "ddpforge.predict": "360",
}
PICTURES = {  # cells with a picture, and how many
    "torch.manual_seed(0)\noutcome =": 1,
    "longer = recipe": 1,
    "figure, axes": 1,
    "images, labels": 1,
}

Outputs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def maker() -> Any:
    return docs_module("notebook")


@pytest.fixture(scope="module")
def ran(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Returns the outputs of each cell of code, run now."""
    found = maker.run(maker.CELLS, tmp_path_factory.mktemp("notebook"))
    return {maker.source(cell): outputs for cell, outputs in zip(maker.CELLS, found, strict=True)}


@pytest.fixture(scope="module")
def kept() -> Outputs:
    """Returns the outputs that the file keeps."""
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    return {"".join(cell["source"]): cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def test_the_file_has_the_cells_of_the_command_that_writes_it(maker: Any) -> None:
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells] == [maker.source(cell) for cell in maker.CELLS]


@pytest.mark.parametrize("which", ["ran", "kept"])
def test_the_cells_give_their_results_and_pictures(which: str, request: pytest.FixtureRequest) -> None:
    outputs: Outputs = request.getfixturevalue(which)
    for begin, pattern in RESULTS.items():
        (mine,) = (shown for code, shown in outputs.items() if code.startswith(begin))
        results = [one["data"]["text/plain"] for one in mine if one["output_type"] == "execute_result"]
        assert re.fullmatch(pattern, results[-1]), (begin, results)
    pictures = {
        code: sum("image/png" in one.get("data", {}) for one in shown) for code, shown in outputs.items() if shown
    }
    assert {code: number for code, number in pictures.items() if number} == {
        code: number for code in outputs for begin, number in PICTURES.items() if code.startswith(begin)
    }


def test_progress_is_one_line_that_is_updated(ran: Outputs) -> None:
    (shown,) = (outputs for code, outputs in ran.items() if code.startswith("torch.manual_seed(0)\noutcome ="))
    lines = [one for one in shown if one["output_type"] == "display_data" and "image/png" not in one["data"]]
    assert len(lines) == 1
    assert re.search(r"step 92/92 \(100%\) loss", lines[0]["data"]["text/plain"])
    printed = "".join(one["text"] for one in shown if one["output_type"] == "stream")
    assert printed.count("eval step") == 4
    assert "step 92/92" not in printed
