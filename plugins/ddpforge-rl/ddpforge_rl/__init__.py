"""Reinforcement learning with gymnasium for ddpforge: a sample is an episode."""

from ddpforge_rl.data import Episodes
from ddpforge_rl.model import ActorCritic
from ddpforge_rl.task import PolicyGradient

__all__ = ["ActorCritic", "Episodes", "PolicyGradient", "ddpforge_plugin_api"]

ddpforge_plugin_api = 3
