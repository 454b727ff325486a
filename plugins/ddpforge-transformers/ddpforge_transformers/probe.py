"""Probes of a built model: whether a token sees later ones, and whether packed documents see each other.

A probe is one forward pass of the model with a few random tokens, in evaluation mode, compared with other passes. A
model without values (on the meta device, or sharded while it is built) is represented by a copy with few layers and
random weights.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ddpforge_transformers.token_mixers import separate_documents

__all__ = ["check_causal", "packing_fault"]

log = logging.getLogger("ddpforge")

_LENGTHS = ((7, 11, 5), (4, 9, 10))  # documents of two rows
_LAYERS = 4  # of a copy
_TOLERANCES = {torch.float32: 2e-5, torch.float64: 2e-5}  # of the largest logit; other dtypes: 3e-2
_LATER = 3  # tokens that change
_found: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def check_causal(model: nn.Module) -> None:
    """Raises ValueError if the logits of a token depend on later tokens, as those of an encoder do."""
    fault = _once(model, "causal", _causal_fault)
    if fault:
        raise ValueError(fault)


def packing_fault(model: nn.Module) -> str:
    """Returns the difference of packed documents' logits from those of each alone; empty without one."""
    return _once(model, "packing", _packing_fault)


def _once(model: nn.Module, name: str, probe: Any) -> str:
    known = _found.setdefault(model, {})
    if name not in known:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            chosen = model if _has_values(model) else _small_copy(model)
            known[name] = "" if chosen is None else _in_evaluation(chosen, probe)
    return known[name]


def _in_evaluation(model: nn.Module, probe: Any) -> str:
    try:
        with _evaluating(model):
            fault: str = probe(model)
    except (RuntimeError, IndexError) as error:  # e.g. a kernel that this device lacks, or fewer positions
        log.warning("the model could not be probed: %s", str(error).partition("\n")[0])
        return ""
    return fault


def _causal_fault(model: Any) -> str:
    tokens = _tokens(model, (1, sum(_LENGTHS[0])))
    changed = tokens.clone()
    changed[:, -_LATER:] = (changed[:, -_LATER:] + 1) % _vocabulary(model)
    one, other = (_logits(model, input_ids=each)[:, :-_LATER] for each in (tokens, changed))
    if _differ(one, other):
        return (
            f"the model sees later tokens: if the last {_LATER} of {tokens.shape[1]} tokens change, logits before them"
            f" change by up to {_apart(one, other):.1e}. {model.config.model_type} is an encoder, or its config is not"
            ' that of a decoder (is_decoder); for masked tokens use model.use = "masked_lm"'
        )
    return ""


def _packing_fault(model: Any) -> str:
    tokens = _tokens(model, (len(_LENGTHS), sum(_LENGTHS[0])))
    places = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in _LENGTHS]).to(tokens.device)
    try:
        packed = _logits(model, input_ids=tokens, position_ids=places)
    except TypeError as error:
        return f"its forward pass takes no position_ids ({error})"
    for row, sizes in enumerate(_LENGTHS):
        start = 0
        for number, size in enumerate(sizes):
            part = slice(start, start + size)
            mine, alone = packed[row, part], _logits(model, input_ids=tokens[row : row + 1, part])[0]
            if _differ(mine, alone):
                return (
                    f"document {number + 1} of a block has logits that differ by up to {_apart(mine, alone):.1e} from"
                    f" those of the document alone, of up to {float(alone.abs().max()):.1e}"
                )
            start += size
    return ""


# ---------------------------------------------------------------------------------------------- shared parts
def _logits(model: Any, **inputs: Tensor) -> Tensor:
    found: Tensor = model(**inputs, use_cache=False).logits
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    largest = float(other.abs().max())
    return not _apart(one, other) <= _TOLERANCES.get(one.dtype, 3e-2) * max(largest, 1e-6)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def _tokens(model: Any, shape: tuple[int, int]) -> Tensor:
    device = next(model.parameters()).device
    return torch.randint(0, _vocabulary(model), shape, generator=torch.Generator().manual_seed(1)).to(device)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def _has_values(model: nn.Module) -> bool:
    return all(one.numel() and not one.is_meta for one in model.parameters())


def _small_copy(model: Any) -> nn.Module | None:
    """Returns a model of the same class with few layers and random weights; None if it cannot be built."""
    whole = copy.deepcopy(model.config)
    config = whole.get_text_config()
    config.num_hidden_layers = min(_LAYERS, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    try:
        with torch.device("cpu"):
            built: nn.Module = type(model)(whole)
        separate_documents(built)
    except Exception as error:  # models raise their own classes, without a common base
        log.warning("the model could not be probed, because a small copy of it cannot be built: %s", error)
        return None
    return built


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(one, one.training) for one in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
