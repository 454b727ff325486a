"""Predicting numbers."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ddpforge.interfaces import Metric, Task, Total
