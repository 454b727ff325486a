"""LightningModules in ddpforge: the module is the model, and its methods are task, optimizer and schedule."""

from ddpforge_lightning.tasks import LightningTask

__all__ = ["LightningTask"]

ddpforge_plugin_api = 3
