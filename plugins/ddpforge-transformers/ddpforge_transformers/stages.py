"""Segments of transformers' language models, for pipelines. They pass on activations, and a mask or positions."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["say_steps"]

_ROTARY = ("llama", "qwen2", "qwen3")
Passed = Tensor | tuple[Tensor, Tensor]


def say_steps(model: nn.Module) -> None:
    """Sets the attribute `pipeline` of a causal model of a known type; other types have no pipeline."""
    config: Any = model.config
    used: tuple[str, ...]
    ends: tuple[tuple[str, ...], tuple[str, ...]]
    if config.model_type in _ROTARY:
        enter, layer, leave = _enter, _layer, _leave
        layers, used = "model.layers", ("model.rotary_emb",)
        ends = ("model.embed_tokens",), ("model.norm", "lm_head")
    elif config.model_type == "gpt2" and not config.add_cross_attention:
        enter, layer, leave = _enter_gpt2, _layer_gpt2, _leave_gpt2
        layers, used = "transformer.h", ()
        ends = ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")
    else:
        return
    steps: list[tuple[str, ...]] = [("enter", *ends[0])]
    own: Any = model  # mypy: any attribute may be set on a module
    own.enter, own.leave = partial(enter, model), partial(leave, model)
    for number in range(config.num_hidden_layers):
        setattr(own, f"layer_{number}", partial(layer, model, number))
        steps.append((f"layer_{number}", f"{layers}.{number}", *used))
    own.pipeline = (*steps, ("leave", *ends[1]))


def _passed(x: Tensor, mask: Tensor | None, positions: Tensor | None) -> Passed:
    """Returns the input of the next segment: activations, and the padding mask (int64) or the positions (int32)."""
    if mask is not None and positions is not None:
        raise ValueError("a pipeline takes either attention_mask or position_ids")
    if positions is not None:
        return x, positions.int()
    return x if mask is None else (x, mask.long())


def _received(x: Tensor, given: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Returns the padding mask, if there is one, and the positions."""
    if given is not None and given.dtype == torch.int32:
        return None, given.long()
    return given, torch.arange(x.shape[1], device=x.device)[None]


# ---------------------------------------------------------------------------------------------- with rotary embeddings
def _enter(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
) -> Passed:
    return _passed(model.model.embed_tokens(input_ids), attention_mask, position_ids)


def _layer(model: Any, number: int, x: Tensor, given: Tensor | None = None) -> Passed:
    mask, places = _received(x, given)
    slides = model.config.model_type != "llama" and model.config.layer_types[number] == "sliding_attention"
    x = model.get_submodule(f"model.layers.{number}")(  # by name: the list of a stage has other indices
        x,
        attention_mask=_seen(model, x, mask, places, slides=slides),
        position_embeddings=model.model.rotary_emb(x, position_ids=places),
        position_ids=places,
        use_cache=False,
    )
    return x if given is None else (x, given)


def _leave(model: Any, x: Tensor, given: Tensor | None = None) -> CausalLMOutput:
    return CausalLMOutput(logits=model.lm_head(model.model.norm(x)))


# ---------------------------------------------------------------------------------------------- GPT-2
def _enter_gpt2(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
) -> Passed:
    base, x = model.transformer, model.transformer.wte(input_ids)
    _, places = _received(x, None if position_ids is None else position_ids.int())
    return _passed(base.drop(x + base.wpe(places)), attention_mask, position_ids)


def _layer_gpt2(model: Any, number: int, x: Tensor, given: Tensor | None = None) -> Passed:
    mask, places = _received(x, given)
    seen = _seen(model, x, mask, places, slides=False)
    block = model.get_submodule(f"transformer.h.{number}")
    x = block(x, None, seen, use_cache=False, position_ids=places)
    return x if given is None else (x, given)


def _leave_gpt2(model: Any, x: Tensor, given: Tensor | None = None) -> CausalLMOutput:
    return CausalLMOutput(logits=model.lm_head(model.transformer.ln_f(x)))


# ---------------------------------------------------------------------------------------------- inputs of all layers
def _seen(model: Any, x: Tensor, mask: Tensor | None, places: Tensor, *, slides: bool) -> Any:
    make = create_sliding_window_causal_mask if slides else create_causal_mask
    return make(config=model.config, inputs_embeds=x, attention_mask=mask, past_key_values=None, position_ids=places)
