"""Callback that writes the files that transformers needs to load a model, except the weights."""

from pathlib import Path
from typing import Annotated, Any

from ddpforge.interfaces import Callback, RunContext
from pydantic import Field

from ddpforge_transformers.data import load_tokenizer

__all__ = ["HFFolder"]

ddpforge_plugin_api = 3


class HFFolder(Callback):
    """Writes the model's config, and a tokenizer, to the folder `hf` of the run after the first checkpoint.

    `ddpforge export RUN -o RUN/hf/` adds the weights; `from_pretrained` then loads the folder.
    """

    def __init__(
        self,
        *,
        tokenizer: Annotated[str | None, Field(description="Tokenizer to copy; absent: none.")] = None,
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._written = False

    def on_start(self, run: RunContext) -> None:
        """Keeps the config, and sets the model's class in it; raises ValueError if the model has no config."""
        model = run.model
        config: Any = getattr(model, "config", None)
        if config is None:
            raise ValueError(f"the callback hf_folder needs a model of transformers, not a {type(model).__name__}")
        self._config, self._main = config, run.world.is_rank_zero
        # A strategy may replace the class by a subclass of it, as torch's fully_shard does.
        classes = (each for each in type(model).__mro__ if each.__module__.startswith("transformers"))
        self._config.architectures = [next(classes, type(model)).__name__]
        self._generation: Any = getattr(model, "generation_config", None)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Writes the files once per process, on rank 0; `folder` is RUN/checkpoints/CHECKPOINT."""
        if self._written or not self._main:
            return
        out = folder.parents[1] / "hf"
        for part in (self._config, self._generation, self._tokenizer):
            if part is not None:
                part.save_pretrained(out)
        self._written = True
