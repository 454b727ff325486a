"""Scripts with a planted error, and the same scripts without it, for `ddpforge prove`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SCRIPTS", "Script", "prove_script"]

FOLDER = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Script:
    """A script of museum/scripts with one of its errors, or with none.

    Attributes:
        file: name of the file; `--plant NAME` switches on an error.
        plant: name of the error; empty: the script is correct.
        wrong: what the error is.
        case: case of the museum with the same error, if there is one.
        relations: relations that should find it.
        prove_arguments: arguments of `ddpforge prove` before "--".
        arguments: arguments of the script.
    """

    file: str
    plant: str = ""
    wrong: str = ""
    case: str = ""
    relations: Sequence[str] = ()
    prove_arguments: Sequence[str] = ()
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The file with the error, or with "correct" and arguments."""
        return f"{Path(self.file).stem}:{self.plant or ' '.join(['correct', *self.arguments])}"

    def command(self) -> list[str]:
        """Returns the command after `ddpforge`."""
        plant = ["--plant", self.plant] if self.plant else []
        words = [*self.arguments, *plant]
        return ["prove", f"museum/scripts/{self.file}", *self.prove_arguments, *(["--", *words] if words else [])]


_OWN = ("--batch", "--bs {}", "--accumulate", "--ga {}", "--samples", "8", "--steps", "2")
_LOOP = (*_OWN, "--ranks", "1")
_RANKS = (*_OWN, "--torchrun")
_FILES: dict[str, Sequence[str]] = {
    "loop.py": _LOOP,
    "tokens.py": _LOOP,
    "ranks.py": _RANKS,
    "accelerate_loop.py": ("--steps", "2"),
    "hf_trainer.py": ("--steps", "2", "--ranks", "1"),
    # Lightning begins the epoch again after a checkpoint in its middle: `resume` is broken in every script.
    "lightning_module.py": ("--steps", "2", "--ranks", "1", "--skip", "resume"),
    "trl_sft.py": ("--steps", "2", "--ranks", "1"),
}
# File, error, what it is, the museum's case, and the relations that should find it.
_PLANTED: tuple[tuple[str, str, str, str, str], ...] = (
    ("loop.py", "not-divided", "losses of micro-batches are added", "accumulation-equal", "split"),
    ("loop.py", "divided-twice", "the loss is divided by the accumulation twice", "accumulation-equal", "split"),
    ("loop.py", "sum", "a sum over samples", "", "doubled"),
    ("loop.py", "class-weights", "class weights are averaged per micro-batch", "class-weights", "split"),
    ("loop.py", "sample-weights", "sample weights are averaged per micro-batch", "class-weights", "split"),
    ("loop.py", "hardest-half", "samples are selected within a micro-batch", "", "split"),
    ("loop.py", "advantage-of-batch", "advantages are centred within a micro-batch", "", "split"),
    ("loop.py", "running-baseline", "a running mean moves in each forward pass", "evaluation-moves-batchnorm", "split"),
    ("loop.py", "last-sample-left-out", "the last sample of a batch is left out", "", "order"),
    ("loop.py", "first-sample-twice", "the first sample of a batch counts twice", "", "order"),
    ("loop.py", "first-weight-for-all", "all gradients have the weight of the first sample", "", "order"),
    ("loop.py", "noise-by-place", "augmentation by the place in the batch", "", "order"),
    ("loop.py", "centred-in-batch", "activations are centred within a batch", "", "split"),
    ("loop.py", "in-batch-negatives", "contrastive negatives of a micro-batch only", "", "split"),
    (
        "loop.py",
        "balance-loss-not-divided",
        "an auxiliary loss is not divided",
        "router-loss-with-accumulation",
        "split",
    ),
    ("loop.py", "geometric-mean", "a geometric mean within a micro-batch", "", "split"),
    ("loop.py", "root-of-mean", "the root of a mean within a micro-batch", "", "split"),
    ("loop.py", "gradient-of-last-micro-batch", "only the last micro-batch's gradient is kept", "", "split"),
    ("loop.py", "clip-in-micro-batch", "clipping in each micro-batch", "clip-with-accumulation", "split, clipping"),
    ("loop.py", "layer-scaled", "one layer's gradient is divided by the accumulation", "", "split"),
    (
        "loop.py",
        "schedule-per-micro-batch",
        "the schedule moves per micro-batch",
        "schedule-with-accumulation",
        "split",
    ),
    ("loop.py", "counter-in-dataset", "a counter in the dataset, of each process", "", "workers"),
    ("tokens.py", "mean-of-means", "the mean over tokens of a micro-batch", "tokens-over-micro-batches", "split"),
    ("tokens.py", "padding-is-learnt", "padding is learnt", "end-token-is-padding", "split, padding"),
    ("tokens.py", "padding-is-counted", "padding is in the divisor", "", "split, padding"),
    ("tokens.py", "padding-is-seen", "attention sees padding and later tokens", "chats-with-checkpointing", "padding"),
    ("tokens.py", "divided-by-longest", "the divisor is the longest text of the micro-batch", "", "split, padding"),
    ("tokens.py", "micro-batch-count", "the divisor is the micro-batch's count", "chats-with-accumulation", "split"),
    ("tokens.py", "selected-in-micro-batch", "tokens are selected within a micro-batch", "", "split"),
    (
        "tokens.py",
        "next-text",
        "the last token of a text learns the first of the next",
        "chats-packed",
        "order, packed",
    ),
    ("tokens.py", "state-runs-on", "recurrent state runs on over texts", "chats-packed-in-a-hybrid", "split, order"),
    ("tokens.py", "positions-from-the-left", "padding on the left moves positions", "", "split, padding"),
    ("ranks.py", "not-reduced", "gradients are not reduced over ranks", "", "ranks"),
    ("ranks.py", "added", "gradients are added over ranks", "", "ranks"),
    ("ranks.py", "one-layer-not-reduced", "the gradient of one layer is not reduced", "", "ranks"),
    ("ranks.py", "copy-reduced", "the reduction acts on a copy", "transposed-parameter", "ranks"),
    ("ranks.py", "clipped-before", "each rank clips before the reduction", "clip-with-accumulation", "ranks"),
    ("ranks.py", "multiplied-by-ranks", "the loss is multiplied by the ranks", "", "ranks"),
    ("ranks.py", "weights-of-rank", "the weighted mean of a rank", "tokens-over-ranks", "ranks"),
    ("ranks.py", "term-gathered-twice", "one term of the loss is summed over ranks", "", "ranks"),
    ("ranks.py", "bare-model", "the forward pass leaves out DDP", "", "ranks"),
    ("accelerate_loop.py", "sum", "a sum over samples", "", "doubled"),
    (
        "accelerate_loop.py",
        "divided-again",
        "the loss is divided by the accumulation again",
        "accumulation-equal",
        "split",
    ),
    (
        "accelerate_loop.py",
        "weights-of-batch",
        "the weighted mean of a micro-batch",
        "tokens-over-both",
        "split, ranks",
    ),
    ("accelerate_loop.py", "multiplied-by-ranks", "the loss is multiplied by the processes", "", "ranks"),
    ("accelerate_loop.py", "place", "the weight of a sample is its place in the batch", "", "order"),
    ("accelerate_loop.py", "bare-model", "the forward pass leaves out the prepared model", "", "ranks"),
    ("hf_trainer.py", "sum", "a sum over samples", "", "doubled"),
    ("hf_trainer.py", "forward-with-options", "Trainer takes the model for one that divides itself", "", "split"),
    ("hf_trainer.py", "weights-of-batch", "the weighted mean of a micro-batch", "class-weights", "split"),
    ("hf_trainer.py", "hardest-half", "samples are selected within a micro-batch", "", "split"),
    ("hf_trainer.py", "pairs-in-batch", "pairs of a micro-batch are compared", "", "split"),
    ("hf_trainer.py", "counter-in-dataset", "a counter in the dataset, of each process", "", "workers"),
    ("lightning_module.py", "sum", "a sum over samples", "", "doubled"),
    ("lightning_module.py", "place", "the weight of a sample is its place in the batch", "", "order"),
    (
        "lightning_module.py",
        "multiplied-by-number",
        "the loss has the number of the micro-batch as a factor",
        "",
        "split",
    ),
    ("lightning_module.py", "clip-in-micro-batch", "clipping in each micro-batch", "clip-with-accumulation", "split"),
    ("lightning_module.py", "counter-in-dataset", "a counter in the dataset, of each process", "", "workers"),
    ("trl_sft.py", "sum", "a sum over tokens", "", "doubled"),
    ("trl_sft.py", "mean-of-micro-batch", "the mean over tokens of a micro-batch", "chats-with-accumulation", "split"),
    ("trl_sft.py", "not-divided", "the loss is multiplied by the accumulation", "accumulation-equal", "split"),
)
_CORRECT: tuple[tuple[str, str], ...] = (
    ("loop.py", ""),
    ("loop.py", "--optimizer sgd"),
    ("loop.py", "--norm"),
    ("loop.py", "--dropout 0.3"),
    ("loop.py", "--clip 0.1"),
    ("loop.py", "--bf16"),
    ("loop.py", "--schedule"),
    ("tokens.py", ""),
    ("tokens.py", "--optimizer sgd"),
    ("tokens.py", "--layers 2"),
    ("ranks.py", ""),
    ("ranks.py", "--own"),
    ("ranks.py", "--clip 0.1"),
    ("accelerate_loop.py", ""),
    ("accelerate_loop.py", "--clip 0.1"),
    ("hf_trainer.py", ""),
    ("hf_trainer.py", "--clip 0.1"),
    ("lightning_module.py", ""),
    ("lightning_module.py", "--optimizer sgd"),
    ("lightning_module.py", "--clip 0.1"),
    ("trl_sft.py", ""),
)

SCRIPTS: dict[str, Script] = {
    one.name: one
    for one in (
        *(
            Script(file, plant, wrong, case, tuple(relations.split(", ")), _FILES[file])
            for file, plant, wrong, case, relations in _PLANTED
        ),
        *(Script(file, prove_arguments=_FILES[file], arguments=options.split()) for file, options in _CORRECT),
    )
}
"""All scripts by name: those with an error, then the correct ones."""


def prove_script(script: Script) -> dict[str, Any]:
    """Returns the answer of `ddpforge prove`: found, not found, or for a correct script holds or a false alarm."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ddpforge", "prove", "--json", *script.command()[1:]]
    command[5:] = [word.replace("museum/scripts/", f"{FOLDER}/") for word in command[5:]]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="museum-") as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=900
            )
        except subprocess.TimeoutExpired:
            return {"answer": "failed", "text": "no end within 900 s", "relations": {}, "seconds": 900}
    seconds = round(time.monotonic() - began)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = [line for line in done.stderr.splitlines() if line.strip()][:2]
        return {"answer": "failed", "text": " ".join(last)[:200], "relations": {}, "seconds": seconds}
    if "relations" not in found:
        return {"answer": "failed", "text": str(found)[:200], "relations": {}, "seconds": seconds}
    relations = {one["name"]: one["result"] for one in found["relations"]}
    broken = [one for one in found["relations"] if one["result"] == "broken"]
    text = ""
    if broken:
        first = broken[0]["broken"]
        factor = f" × {first['factor']:.4g}" if first["factor"] is not None else ""
        text = f"{', '.join(one['name'] for one in broken)}: `{first['parameter']}`{factor}, step {first['step']}"
    if script.plant:
        answer = "found" if broken else "not found"
    else:
        answer = "false alarm" if broken else "holds"
    return {"answer": answer, "text": text, "relations": relations, "seconds": seconds}
