"""Writes examples/notebook.ipynb: runs its cells in a kernel, and keeps their text and pictures.

`python docs/notebook.py`, from the root, in an environment with the extras `dev` and `plot`.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples/notebook.ipynb"

CELLS = [  # text, and code in lists of lines
    """# ddpforge in a notebook

A model and a dataset as you write them for PyTorch; a dict for the rest. This notebook trains, watches the curve while
it trains, resumes, compares two runs, evaluates, predicts, and looks at the mistakes. It takes half a minute on two
cores.

The same dict as a TOML file trains on many GPUs, with `ddpforge launch recipe.toml --nproc 8`. All functions:
[Python and notebooks](../docs/guides/python.md).""",
    [
        "import matplotlib.pyplot as plt",
        "import torch",
        "from torch import Tensor, nn",
        "",
        "import ddpforge",
        "from ddpforge.interfaces import Callback, StepInfo",
    ],
    "## A model, and a recipe for the rest",
    [
        "class Net(nn.Module):",
        "    def __init__(self, *, width: int = 16) -> None:",
        "        super().__init__()",
        "        self.layers = nn.Sequential(",
        "            nn.Conv2d(1, width, 3, padding=1),",
        "            nn.ReLU(),",
        "            nn.MaxPool2d(2),",
        "            nn.Flatten(),",
        "            nn.Linear(width * 16, 10),",
        "        )",
        "",
        "    def forward(self, images: Tensor) -> Tensor:",
        "        return self.layers(images)",
    ],
    [
        "recipe = {",
        '    "name": "notebook",',
        '    "data": {"train": {"use": "digits", "split": "train"}, "eval": {"use": "digits", "split": "test"}},',
        '    "task": {"use": "classification", "metrics": ["accuracy"]},',
        '    "optimizer": {"use": "adamw", "lr": 3e-3},',
        '    "schedule": {"use": "cosine", "warmup": "5%"},',
        '    "train": {"length": "4ep", "global_batch": 64, "eval_every": "1ep"},',
        '    "track": {"every": "20st"},',
        '    "checkpoint": {"keep": {"last": 1, "best": 1, "monitor": "eval/accuracy"}},',
        "}",
    ],
    """## Train, and watch

A callback receives every step. This one redraws a curve below the cell. A `TensorDataset`, or any other dataset of
yours, is given in the same way as the model: `train_data=…`, `eval_data=…`.""",
    [
        "class LiveCurve(Callback):",
        "    def __init__(self) -> None:",
        "        self.rows: list[tuple[int, float]] = []",
        "        self.shown = display(display_id=True)",
        "",
        "    def on_step(self, info: StepInfo) -> None:",
        '        if "train/loss" in info.metrics:  # at steps that log',
        '            self.rows.append((info.step, info.metrics["train/loss"]))',
        "            figure, axes = plt.subplots(figsize=(5, 2))",
        "            axes.plot(*zip(*self.rows, strict=True))",
        '            axes.set(xlabel="step", ylabel="train/loss", yscale="log")',
        "            self.shown.update(figure)",
        "            plt.close(figure)",
    ],
    [
        "torch.manual_seed(0)",
        "outcome = ddpforge.train(recipe, model=Net(), callbacks=[LiveCurve()])",
        "outcome",
    ],
    "## Resume\n\nThe run is a folder. The same call with a longer `train.length` continues from its last checkpoint.",
    [
        'longer = recipe | {"train.length": "8ep"}',
        "ddpforge.train(longer, model=Net(), callbacks=[LiveCurve()])",
    ],
    "## Compare",
    [
        "torch.manual_seed(0)",
        'ddpforge.train(longer | {"name": "wide"}, model=Net(width=64))',
    ],
    [
        "figure, axes = plt.subplots(figsize=(5, 2.5))",
        'for name in ("notebook", "wide"):',
        '    rows = [row for row in ddpforge.load(name).metrics() if "eval/accuracy" in row]',
        '    axes.plot([row["step"] for row in rows], [row["eval/accuracy"] for row in rows], label=name)',
        'axes.set(xlabel="step", ylabel="eval/accuracy")',
        "axes.legend()",
        "plt.show()",
    ],
    """## Evaluate, predict, look

`ddpforge.load` gives the trained model, bare and in evaluation mode, and the data of the run.""",
    [
        'wide = ddpforge.load("wide", model=Net(width=64), checkpoint="best")',
        'ddpforge.evaluate("wide", model=Net(width=64), checkpoint="best").metrics["eval/accuracy"]',
    ],
    [
        "images, labels = wide.batch(360)",
        "with torch.no_grad():",
        "    found = wide.model()(images).argmax(1)",
        "wrong = (found != labels).nonzero().flatten().tolist()",
        "figure, places = plt.subplots(1, 6, figsize=(7, 1.6))",
        "for place, sample in zip(places, wrong, strict=False):",
        '    place.imshow(images[sample, 0], cmap="gray_r")',
        '    place.set_title(f"{labels[sample]}, not {found[sample]}", fontsize=8)',
        "for place in places:",
        '    place.axis("off")',
        "plt.show()",
    ],
    [
        'ddpforge.predict("wide", "predictions.jsonl", model=Net(width=64)).samples',
    ],
    """## From here

- `ddpforge report runs/notebook runs/wide` makes one HTML page of both runs.
- To train on several GPUs, move the class to a file (`%%writefile net.py`), name it in the recipe,
  `"model": {"use": "./net.py:Net"}`, and call `ddpforge.launch(recipe, nproc=8)`.
- [Migrate](../docs/migrate.md) shows scripts of other trainers next to recipes.""",
]


def source(lines: list[str] | str) -> str:
    """Returns the text of a cell."""
    return lines if isinstance(lines, str) else "\n".join(lines)


def run(cells: list[list[str] | str], folder: Path) -> list[list[dict[str, Any]]]:
    """Runs the cells of code; returns the outputs of each cell as a notebook file has them. Raises RuntimeError."""
    manager, client = start_new_kernel(cwd=str(folder), env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        return [_outputs(client, source(cell)) if isinstance(cell, list) else [] for cell in cells]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _outputs(client: Any, code: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    reply = client.execute_interactive(code, output_hook=sent.append, timeout=300)["content"]
    if reply["status"] != "ok":
        raise RuntimeError("\n".join(reply["traceback"]))
    outputs: list[dict[str, Any]] = []
    displays: dict[str, dict[str, Any]] = {}
    for message in sent:
        kind, content = message["msg_type"], message["content"]
        place = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            displays[place]["data"] = content["data"]
        elif kind == "stream" and "TqdmWarning" not in content["text"]:  # of this kernel, which has no widgets
            if not outputs or outputs[-1].get("name") != content["name"]:
                outputs.append({"output_type": "stream", "name": content["name"], "text": ""})
            outputs[-1]["text"] += content["text"]
        elif kind in ("display_data", "execute_result"):
            number = {"execution_count": content["execution_count"]} if kind == "execute_result" else {}
            outputs.append({"output_type": kind, "data": content["data"], "metadata": {}, **number})
            displays[place] = outputs[-1]
    return outputs


def notebook(cells: list[list[str] | str], outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the contents of a notebook file, format 4.5."""
    found: list[dict[str, Any]] = []
    for number, (cell, shown) in enumerate(zip(cells, outputs, strict=True)):
        common = {"id": f"cell-{number}", "metadata": {}, "source": source(cell).splitlines(keepends=True)}
        if isinstance(cell, str):
            found.append({"cell_type": "markdown", **common})
        else:
            count = 1 + sum(one["cell_type"] == "code" for one in found)
            found.append({"cell_type": "code", **common, "execution_count": count, "outputs": shown})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = notebook(CELLS, run(CELLS, Path(folder)))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(NOTEBOOK)
