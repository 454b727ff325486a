"""Dataset `lightning`: a dataset of a LightningDataModule."""

from __future__ import annotations

import getpass
import logging
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpforge.errors import UsageError
from ddpforge.interfaces import Data
from pydantic import Field

from ddpforge_lightning.module import library_class, overridden

__all__ = ["LightningData"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

_SUPPORTED = {
    "prepare_data",
    "setup",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "teardown",
    "state_dict",
    "load_state_dict",
}


class LightningData:
    """Dataset and collate function of a loader of `of`, a LightningDataModule.

    Calls its `prepare_data`, its `setup`, and the method that returns the loader. Its batch size, its shuffling and its
    workers are not used: the recipe has them. Attributes are those of the dataset.
    """

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description='LightningDataModule, e.g. { use = "./dm.py:Pets", folder = "pets" }.')],
        loader: Annotated[Literal["train", "val", "test"], Field(description="Loader that has the dataset.")] = "train",
    ) -> None:
        module: Any = of
        _check_module(module)
        _prepare(module)
        module.setup("test" if loader == "test" else "fit")
        found = getattr(module, f"{loader}_dataloader")()
        _check_loader(found, type(module).__name__, loader)
        self.data = found.dataset
        if found.collate_fn is not _default():
            self.collate = found.collate_fn
        log.info(
            "%s.%s_dataloader has a batch size of %s, which is not used: the recipe has its own",
            type(module).__name__,
            loader,
            found.batch_size,
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name.startswith("__"):  # a copy has no `data` at first
            raise AttributeError(name)
        return getattr(self.data, name)


def _default() -> Any:
    from torch.utils.data import default_collate

    return default_collate


def _prepare(module: Any) -> None:
    """Calls `prepare_data` while no other process of this user on this machine does."""
    from filelock import FileLock  # a dependency of torch

    kind = type(module)
    name = f"ddpforge-{getpass.getuser()}-{kind.__module__}.{kind.__qualname__}.lock"
    with FileLock(Path(tempfile.gettempdir(), name)):
        module.prepare_data()


def _check_module(module: Any) -> None:
    base = library_class(type(module), "LightningDataModule")
    if base is None:
        raise UsageError(
            f"of: {type(module).__name__} is not a LightningDataModule",
            hints=["name a dataset without `lightning`: data.train.use"],
        )
    if found := overridden(type(module), base, _SUPPORTED):
        raise UsageError(
            f"{type(module).__name__} overrides {', '.join(f'`{one}`' for one in found)}, which a Trainer would call; "
            "ddpforge does not",
            hints=["do it in the dataset's __getitem__, or in the training step"],
        )


def _check_loader(found: Any, module: str, name: str) -> None:
    """Raises UsageError unless `found` is a DataLoader of a dataset with a length, in its order or shuffled."""
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

    place = f"{module}.{name}_dataloader"
    if not isinstance(found, DataLoader):
        raise UsageError(f"{place} returns {type(found).__name__}, not one DataLoader of torch")
    if isinstance(found.dataset, IterableDataset):
        raise UsageError(
            f"{place} has an IterableDataset, which its module cannot divide among ranks",
            hints=["name the dataset itself in the recipe, as docs/extend/dataset.md describes for streams"],
        )
    if type(found.sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            f"{place} has a {type(found.sampler).__name__}, which ddpforge does not use",
            hints=['remove it, and name an order in [data.sampler], e.g. use = "weighted"'],
        )
