"""Proximal policy optimization (Schulman et al., 2017): a cart learns to stay in the middle of a line."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.interfaces import AuxiliaryModule, Task, Total

STEPS = 20  # per episode


class Episodes:
    """Dataset of `count` episodes: initial position and speed, and a random number for each action, [2 + STEPS]."""

    random = False

    def __init__(self, *, count: int = 4096, seed: int) -> None:
        draws = torch.rand(count, 2 + STEPS, generator=torch.Generator().manual_seed(seed))
        self.episodes = torch.cat([draws[:, :2] * 2 - 1, draws[:, 2:]], dim=1)

    def __len__(self) -> int:
        return len(self.episodes)

    def __getitem__(self, index: int) -> Tensor:
        return self.episodes[index]


class ActorCritic(nn.Module):  # states [..., 2] → logits of pushing left and right, and the value: [..., 3]
    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, states: Tensor) -> Tensor:
        return self.body(states)


class PPO(Task):
    """PPO: `old`, the policy before these `times` (= `data.sampler.times`) steps, replays the same episodes in each."""

    def __init__(self, *, times: int, clip: float = 0.2, gamma: float = 0.9) -> None:
        self.times, self.clip, self.gamma = times, clip, gamma

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        self.old, momentum = copy.deepcopy(model), lambda step: float((step + 1) % self.times > 0)
        return {"old": AuxiliaryModule(module=self.old, follows="", momentum=momentum)}

    @torch.no_grad()
    def play(self, policy: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
        """Returns states [B, T, 2], actions, their log-probabilities, returns and rewards, each [B, T]."""
        place, speed, seen = batch[:, 0], batch[:, 1] * 0.1, []
        for step in range(STEPS):
            state = torch.stack([place, speed * 10], dim=1)
            logs = policy(state)[:, :2].float().log_softmax(1)
            right = (batch[:, 2 + step] < logs[:, 1].exp()).long()
            speed = speed + (right * 2 - 1) * 0.05
            place = place + speed
            seen.append((state, right, logs.gather(1, right[:, None]).squeeze(1), 1 - place.abs().clamp(max=2)))
        states, actions, logs, rewards = (torch.stack(each, dim=1) for each in zip(*seen, strict=True))
        discounts = self.gamma ** torch.arange(STEPS, device=batch.device)
        togo = (rewards * discounts).flip(1).cumsum(1).flip(1) / discounts * (1 - self.gamma)
        return states, actions, logs, togo, rewards

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Any]:
        states, actions, before, togo, rewards = self.play(self.old if model.training else model, batch)
        out = model(states).float()
        now = out[..., :2].log_softmax(-1).gather(2, actions[..., None]).squeeze(2)
        advantage, ratio = togo - out[..., 2].detach(), (now - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)
        return (nn.functional.mse_loss(out[..., 2], togo, reduction="none") - gain).sum() / STEPS, rewards.mean(1)

    def metrics(self, outputs: Tensor, batch: Tensor) -> Mapping[str, Total]:
        return {"reward": Total(outputs.sum(), len(outputs))}
