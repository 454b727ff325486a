"""How far predictions are off."""

from torch import Tensor

from ddpforge.interfaces import Metric, Total


class MeanAbsoluteError(Metric):
    """The absolute error, averaged over the values of a sample and over samples.

    Takes predictions and targets of one shape [B, ...]; raises ValueError when the shapes differ, which would
    otherwise be broadcast.
    """

    name = "mae"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        if outputs.shape != targets.shape:
            raise ValueError(f"mae compares equal shapes, not {list(outputs.shape)} with {list(targets.shape)}")
        errors = (outputs.detach().float() - targets).abs()
        return Total(errors.flatten(1).mean(dim=1).sum() if errors.ndim > 1 else errors.sum(), len(errors))
