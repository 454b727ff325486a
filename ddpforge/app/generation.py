"""Text generation with a trained language model, token by token."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.components.local_code import component_name
from ddpforge.data import mix
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import PluginError, UsageError, recipe_faults
from ddpforge.interfaces import AttentionContext, ExpertDispatch, Task

__all__ = ["Sampling", "answers", "check_language", "generate"]

log = logging.getLogger("ddpforge")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling tokens.

    Logits are divided by `temperature`. Then all tokens except the `top_k` most probable are excluded. Of these, the
    most probable tokens stay until their probabilities sum to `top_p` (nucleus sampling). `greedy` takes the most
    probable token instead of sampling. `tokens` is the number of tokens to generate.
    """

    tokens: int = 200
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, fits, wanted in (
            ("tokens", self.tokens, self.tokens >= 1, "1 or more"),
            ("temperature", self.temperature, self.temperature is None or self.temperature > 0, "more than 0"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "1 or more"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "more than 0, and 1 at most"),
        ):
            if not fits:
                greedy = ["to always take the most probable token, use greedy"] if name == "temperature" else []
                raise UsageError(f"{name} = {value}: it must be {wanted}", hints=greedy)
        given = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) is not None]
        if self.greedy and given:
            raise UsageError(f"greedy takes the most probable token; {given[0]} is only for sampling: omit one of them")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probability of each next token, float32 [V], from float32 logits [V]."""
        logits = logits / (1.0 if self.temperature is None else self.temperature)
        if self.top_k is not None and self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -torch.inf)
        found = logits.softmax(0)
        if self.top_p is not None:
            ordered, places = found.sort(descending=True)
            before = ordered.cumsum(0) - ordered  # the sum over all more probable tokens
            found = found.index_fill(0, places[before >= self.top_p], 0.0)
        return found


def check_language(task: Task, data: Any) -> None:
    """Raises UsageError if the task does not predict the next token, PluginError if the data has no tokenizer."""
    if not task.predicts_next_token:
        raise UsageError(
            f"{component_name(task)} does not predict the next token, so it cannot generate text",
            hints=["`ddpforge predict` writes its predictions for every sample"],
        )
    if not (hasattr(data, "encode") and hasattr(data, "decode")):
        raise PluginError(
            f"{component_name(data)} cannot convert text to tokens",
            hints=["give the dataset the methods `encode(text) -> list[int]` and `decode(tokens) -> str`"],
        )


@torch.no_grad()
def generate(model: nn.Module, data: Any, prompts: Sequence[str], how: Sampling) -> Iterator[str]:
    """Yields the text that the model, in evaluation mode, generates after each prompt: the same for the same seed.

    A model of the transformers library generates with its own `generate`, which stops at the end-of-text token. Any
    other model is called with the last `block_size` tokens. If its modules attend through a `AttentionContext`, their
    keys and values are cached and the model is called with new tokens only, until the text is longer than `block_size`.
    Apart from attention such a model must treat each position independently. Raises UsageError for an empty prompt.
    """
    encoded = [[int(token) for token in data.encode(prompt)] for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise UsageError(f"the prompt {prompt!r} has no tokens: the model needs a text to continue")
    draw = _by_itself if _is_of_transformers(model) else _drawn
    device = next(model.parameters()).device
    for number, tokens in enumerate(encoded):
        yield data.decode(draw(model, torch.tensor(tokens, device=device), how, mix(how.seed, number)))


@torch.no_grad()
def answers(
    model: nn.Module,
    data: Any,
    turns: Iterable[str],
    how: Sampling,
    *,
    system: str | None = None,
    images: Sequence[str] = (),
) -> Iterator[str]:
    """Yields the model's answer to each of the user's `turns` of one conversation; `system` is its system message.

    `data.encode_chat(messages)` renders the conversation, and an answer ends at a token of `data.end_tokens`. The same
    seed gives the same answers. `images` are files that belong to the first turn: `data.encode_image_chat(messages,
    images)` returns all inputs of the model by name, tensors of one sample. Raises UsageError if the data has no chat
    template, takes no images, or refuses the messages.
    """
    if not hasattr(data, "encode_chat"):
        raise UsageError(
            f"{component_name(data)} has no chat template, so --chat does not know the form of its prompts",
            hints=["omit --chat to continue a text", "or give the dataset `encode_chat(messages)` and `end_tokens`"],
        )
    if images and not (hasattr(data, "encode_image_chat") and _is_of_transformers(model)):
        raise UsageError(
            f"{component_name(data)} has no images in its chats",
            hints=["omit --image, or train a model of images and text, with chats that have images"],
        )
    device = next(model.parameters()).device
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        with recipe_faults():
            given = data.encode_image_chat(messages, images) if images else {"input_ids": data.encode_chat(messages)}
            more = {name: torch.as_tensor(one, device=device) for name, one in given.items()}
            tokens, ends, seed = more.pop("input_ids").flatten(), data.end_tokens, mix(how.seed, number)
        if _is_of_transformers(model):
            found = data.decode(_by_itself(model, tokens, how, seed, ends, more))
        else:
            found = data.decode(_drawn(model, tokens, how, seed, ends))
        messages.append({"role": "assistant", "content": found})
        yield found


def _is_of_transformers(model: nn.Module) -> bool:
    """True if the model has the `generate` of transformers. Other models may have a method of that name."""
    kinds = type(model).__mro__
    return any(kind.__name__ == "GenerationMixin" and kind.__module__.startswith("transformers.") for kind in kinds)


def _drawn(model: nn.Module, tokens: Tensor, how: Sampling, seed: int, ends: Sequence[int] = ()) -> list[int]:
    """Returns the tokens that follow `tokens`, sampled one by one on the CPU: RNGs of devices differ.

    The first one of `ends` is the last token.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = getattr(model, "block_size", None)
    if longest is not None and len(tokens) + how.tokens > longest:
        log.warning("the model uses only the last %d tokens at a time, of %d", longest, len(tokens) + how.tokens)
    found: list[int] = []
    cache = _Cache.of(model)
    for _ in range(how.tokens):
        if cache and (not cache.is_exact or (longest and len(tokens) > longest)):  # positions shift from here on
            cache = None
        outputs = cache(tokens) if cache else model(tokens[None, -longest:] if longest else tokens[None])
        logits: Tensor = getattr(outputs, "logits", outputs)[0, -1].float().cpu()
        probable = how.probabilities(logits)
        found.append(int(logits.argmax() if how.greedy else torch.multinomial(probable, 1, generator=generator)))
        if found[-1] in ends:
            break
        tokens = torch.cat([tokens, tokens.new_tensor(found[-1:])])
    return found


class _Cache(AttentionContext):
    """Cache of the keys and values of all positions so far, in place of the model's own `AttentionContext`.

    `is_exact` becomes False if the model attends without a causal mask: cached keys and values are then out of date.
    """

    def __init__(self, model: nn.Module, modules: Sequence[Any]) -> None:
        self.is_exact = True
        self._model, self._modules = model, modules
        self._past = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # in the order of attention calls in a forward pass
        self._attended = 0

    @classmethod
    def of(cls, model: nn.Module) -> _Cache | None:
        """Returns a cache for a model; None if it uses no context, or if experts choose among a sequence's tokens."""
        modules = [module for module in model.modules() if type(getattr(module, "context", None)) is AttentionContext]
        chooses = any(isinstance(getattr(module, "experts", None), ExpertDispatch) for module in model.modules())
        return cls(model, modules) if modules and not chooses else None

    def __call__(self, tokens: Tensor) -> Any:
        """Calls the model with the part of `tokens` [T] that is not in the cache."""
        own, self._attended = [module.context for module in self._modules], 0
        for module in self._modules:
            module.context = self
        try:
            outputs = self._model(tokens[None, self._past :])
        finally:
            for module, context in zip(self._modules, own, strict=True):
                module.context = context
        self._past = len(tokens)
        return outputs

    def length(self, tokens: int) -> int:
        """Returns the number of positions, including the cached ones."""
        return self._past + tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the indices of the new positions."""
        return torch.arange(self._past, self._past + tokens, device=device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
        """Computes attention from the new positions to all positions."""
        self.is_exact &= causal
        if self._past:
            before = self._kept[self._attended]
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        self._kept[self._attended : self._attended + 1] = [(k, v)]
        self._attended += 1
        return super().attention(q, k, v, causal=causal and not self._past, dropout=dropout)


def _by_itself(
    model: Any,
    tokens: Tensor,
    how: Sampling,
    seed: int,
    ends: Sequence[int] = (),
    more: Mapping[str, Tensor] | None = None,
) -> list[int]:
    """Returns the tokens that `generate` of transformers adds to the prompt; it also stops at one of `ends`.

    `more` are further inputs of the model, for the whole prompt.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and more and len(tokens) + how.tokens > longest:
        raise UsageError(
            f"the model takes {longest} tokens; the prompt has {len(tokens)} with those of its images, so that"
            f" {longest - len(tokens)} are left for an answer, but tokens = {how.tokens}"
        )
    if longest is not None and len(tokens) + how.tokens > longest:
        if how.tokens >= longest:
            raise UsageError(f"the model takes {longest} tokens; tokens = {how.tokens} leaves no room for the prompt")
        log.warning("of the %d tokens of a prompt the model uses the last %d", len(tokens), longest - how.tokens)
        tokens = tokens[-(longest - how.tokens) :]
    drawing: dict[str, Any] = {"do_sample": not how.greedy}
    if not how.greedy:
        drawing |= {"temperature": how.temperature or 1.0, "top_k": how.top_k or 0, "top_p": how.top_p or 1.0}
    if ends:
        own = model.generation_config.eos_token_id
        drawing["eos_token_id"] = [*ends, *(own if isinstance(own, list) else [] if own is None else [own])]
    with isolated_rng():
        torch.manual_seed(seed)
        ids = model.generate(
            input_ids=tokens[None],
            **{"attention_mask": torch.ones_like(tokens[None]), **(more or {})},
            max_new_tokens=how.tokens,
            **drawing,
        )
    begin = 1 if model.config.is_encoder_decoder else len(tokens)  # a decoder begins with one token of its own
    found: list[int] = ids[0, begin:].tolist()
    return found
