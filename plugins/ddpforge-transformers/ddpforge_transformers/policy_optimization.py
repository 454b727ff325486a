"""Tasks that train by rewards: `grpo` and `rloo`. The policy answers prompts, and functions reward the answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ddpforge_transformers.policy_task import Batch, PolicyTask, Scored, Settings
from ddpforge_transformers.rewards import Rewards
from ddpforge_transformers.rollout_server import RolloutServer
from ddpforge_transformers.sampling import SamplingSettings

__all__ = ["GRPO", "RLOO"]

ddpforge_plugin_api = 3

_Function = Annotated[Callable[..., Any], Field(description='A function: "./rewards.py:is_right".')]
_Functions = Annotated[
    Sequence[_Function],
    Field(min_length=1, description="Functions f(prompts, completions, completion_ids, **columns) -> numbers."),
]
_Weights = Annotated[
    Sequence[float] | None, Field(description="Weight of each reward in their sum; absent: all are 1.")
]
_Generations = Annotated[int, Field(ge=2, le=4096, description="Completions of each prompt: the group.")]
_MaxTokens = Annotated[int, Field(ge=1, le=2**20, description="Maximum number of tokens of a completion.")]
_Temperature = Annotated[
    float, Field(gt=0, le=100, description="Logits are divided by it, in sampling and in the loss.")
]
_TopK = Annotated[int | None, Field(ge=1, description="Only the likeliest tokens are sampled; absent: all.")]
_TopP = Annotated[
    float | None, Field(gt=0, le=1, description="Only tokens within this cumulative probability are sampled.")
]
_Epsilon = Annotated[float, Field(gt=0, lt=1, description="Ratios below 1 - epsilon are clipped.")]
_EpsilonHigh = Annotated[
    float | None, Field(gt=0, le=100, description="Ratios above 1 + epsilon_high are clipped; absent: epsilon.")
]
_Reference = Annotated[
    Literal["copy", "adapters"] | None,
    Field(
        description='Reference of the KL: "copy" is a frozen copy of the initial model; "adapters" is the model with '
        'its adapters switched off. Absent: "adapters" if the model has adapters, else "copy".'
    ),
]
_Rollouts = Annotated[
    Path | None,
    Field(description="Log to replay instead of generating: RUN/rollouts of another run, or one of its files."),
]
_Server = Annotated[
    str | None, Field(description='Server that generates, e.g. "http://127.0.0.1:8000"; absent: in process.')
]
_ServerUpdate = Annotated[
    Callable[..., Any],
    Field(description="Function f(url, folder) that makes the server load weights; absent: that of SGLang."),
]
_KeepRollouts = Annotated[bool, Field(description="Write each step's rollouts to RUN/rollouts.")]


class GRPO(PolicyTask):
    """Group relative policy optimization: raises the probability of completions with more reward than their group.

    The advantage of a completion is its reward minus the mean of its group, divided by the group's standard deviation
    (plus 1e-4) with `scale_rewards = "group"`. The loss of a token is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high)
    A) + beta KL, with the ratio r of its probability to that when it was generated, and the estimator k3 of the KL to
    the reference, exp(d) - d - 1, for the difference d of the reference's log-probability and the policy's. Each step
    generates anew, so r is 1 and only its gradient counts, as for TRL's num_iterations = 1.

    `loss_type` sets the mean: "grpo" over the tokens of each completion, then over completions (Shao et al.,
    "DeepSeekMath", 2024); "dapo" over all tokens of the step (Yu et al., "DAPO", 2025), as "bnpo", which in TRL is the
    mean over a micro-batch; "dr_grpo" over num_generations * max_new_tokens (Liu et al., "Understanding R1-Zero-Like
    Training", 2025).

    With `importance`, a token's loss is multiplied by its probability divided by that of the sampler, at most
    `importance_cap`: for a server that computes other log-probabilities (Yao et al., 2025). "sequence" takes the
    ratio of the whole completion.
    """

    def __init__(
        self,
        *,
        rewards: _Functions,
        reward_weights: _Weights = None,
        num_generations: _Generations = 8,
        max_new_tokens: _MaxTokens = 256,
        temperature: _Temperature = 1.0,
        top_k: _TopK = None,
        top_p: _TopP = None,
        loss_type: Annotated[
            Literal["grpo", "bnpo", "dr_grpo", "dapo"], Field(description="The mean of the tokens' losses.")
        ] = "dapo",
        scale_rewards: Annotated[
            Literal["group", "none"], Field(description="Advantages are divided by the standard deviation of a group.")
        ] = "group",
        epsilon: _Epsilon = 0.2,
        epsilon_high: _EpsilonHigh = None,
        beta: Annotated[float, Field(ge=0, le=100, description="Weight of the KL to the reference; 0: none.")] = 0.0,
        reference: _Reference = None,
        importance: Annotated[
            Literal["token", "sequence"] | None,
            Field(description="Truncated importance weights for another sampler, per token or per completion."),
        ] = None,
        importance_cap: Annotated[float, Field(gt=0, le=1e6, description="Largest importance weight.")] = 3.0,
        rollouts: _Rollouts = None,
        server: _Server = None,
        server_update: _ServerUpdate | None = None,
        keep_rollouts: _KeepRollouts = True,
    ) -> None:
        how = SamplingSettings(max_new_tokens, temperature, top_k, top_p)
        each, sender = Rewards(rewards, reward_weights), _server(server, server_update)
        super().__init__(Settings(each, num_generations, how, beta, reference, rollouts, sender, keep_rollouts))
        self._epsilons = epsilon, epsilon if epsilon_high is None else epsilon_high
        self._form, self._scales = loss_type, scale_rewards == "group"
        self._importance, self._cap = importance, importance_cap
        self.items = "tokens" if self._by_tokens else "prompts"

    @property
    def _by_tokens(self) -> bool:
        return self._form in ("dapo", "bnpo")

    def count(self, batch: Batch) -> Tensor | None:
        """Returns the number of generated tokens for "dapo" and "bnpo", which generates them; else None."""
        if not self._by_tokens:
            return None
        if self._model is None:  # an estimate of memory: nothing is generated
            return torch.tensor(len(batch["seed"]) * self.num_generations * self.sampling.max_tokens)
        with self._run.forward():
            return torch.tensor(sum(one.tokens for one in self._rollouts(self._model, batch)))

    def losses_of(self, scored: Scored) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the losses of groups [B], the advantages [B, G], and the KL of each token [N, T - 1]."""
        rewards, logps, mask = scored.rewards, scored.logps, scored.mask
        advantages = rewards - rewards.mean(1, keepdim=True)
        if self._scales:
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
        losses = _clipped(logps - logps.detach(), advantages.flatten()[:, None], self._epsilons)
        if self._importance is not None:
            difference = (logps.detach() - scored.sampled) * mask
            if self._importance == "sequence":
                difference = difference.sum(1, keepdim=True)
            losses = losses * difference.exp().clamp(max=self._cap)
        kl = None
        if scored.reference is not None:
            beyond = scored.reference - logps
            kl = beyond.exp() - beyond - 1
            losses = losses + self.beta * kl
        sums, lengths = (losses * mask).sum(1), mask.sum(1)
        if self._form == "grpo":
            sums = sums / lengths / self.num_generations
        elif self._form == "dr_grpo":
            sums = sums / (self.num_generations * self.sampling.max_tokens)
        return sums.view(len(rewards), -1).sum(1), advantages, kl


class RLOO(PolicyTask):
    """REINFORCE with a baseline that leaves one out: the mean reward of a completion's group without itself.

    The reward is reduced by `beta` times the log-ratio of the whole completion to the reference. The loss of a
    completion is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with the ratio r of its probability to that when
    it was generated: each step generates anew, so r is 1 and only its gradient counts. The loss is the mean over
    completions. See Ahmadian et al., "Back to Basics" (2024).
    """

    items = "prompts"

    def __init__(
        self,
        *,
        rewards: _Functions,
        reward_weights: _Weights = None,
        reward_clip: Annotated[
            tuple[float, float] | None, Field(description="Limits of the summed reward, before the KL.")
        ] = None,
        num_generations: _Generations = 8,
        max_new_tokens: _MaxTokens = 256,
        temperature: _Temperature = 1.0,
        top_k: _TopK = None,
        top_p: _TopP = None,
        epsilon: _Epsilon = 0.2,
        epsilon_high: _EpsilonHigh = None,
        beta: Annotated[float, Field(ge=0, le=100, description="Weight of the KL in the reward; 0: none.")] = 0.05,
        reference: _Reference = None,
        rollouts: _Rollouts = None,
        server: _Server = None,
        server_update: _ServerUpdate | None = None,
        keep_rollouts: _KeepRollouts = True,
    ) -> None:
        if reward_clip is not None and reward_clip[0] >= reward_clip[1]:
            raise ValueError(f"reward_clip: {reward_clip[0]} is not below {reward_clip[1]}")
        how = SamplingSettings(max_new_tokens, temperature, top_k, top_p)
        each, sender = Rewards(rewards, reward_weights), _server(server, server_update)
        super().__init__(Settings(each, num_generations, how, beta, reference, rollouts, sender, keep_rollouts))
        self._epsilons = epsilon, epsilon if epsilon_high is None else epsilon_high
        self._clip = reward_clip

    def losses_of(self, scored: Scored) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the losses of groups [B], the advantages [B, G], and the log-ratio of each token [N, T - 1]."""
        rewards, logps = scored.rewards, scored.logps
        if self._clip is not None:
            rewards = rewards.clamp(*self._clip)
        kl = None if scored.reference is None else (logps.detach() - scored.reference) * scored.mask
        if kl is not None:
            rewards = rewards - self.beta * kl.sum(1).view_as(rewards)
        others = (rewards.sum(1, keepdim=True) - rewards) / (self.num_generations - 1)
        advantages = rewards - others
        whole = logps.sum(1)
        losses = _clipped(whole - whole.detach(), advantages.flatten(), self._epsilons)
        return losses.view_as(rewards).mean(1), advantages, kl


def _clipped(log_ratio: Tensor, advantages: Tensor, epsilons: tuple[float, float]) -> Tensor:
    """Returns the clipped loss, from log-ratios to the policy that generated."""
    ratio = log_ratio.exp()
    low, high = epsilons
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _server(url: str | None, update: Callable[..., Any] | None) -> RolloutServer | None:
    if url is None and update is not None:
        raise ValueError("server_update is for a server; set server, or remove it")
    return None if url is None else RolloutServer(url, update)
