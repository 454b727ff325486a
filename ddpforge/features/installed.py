"""ddpforge's own features and observers, in the order in which they are called."""

from ddpforge.features.alternating_updates import SeveralUpdates
from ddpforge.features.auxiliary import AuxiliaryModules
from ddpforge.features.batchnorm import BatchNorm
from ddpforge.features.block_forwards import BlockForwards
from ddpforge.features.channels_last import ChannelsLast
from ddpforge.features.float8 import Float8
from ddpforge.features.frozen_dtype import FrozenWeightDtype
from ddpforge.features.frozen_weights import FrozenWeights
from ddpforge.features.mirror import MirroredRun
from ddpforge.features.multi_pass import MultiPass
from ddpforge.features.profiling import ProfiledRun
from ddpforge.features.restored_buffers import RestoredBuffers
from ddpforge.features.silent_corruption import SilentCorruption
from ddpforge.features.slow_ranks import SlowRanks
from ddpforge.features.source_losses import SourceLosses
from ddpforge.features.sources import Mixtures
from ddpforge.features.streams import IterableData
from ddpforge.features.task_state import TaskStates
from ddpforge.features.time_marks import GradientWait, SaveMarks
from ddpforge.features.token_limit import MicroBatchesByTokens
from ddpforge.features.utilization import Utilization

FEATURES = [
    FrozenWeightDtype,
    Float8,
    BlockForwards,
    BatchNorm,
    ChannelsLast,
    AuxiliaryModules,
    TaskStates,
    FrozenWeights,
    Mixtures,
    SourceLosses,
    IterableData,
    MicroBatchesByTokens,
    RestoredBuffers,
    MultiPass,
    SeveralUpdates,
    Utilization,
    SaveMarks,
    GradientWait,
    SlowRanks,
    SilentCorruption,
]
OBSERVERS = [ProfiledRun, MirroredRun]
