"""Interfaces for component authors: one short file per kind of component, and the value objects that they share.

Models are plain `torch.nn.Module`s, optimizers plain `torch.optim.Optimizer`s, and schedules plain functions of the
step. Importing these modules does not import torch.
"""

from ddpforge.interfaces.beside import Beside
from ddpforge.interfaces.callback import Callback, GoBack, RunContext, StepInfo
from ddpforge.interfaces.context import Context
from ddpforge.interfaces.data import Data, PartedData
from ddpforge.interfaces.direction import lower_is_better
from ddpforge.interfaces.draws import Draws
from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.interfaces.experts import Experts
from ddpforge.interfaces.metric import Metric, Rows, Total
from ddpforge.interfaces.optimizer import Exploring, Schedule
from ddpforge.interfaces.order import BatchSampler, EpochBatchSampler
from ddpforge.interfaces.regions import Box, Part, Pieces, Range, Region
from ddpforge.interfaces.seeds import mix
from ddpforge.interfaces.shown import Histogram, Show, ShownKind, Table
from ddpforge.interfaces.state import CanonicalState, PartWeights, SavedTensor, Weights, WholeWeights, read_all
from ddpforge.interfaces.strategy import (
    Compute,
    Contract,
    Cuts,
    Explores,
    Pass,
    Refusal,
    Replica,
    Sharded,
    Simulation,
    Strategy,
    TakesTurns,
)
from ddpforge.interfaces.task import Task
from ddpforge.interfaces.tracker import Tracker
from ddpforge.interfaces.world import Ranks, World

__all__ = [
    "BatchSampler",
    "Beside",
    "Box",
    "Callback",
    "CanonicalState",
    "Compute",
    "Context",
    "Contract",
    "Cuts",
    "Data",
    "Draws",
    "Duration",
    "EpochBatchSampler",
    "Experts",
    "Explores",
    "Exploring",
    "GoBack",
    "Histogram",
    "Horizon",
    "Metric",
    "Part",
    "PartWeights",
    "PartedData",
    "Pass",
    "Pieces",
    "Range",
    "Ranks",
    "Refusal",
    "Region",
    "Replica",
    "Rows",
    "RunContext",
    "SavedTensor",
    "Schedule",
    "Sharded",
    "Show",
    "ShownKind",
    "Simulation",
    "StepInfo",
    "Strategy",
    "Table",
    "TakesTurns",
    "Task",
    "Total",
    "Tracker",
    "Weights",
    "WholeWeights",
    "World",
    "lower_is_better",
    "mix",
    "read_all",
]
