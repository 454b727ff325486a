"""Usual causes of relations that do not hold, by the factor of the gradients."""

from __future__ import annotations

import math

__all__ = ["meaning"]

_WITHOUT_FACTOR = {
    "split": "no common factor: each micro-batch has its own mean (tokens, weights), or samples are compared",
    "ranks": "no common factor: each rank has a mean of its own, or a part is not reduced over ranks",
    "doubled": "no common factor: the loss compares samples with each other",
    "workers": "the samples depend on the loader process: random numbers of numpy or random, or shared state",
    "order": "the loss depends on the place of a sample in its batch",
    "padding": "padding is counted: the mean is over all tokens, or the model does not use the attention mask",
    "resume": "the checkpoint lacks a part of the state: optimizer, schedule, scaler, place in the data",
    "evaluation": "an evaluation changes the training: buffers, random numbers, or state that both use",
    "clipping": "clipping changes gradients that are below its norm",
    "frozen": "weights that are not trained take part: in a norm, in a decay, in the order of parameter groups",
    "scale": "the update is not proportional to the loss: clipping by value, an overflow, or terms added to gradients",
    "checkpointing": "the recomputed forward pass differs: state or random numbers change between both",
    "compile": "compiled code computes something else: a branch on data or a state was traced once",
}
_WITH_FACTOR = {
    ("split", "times"): "the losses of micro-batches are added and not divided by their number",
    ("split", "divided"): "the loss is divided by the number of micro-batches twice",
    ("ranks", "times"): "gradients are added over ranks and not averaged",
    ("ranks", "divided"): "gradients are averaged over ranks, and the loss is divided by the samples of all ranks",
    ("doubled", "times"): "the loss is a sum over samples: the learning rate depends on the batch size",
}
_OF_QUANTITY = {
    "samples": "the resumed run trains on other samples: the place in the data is not restored",
    "mode": "the model computes in evaluation mode: `model.train()` is missing after the evaluation",
    "update": "the gradients are the same, and the updates are not: clipping, the learning rate, the optimizer's state",
    "loss": "the gradients are the same, and the loss is not: a constant, or a value that is only shown",
}


def meaning(name: str, factor: float | None, split: int, ranks: int, quantity: str = "gradient") -> str:
    """Returns the usual cause of a broken relation; `factor` is common to all parameters, or None."""
    if quantity in _OF_QUANTITY and (quantity in ("samples", "mode") or name in ("split", "ranks", "order", "doubled")):
        return _OF_QUANTITY[quantity]
    kind = name.partition(" ")[0]
    if factor is None:
        return _WITHOUT_FACTOR.get(kind, "")
    parts = {"split": split, "ranks": ranks, "doubled": 2}.get(kind, 0)
    near = {parts: "times", 1 / parts if parts else 0: "divided"}
    how = next((how for value, how in near.items() if value and math.isclose(factor, value, rel_tol=0.02)), "")
    text = _WITH_FACTOR.get((kind, how), f"all gradients are multiplied by {factor:.4g}")
    return text if how or kind in ("split", "ranks", "doubled") else f"{text}: {_WITHOUT_FACTOR.get(kind, '')}"
