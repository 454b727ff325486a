"""Samples completions of prompts in process, all in one batch with a cache of keys and values."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from ddpforge.errors import StrategyError
from ddpforge.interfaces import mix
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Completion", "Policy", "SamplingSettings", "sample"]


class Completion(NamedTuple):
    """Tokens that a policy sampled, with the end token if there is one, and the log-probability of each."""

    tokens: list[int]
    logps: list[float]


@dataclass(frozen=True)
class SamplingSettings:
    """Logits are divided by `temperature`; of the `top_k` likeliest tokens, those within `top_p` may be drawn.

    A completion ends with the first of `ends`, or has `max_tokens` tokens. Log-probabilities are those after
    `temperature`, but before `top_k` and `top_p`: these only choose tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    ends: tuple[int, ...] = ()


class Policy:
    """Model that samples: the trained one itself, or a copy with whole weights if a strategy shards them.

    Sampling needs as many forward passes as the longest completion has tokens, which differs between ranks. Forward
    passes of a sharded model are collective, so a sharded model is copied once per update. The copy is needed on each
    rank; its form is kept without memory (`prepare`).
    """

    def __init__(self) -> None:
        self._form: Callable[[], nn.Module] | None = None  # a function: its module is none of the task's weights
        self._copy: nn.Module | None = None

    @property
    def form(self) -> nn.Module:
        """Model as it was built, without memory for its weights."""
        assert self._form is not None, "prepare was not called"
        return self._form()

    def prepare(self, model: nn.Module) -> None:
        """Keeps the form of a model before a strategy changes it."""
        form = copy.deepcopy(model).to("meta").requires_grad_(False)
        self._form = lambda: form

    @torch.no_grad()
    def of(self, model: nn.Module) -> nn.Module:
        """Returns a module with the current weights of `model`; collective if they are sharded.

        Raises StrategyError for a strategy that has no whole weights.
        """
        if not any(isinstance(one, DTensor) for one in model.parameters()):
            if any(not one.numel() for one in model.parameters()):
                raise StrategyError(
                    "generation needs whole weights, but this strategy keeps only parts of them on each rank",
                    hints=['set strategy.use = "ddp" or "fsdp"; deepspeed works up to stage 2'],
                    key="strategy.use",
                )
            return model
        if self._copy is None:
            device = next(model.parameters()).device
            self._copy = copy.deepcopy(self.form).to_empty(device=device).requires_grad_(False).eval()
        for mine, theirs in zip(self._copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
        for buffer, other in zip(self._copy.buffers(), model.buffers(), strict=True):
            buffer.copy_(other)
        return self._copy


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def sample(
    model: Any, prompts: Tensor, mask: Tensor, seeds: Sequence[int], each: int, how: SamplingSettings, pad: int
) -> list[list[Completion]]:
    """Returns `each` completions of every prompt.

    A completion depends on its prompt's seed and its number, and on the weights; not on other prompts of the batch. Its
    random numbers come from a generator of its own: one number per token, which chooses the token by the cumulative
    probabilities in float64. Another batch may round a probability differently (by 1e-7); this changes a token only if
    its number is that close to the limit.

    Args:
        prompts: Tokens [B, T], padded on the left; `mask` is 0 for padding.
        seeds: One per prompt.
        pad: Token for rows that have ended.
    """
    # Eager: the cache grows with each token, and train.compile would compile each length.
    device = prompts.device
    draws = torch.stack([_numbers(mix(seed, number), how.max_tokens) for seed in seeds for number in range(each)]).to(
        device
    )
    tokens, mask = prompts.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = torch.tensor(how.ends, dtype=torch.int64, device=device)
    alive = torch.ones(len(tokens), dtype=torch.bool, device=device)
    cache, found, logps, counts = None, [], [], torch.zeros(len(tokens), dtype=torch.int64, device=device)
    for step in range(how.max_tokens):
        outputs = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = outputs.past_key_values
        logits = outputs.logits[:, -1].float() / how.temperature
        chosen = _choose(logits, draws[:, step], how)
        logps.append(logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1))
        found.append(torch.where(alive, chosen, pad))
        counts += alive
        alive = alive & ~torch.isin(chosen, ends)
        if not alive.any():
            break
        tokens, positions = found[-1][:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    rows = zip(torch.stack(found, 1).tolist(), torch.stack(logps, 1).tolist(), counts.tolist(), strict=True)
    every = [Completion(ids[:count], values[:count]) for ids, values, count in rows]
    return [every[start : start + each] for start in range(0, len(every), each)]


def _numbers(seed: int, count: int) -> Tensor:
    """Returns `count` uniform random numbers in [0, 1), float64."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _choose(logits: Tensor, draws: Tensor, how: SamplingSettings) -> Tensor:
    """Returns a token [N] for logits [N, V] and numbers [N] in [0, 1)."""
    if how.top_k is not None and how.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[:, -1:], -torch.inf)
    chances = logits.double().softmax(-1)
    if how.top_p is not None and how.top_p < 1:
        ordered, places = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        chances = chances.scatter(1, places, ordered.masked_fill(before >= how.top_p, 0.0))
    limits = chances.cumsum(-1)
    last = limits[:, -1:]
    # Below the last limit, whatever it is rounded to: a token with a probability of 0 is never chosen.
    places = torch.minimum(draws[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(limits, places, right=True).squeeze(1)
