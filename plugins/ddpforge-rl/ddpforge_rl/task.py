"""Policy gradients: the loss of a batch of episodes plays them first."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Any, NamedTuple

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Task, Total
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["PolicyGradient"]

_Float = NDArray[np.float32]


class Episode(NamedTuple):
    """What happened, step by step."""

    observations: _Float
    actions: NDArray[np.int64]
    rewards: _Float


class Outcome(NamedTuple):
    """Of each episode of a batch: the sum of its rewards, and its length."""

    returns: Tensor
    lengths: Tensor


class PolicyGradient(Task):
    """REINFORCE with a learnt baseline, for flat observations and discrete actions (Williams, 1992).

    A batch is seeds of episodes. Each is played with the current policy, without gradients; then all steps go through
    the model once more. The loss of an episode is Σₜ -log π(aₜ) Aₜ + value_weight (Rₜ - V(sₜ))² - entropy H(π(sₜ)) over
    its steps, where Rₜ is the discounted reward to go times (1 - gamma), so that it is of the size of a reward, and
    Aₜ = Rₜ - V(sₜ). Nothing depends on which other episodes are in the batch, hence not on how ranks divide them.

    In training, actions are drawn with random numbers that belong to the episode; at evaluation the likeliest is taken.
    """

    def __init__(
        self,
        *,
        env: Annotated[str, Field(description='A registered environment, e.g. "CartPole-v1".')],
        env_options: Annotated[Mapping[str, Any], Field(description="Keywords of gymnasium.make.")] = {},
        max_steps: Annotated[int, Field(ge=1, le=10**7, description="Longer episodes are cut.")] = 500,
        gamma: Annotated[float, Field(ge=0, lt=1, description="Discount of a reward per step.")] = 0.99,
        value_weight: Annotated[float, Field(gt=0, le=1e6, description="Weight of the baseline's error.")] = 0.5,
        entropy: Annotated[float, Field(ge=0, le=1e3, description="Bonus for an undecided policy.")] = 0.0,
    ) -> None:
        self.max_steps, self.gamma, self.value_weight, self.entropy = max_steps, gamma, value_weight, entropy
        self._make = partial(gymnasium.make, env, disable_env_checker=True, **env_options)
        try:
            self._envs = [self._make()]
        except (gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"gymnasium cannot make `{env}` with {dict(env_options)}: {error}") from error
        seen, does = self._envs[0].observation_space, self._envs[0].action_space
        if not isinstance(seen, gymnasium.spaces.Box) or not isinstance(does, gymnasium.spaces.Discrete):
            raise ValueError(f"`{env}` maps {seen} to {does}; expected a Box of observations and Discrete actions")
        self._inputs, self._actions, self._first = int(np.prod(seen.shape)), int(does.n), int(does.start)

    def check(self, model: nn.Module, data: Any) -> None:
        """Compares the model with the environment, and keeps a copy of it to act with."""
        for name, wanted in (("inputs", self._inputs), ("outputs", self._actions)):
            has = getattr(model, name, wanted)
            if has != wanted:
                raise ValueError(
                    f"the environment has {wanted} {name}, but the model {has}; set model.{name} = {wanted}"
                )
        # Acting needs as many forward passes as the longest episode has steps, which differs from rank to rank. Under a
        # strategy that shards, forward passes are collective; so acting is done with whole weights, on the host.
        self._actor = deepcopy(model).cpu().requires_grad_(False).eval()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Outcome]:
        """The loss summed over episodes, and how they went."""
        self._refresh(model)
        episodes = self._play(batch.tolist(), sample=model.training)

        def flat(arrays: Sequence[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(batch.device)

        togo = flat([_to_go(episode.rewards, self.gamma) for episode in episodes])
        judged = model(flat([episode.observations for episode in episodes]))
        values, logs = judged.values.float(), F.log_softmax(judged.logits.float(), dim=-1)
        chosen = logs.gather(1, flat([episode.actions for episode in episodes])[:, None]).squeeze(1)
        loss = -(chosen * (togo - values.detach())).sum() + self.value_weight * (togo - values).square().sum()
        loss = loss + self.entropy * (logs.exp() * logs).sum()

        returns = torch.tensor([float(episode.rewards.sum()) for episode in episodes], device=batch.device)
        lengths = torch.tensor([float(len(episode.rewards)) for episode in episodes], device=batch.device)
        return loss, Outcome(returns, lengths)

    def metrics(self, outputs: Outcome, batch: Tensor) -> Mapping[str, Total]:
        """The mean return and length of episodes."""
        return {
            "return": Total(outputs.returns.sum(), len(outputs.returns)),
            "episode_length": Total(outputs.lengths.sum(), len(outputs.lengths)),
        }

    # ------------------------------------------------------------------------------------------ acting
    @torch.no_grad()
    def _refresh(self, model: nn.Module) -> None:
        """Gives the copy the model's weights; collective where these are sharded, and then on every rank alike."""
        for mine, theirs in zip(self._actor.parameters(), model.parameters(), strict=True):
            whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
            if whole.shape != mine.shape:
                raise StrategyError(
                    "policy_gradient acts with whole weights, and this strategy gives a task none",
                    hints=['set strategy.use = "ddp" or "fsdp"; deepspeed works up to stage 2'],
                )
            mine.copy_(whole)

    @torch.no_grad()
    def _play(self, seeds: Sequence[int], *, sample: bool) -> list[Episode]:
        """Plays one episode a seed, all side by side."""
        self._envs += [self._make() for _ in range(len(seeds) - len(self._envs))]
        draws = [np.random.default_rng(seed) for seed in seeds]
        seen = [self._flat(env.reset(seed=seed)[0]) for env, seed in zip(self._envs, seeds, strict=False)]
        record: list[list[tuple[_Float, int, float]]] = [[] for _ in seeds]
        alive = list(range(len(seeds)))

        for _ in range(self.max_steps):
            logits = self._actor(torch.from_numpy(np.stack([seen[n] for n in alive]))).logits
            chances = logits.double().softmax(dim=-1).cumsum(dim=-1).numpy()
            likeliest = logits.argmax(dim=-1).tolist()
            still = []
            for row, n in enumerate(alive):
                action = likeliest[row]
                if sample:  # the last sum of chances may be a little less than 1
                    action = min(int(np.searchsorted(chances[row], draws[n].random())), self._actions - 1)
                now, reward, terminated, truncated, _ = self._envs[n].step(action + self._first)
                record[n].append((seen[n], action, float(reward)))
                seen[n] = self._flat(now)
                if not (terminated or truncated):
                    still.append(n)
            alive = still
            if not alive:
                break
        return [_episode(steps) for steps in record]

    def _flat(self, observation: NDArray[Any]) -> _Float:
        return np.asarray(observation, dtype=np.float32).reshape(-1)


def _episode(steps: Sequence[tuple[_Float, int, float]]) -> Episode:
    observations, actions, rewards = zip(*steps, strict=True)
    return Episode(np.stack(observations), np.array(actions), np.array(rewards, dtype=np.float32))


def _to_go(rewards: _Float, gamma: float) -> _Float:
    """The discounted sum of what is still to come, at every step, times 1 - gamma."""
    sums, total = np.empty(len(rewards)), 0.0
    for step in range(len(rewards) - 1, -1, -1):
        total = float(rewards[step]) + gamma * total
        sums[step] = total
    return (sums * (1 - gamma)).astype(np.float32)
