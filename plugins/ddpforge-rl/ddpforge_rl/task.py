"""Policy gradients: the task plays a batch of episodes, then computes their loss."""

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
    """Observations, actions and rewards of an episode, one per step."""

    observations: _Float
    actions: NDArray[np.int64]
    rewards: _Float


class Outcome(NamedTuple):
    """Sum of rewards and length of each episode of a batch."""

    returns: Tensor
    lengths: Tensor


class PolicyGradient(Task):
    """REINFORCE with a learnt baseline, for flat observations and discrete actions (Williams, 1992).

    A batch contains seeds of episodes. The task plays each episode with the current policy, without gradients, and then
    runs the model once on all steps. The loss of an episode is the sum over its steps t of
    -log π(aₜ) Aₜ + value_weight (Rₜ - V(sₜ))² - entropy H(π(sₜ)). Rₜ is the discounted reward to go times (1 - gamma),
    which has the scale of a reward, and Aₜ = Rₜ - V(sₜ). The loss of an episode does not depend on the other episodes
    of the batch, so it does not depend on the number of ranks.

    In training, actions are drawn with the episode's own random numbers. In evaluation the likeliest action is taken.
    """

    def __init__(
        self,
        *,
        env: Annotated[str, Field(description='Registered environment, e.g. "CartPole-v1".')],
        env_options: Annotated[Mapping[str, Any], Field(description="Keyword arguments of gymnasium.make.")] = {},
        max_steps: Annotated[int, Field(ge=1, le=10**7, description="Longer episodes are truncated.")] = 500,
        gamma: Annotated[float, Field(ge=0, lt=1, description="Discount of a reward per step.")] = 0.99,
        value_weight: Annotated[
            float, Field(gt=0, le=1e6, description="Weight of the baseline's squared error.")
        ] = 0.5,
        entropy: Annotated[float, Field(ge=0, le=1e3, description="Weight of the entropy bonus.")] = 0.0,
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
        """Compares the model with the environment, and makes a copy of the model for acting; raises ValueError."""
        for name, wanted in (("inputs", self._inputs), ("outputs", self._actions)):
            has = getattr(model, name, wanted)
            if has != wanted:
                raise ValueError(
                    f"the environment has {wanted} {name}, but the model has {has}; set model.{name} = {wanted}"
                )
        # Acting needs one forward pass per step of the longest episode; this number differs between ranks. Under a
        # strategy that shards, forward passes are collective. So the task acts with whole weights, on the CPU.
        self._actor = deepcopy(model).cpu().requires_grad_(False).eval()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Outcome]:
        """Plays the episodes; returns the loss summed over them, and their outcome."""
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
        """Returns the mean return and length of episodes."""
        return {
            "return": Total(outputs.returns.sum(), len(outputs.returns)),
            "episode_length": Total(outputs.lengths.sum(), len(outputs.lengths)),
        }

    # ------------------------------------------------------------------------------------------ acting
    @torch.no_grad()
    def _refresh(self, model: nn.Module) -> None:
        """Copies the model's weights to the copy for acting; collective if they are sharded."""
        for mine, theirs in zip(self._actor.parameters(), model.parameters(), strict=True):
            whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
            if whole.shape != mine.shape:
                raise StrategyError(
                    "policy_gradient needs whole weights to act, but this strategy does not provide them to a task",
                    hints=['set strategy.use = "ddp" or "fsdp"; deepspeed works up to stage 2'],
                )
            mine.copy_(whole)

    @torch.no_grad()
    def _play(self, seeds: Sequence[int], *, sample: bool) -> list[Episode]:
        """Plays one episode per seed, all in parallel."""
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
                if sample:  # rounding may make the last cumulative probability less than 1
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
    """Returns the discounted sum of this and all later rewards at every step, times 1 - gamma."""
    sums, total = np.empty(len(rewards)), 0.0
    for step in range(len(rewards) - 1, -1, -1):
        total = float(rewards[step]) + gamma * total
        sums[step] = total
    return (sums * (1 - gamma)).astype(np.float32)
