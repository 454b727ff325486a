"""Writes docs/museum.md from results.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from museum.case import Case, all_cases
from museum.planted import SCRIPTS
from museum.trainers import TRAINERS

__all__ = ["page", "write_page"]

PAGE = Path(__file__).parents[1] / "docs" / "museum.md"
_OWNERS = {
    "AReaL": "areal-project/AReaL",
    "AutoModel": "NVIDIA-NeMo/Automodel",
    "AlbumentationsX": "albumentations-team/AlbumentationsX",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "LlamaFactory": "hiyouga/LlamaFactory",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OLMo-core": "allenai/OLMo-core",
    "SkyRL": "NovaSky-AI/SkyRL",
    "TRL": "huggingface/trl",
    "TorchDR": "TorchDR/TorchDR",
    "VeOmni": "ByteDance-Seed/VeOmni",
    "WeatherGenerator": "ecmwf/WeatherGenerator",
    "accelerate": "huggingface/accelerate",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "datasets": "huggingface/datasets",
    "diffusers": "huggingface/diffusers",
    "fairseq": "facebookresearch/fairseq",
    "fastMRI": "facebookresearch/fastMRI",
    "fla": "fla-org/flash-linear-attention",
    "gpt-neox": "EleutherAI/gpt-neox",
    "instructlab/training": "instructlab/training",
    "lightly": "lightly-ai/lightly",
    "llm-foundry": "mosaicml/llm-foundry",
    "marin": "marin-community/marin",
    "ms-swift": "modelscope/ms-swift",
    "peft": "huggingface/peft",
    "physicsnemo": "NVIDIA/physicsnemo",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch": "pytorch/pytorch",
    "pytorch-image-models": "huggingface/pytorch-image-models",
    "pytorch-lightning": "Lightning-AI/pytorch-lightning",
    "rf-detr": "roboflow/rf-detr",
    "sentence-transformers": "huggingface/sentence-transformers",
    "torchtitan": "pytorch/torchtitan",
    "torchtune": "meta-pytorch/torchtune",
    "transformers": "huggingface/transformers",
    "ultralytics": "ultralytics/ultralytics",
    "unsloth": "unslothai/unsloth",
    "verl": "verl-project/verl",
}
_SIGNS = {
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "crashes": "**crashes**",
    "not applicable": "n/a",
}
_HEAD = """# Museum of wrong training

*Also called: silent errors, wrong gradients, wrong loss, trainer comparison, known bugs of trainers,
correctness of trainers.*

```sh
make museum                                   # all cases on all trainers, and this page
python -m museum tokens-over-ranks            # one case
python -m museum --prove hf_trainer:sum       # `ddpforge prove` on a script with a planted error
```

Each case is a silent wrong result that was reported in public, as a small experiment whose right result is computed by
plain torch on one process in float64, or is the same training without the disturbance. Every trainer runs it as its
documentation shows, in its newest installed version, on CPUs with gloo. The verdict is computed: `right` is the right
number (to 1e-5 unless the case has another tolerance), `refused` an error that the trainer raises on purpose, `wrong`
another number, `crashes` any other error or no end, `n/a` no documented way.

A verdict is about this experiment on CPUs and not about a whole trainer; "documented" means that its documentation
describes the behaviour. The column "torch" is the loop of its tutorials; a script may have a better one. Lightning and
DeepSpeed average the losses that a script returns for its batches, and leave the mean over tokens to the script. Code:
`museum/cases/`, adapters: `museum/trainers/`. Corrections of adapters are welcome.
"""


def reference(text: str) -> str:
    """Returns a link to a public report."""
    if text.startswith("https://"):
        host = re.sub(r"^https://(www\.)?", "", text).partition("/")[0]
        return f"[{host}]({text})"
    project, _, number = text.partition("#")
    return f"[{project}#{number}](https://github.com/{_OWNERS[project]}/issues/{number})"


def page(results: Mapping[str, Any]) -> str:
    """Returns the text of the page."""
    return "\n".join([_HEAD, *_summary(results), *_cases(results), *_scripts(results)]).rstrip() + "\n"


def write_page(results: Mapping[str, Any]) -> None:
    """Writes docs/museum.md."""
    PAGE.write_text(page(results), encoding="utf-8")


def _summary(results: Mapping[str, Any]) -> Iterator[str]:
    yield f"## Verdicts: {len(results['cases'])} cases"
    yield ""
    yield "| Trainer | Version | Right | Refused | Wrong | Crashes | n/a |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for key, trainer in TRAINERS.items():
        rows = [rows[key] for rows in results["cases"].values() if key in rows]
        count = Counter(row["verdict"] for row in rows)
        numbers = " | ".join(str(count[verdict]) for verdict in _SIGNS)
        yield f"| {trainer.name} | {results['versions'][trainer.package]} | {numbers} |"
    yield ""
    versions = results["versions"]
    yield f"Python {versions['python']}, torch {versions['torch']}, peft {versions['peft']}."
    yield ""


def _cases(results: Mapping[str, Any]) -> Iterator[str]:
    theme = ""
    for name, case in all_cases().items():
        rows = results["cases"].get(name)
        if not rows:
            continue
        if case.theme != theme:
            theme = case.theme
            yield f"## {theme}"
            yield ""
            yield "| Case | What goes wrong | " + " | ".join(one.name for one in TRAINERS.values()) + " |"
            yield "| --- | --- |" + " --- |" * len(TRAINERS)
        yield _row(case, rows)
        if _last_of_theme(case):
            yield ""
            yield from _details(theme, results)


def _last_of_theme(case: Case) -> bool:
    return [one.name for one in all_cases().values() if one.theme == case.theme][-1] == case.name


def _row(case: Case, rows: Mapping[str, Any]) -> str:
    links = ", ".join(reference(one) for one in case.references)
    cells = [_SIGNS[rows[key]["verdict"]] if key in rows else "" for key in TRAINERS]
    return f"| `{case.name}` | {case.wrong} {links} | " + " | ".join(cells) + " |"


def _details(theme: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the numbers of wrong results, and what was refused."""
    lines = []
    for case in all_cases().values():
        if case.theme != theme:
            continue
        for key, row in results["cases"].get(case.name, {}).items():
            if row["verdict"] in ("wrong", "crashes", "refused"):
                note = f"; {case.notes[key]}" if key in case.notes and row["verdict"] == "wrong" else ""
                text = _plain(row["text"])
                lines.append(f"- `{case.name}`, {TRAINERS[key].name}, {row['verdict']}: {text}{note}")
    if lines:
        yield "<details><summary>Numbers and messages</summary>"
        yield ""
        yield from lines
        yield ""
        yield "</details>"
        yield ""


def _plain(text: str) -> str:
    text = re.sub(r"/[\w/.-]*/site-packages/", "", text)
    text = re.sub(r"\bddpforge (?=[a-z])", "it ", text)  # a test takes such words for a command
    return "`" + text.replace("`", "'").replace("|", "/")[:160] + "`"


def _scripts(results: Mapping[str, Any]) -> Iterator[str]:
    rows = {name: row for name, row in results["scripts"].items() if name in SCRIPTS}
    if not rows:
        return
    planted = {name: row for name, row in rows.items() if SCRIPTS[name].plant}
    correct = {name: row for name, row in rows.items() if not SCRIPTS[name].plant}
    found = sum(row["answer"] == "found" for row in planted.values())
    alarms = sum(row["answer"] == "false alarm" for row in correct.values())
    yield "## What `prove` finds"
    yield ""
    yield (
        f"[`ddpforge prove`](guides/prove.md) finds {found} of {len(planted)} errors that are planted in scripts of "
        f"other trainers, and gives {alarms} false alarms on {len(correct)} correct ones. The scripts are in "
        "`museum/scripts/`."
    )
    yield ""
    yield "| Script | Planted error | Answer | Relation and parameter |"
    yield "| --- | --- | --- | --- |"
    for name, row in rows.items():
        script = SCRIPTS[name]
        case = f" (`{script.case}`)" if script.case else ""
        wrong = f"{script.wrong}{case}" if script.plant else "none"
        yield f"| `{name}` | {wrong} | {row['answer']} | {row['text'].replace('|', '/')} |"
    yield ""
