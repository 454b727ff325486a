"""Interfaces for component authors: one short file per kind of component, and the value objects that they share.

Models are plain `torch.nn.Module`s, optimizers plain `torch.optim.Optimizer`s, and schedules plain functions of the
step. Importing these modules does not import torch.
"""

from importlib import import_module
from typing import Never

from ddpforge.interfaces.attention_context import AttentionContext
from ddpforge.interfaces.auxiliary import AuxiliaryModule
from ddpforge.interfaces.callback import Callback, GoBack, RunContext, StepInfo
from ddpforge.interfaces.checkpoint_format import CheckpointFormat, ForeignState
from ddpforge.interfaces.data import Data, ShardedDataset, class_names_of
from ddpforge.interfaces.device import DeviceKind, active_kind, add_device_kind, device_kind, device_kinds, in_float64
from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.interfaces.environment import Environment, RankWatch, RunAttempt
from ddpforge.interfaces.expert_dispatch import ExpertDispatch
from ddpforge.interfaces.media import Histogram, LogMedia, MediaKind, Table
from ddpforge.interfaces.metric import Metric, SampleColumns, Total
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.interfaces.optimizer import MultiPassOptimizer, Schedule
from ddpforge.interfaces.regions import Box, BoxList, FlatRange, Region, TensorShard
from ddpforge.interfaces.sample_rng import SampleRNG
from ddpforge.interfaces.sampler import BatchSampler, EpochBatchSampler, Sequential, Shuffled, SourceSampler
from ddpforge.interfaces.seeds import mix
from ddpforge.interfaces.state import CanonicalState, FullWeights, SavedTensor, ShardedWeights, Weights, read_all
from ddpforge.interfaces.strategy import (
    AlternatesUpdates,
    Compute,
    Contract,
    ForwardSplit,
    Pass,
    Replica,
    Sharded,
    Simulation,
    Strategy,
    SupportsMultiPass,
    Unsupported,
)
from ddpforge.interfaces.task import Task
from ddpforge.interfaces.tracker import Tracker
from ddpforge.interfaces.world import Ranks, World

__all__ = [
    "AlternatesUpdates",
    "AttentionContext",
    "AuxiliaryModule",
    "BatchSampler",
    "Box",
    "BoxList",
    "Callback",
    "CanonicalState",
    "CheckpointFormat",
    "Compute",
    "Contract",
    "Data",
    "DeviceKind",
    "Duration",
    "Environment",
    "EpochBatchSampler",
    "ExpertDispatch",
    "FlatRange",
    "ForeignState",
    "ForwardSplit",
    "FullWeights",
    "GoBack",
    "Histogram",
    "Horizon",
    "LogMedia",
    "MediaKind",
    "Metric",
    "MultiPassOptimizer",
    "Pass",
    "RankWatch",
    "Ranks",
    "Region",
    "Replica",
    "RunAttempt",
    "RunContext",
    "SampleColumns",
    "SampleRNG",
    "SavedTensor",
    "Schedule",
    "Sequential",
    "Sharded",
    "ShardedDataset",
    "ShardedWeights",
    "Shuffled",
    "Simulation",
    "SourceSampler",
    "StepInfo",
    "Strategy",
    "SupportsMultiPass",
    "Table",
    "Task",
    "TensorShard",
    "Total",
    "Tracker",
    "Unsupported",
    "Weights",
    "World",
    "active_kind",
    "add_device_kind",
    "class_names_of",
    "device_kind",
    "device_kinds",
    "in_float64",
    "lower_is_better",
    "mix",
    "read_all",
]


def __getattr__(name: str) -> Never:
    raise import_module("ddpforge.components.attributes").missing_name(__name__, name)
