"""Runs of a recipe under changes, and the relations that apply to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpforge.recipe import load_recipe
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.prove.certificate import Certificate
from ddpforge.tools.prove.changes import ScriptChange
from ddpforge.tools.prove.relations import SCALE, Tried, middle, try_relations
from ddpforge.tools.prove.runs import Observed, Options, ScriptRuns

__all__ = ["prove_recipe"]

_PROGRAM = Path(__file__).with_name("trained.py")
_NO_CLIPPING = 1_000_000


def prove_recipe(
    recipe: str, *, sets: Sequence[str] = (), steps: int = 3, ranks: int = 2, skip: Sequence[str] = ()
) -> Certificate:
    """Tries all relations on a recipe, by short runs with other settings.

    Raises RecipeError for mistakes of the recipe, UsageError if a run fails or differs from its repetition.
    """
    load_recipe(recipe, sets=sets)
    with TemporaryDirectory(prefix="ddpforge-prove-") as name, ExitStack() as life:
        runs = life.enter_context(_OfRecipe(recipe, sets, Path(name), steps))
        return try_relations(runs, ranks=ranks, skip=skip)


class _OfRecipe(ScriptRuns):
    """Runs of a recipe, by a program that trains it."""

    def __init__(self, recipe: str, sets: Sequence[str], folder: Path, steps: int) -> None:
        super().__init__(_PROGRAM, (), folder, steps, Options())
        self._recipe, self._sets = recipe, list(sets)
        self._loaded = load_recipe(recipe, sets=sets).recipe
        self._clips = self._loaded.train.clip_norm is not None

    def __enter__(self) -> _OfRecipe:
        super().__enter__()
        return self

    @property
    def name(self) -> str:
        """Returns the recipe as it was given."""
        return self._recipe

    def words(
        self,
        *sets: str,
        batches: str = "same",
        evaluates: bool = False,
        folder: str = "-",
        clips: bool = False,
    ) -> list[str]:
        """Returns the arguments of the program."""
        train = self._loaded.train
        # After clipping, all gradients have the same norm, whatever they were multiplied by.
        unclipped = [f"train.clip_norm={_NO_CLIPPING}"] if self._clips and not clips else []
        return [
            *(self._recipe, batches, "yes" if evaluates else "no", folder),
            *(*self._sets, "track.every=1st", "callbacks.ddpforge_prove.use=ddpforge.tools.prove.trained:Begins"),
            *(f"track.{toml_value(one)}.use=ddpforge.interfaces:Tracker" for one in self._loaded.track.trackers),
            *([] if train.micro_batch or train.virtual_ranks else [f"train.micro_batch={train.global_batch}"]),
            *unclipped,
            *sets,
        ]

    def run(
        self, change: ScriptChange, *, ranks: int = 1, steps: int | None = None, more: Sequence[str] = ()
    ) -> Observed:
        """Trains under a change; `more` are the program's arguments, by default those of the unchanged recipe."""
        return super().run(change, ranks=ranks, steps=steps, more=more or self.words())

    def relations(self, ranks: int) -> Iterator[Tried]:
        """Yields the relations; those of data that the recipe lacks have a reason."""
        train, size = self._loaded.train, self._loaded.train.per_pass(1)
        for how, about, change in (
            ("order", "The samples of a micro-batch in reverse order.", ScriptChange(order=True)),
            ("doubled", "Each sample of a batch twice: the mean is the same.", ScriptChange(doubled=True)),
            ("padding", "More padding on the right, outside of the attention mask.", ScriptChange(padding=True)),
        ):
            # The program's losses are sums over samples.
            yield Tried(how, about, change, equal_loss=how != "doubled", more=self.words(batches=how))
        yield Tried("workers", "Two loader processes.", ScriptChange(), more=self.words("data.workers=2"))
        yield Tried(
            "split",
            "Micro-batches of half the size.",
            ScriptChange(split=2),
            equal_loss=False,
            why="" if not size % 2 else f"micro-batches of {size} cannot be halved",
            more=self.words(f"train.micro_batch={size // 2}"),
        )
        number = 2
        while number <= ranks:
            share = min(size, train.global_batch // number)
            yield Tried(
                "ranks" if number == 2 else f"ranks {number}",
                f"{number} processes, each with its share of the batch.",
                ScriptChange(),
                number,
                equal_loss=False,
                why="" if share and not train.global_batch % number else f"{number} ranks cannot share the batch",
                more=self.words(f"train.micro_batch={share}"),
            )
            number *= 2
        yield Tried("resume", f"A stop after step {middle(self.steps)}, and a resume.", ScriptChange())
        yield Tried(
            "evaluation",
            "An evaluation after every step.",
            ScriptChange(),
            why="" if self._loaded.data.eval else "the recipe has no [data.eval]",
            more=self.words("train.eval_by=run", "train.eval_every=1st", evaluates=True),
        )
        yield Tried(
            "clipping",
            f"Clipping to a norm of {_NO_CLIPPING:g}, and none.",
            ScriptChange(),
            more=self.words(
                *(["~train.clip_norm"] if self._clips else [f"train.clip_norm={_NO_CLIPPING}"]), clips=True
            ),
        )
        yield Tried("frozen", "One more module, which is not trained.", ScriptChange(frozen=True))
        yield Tried("scale", f"The loss × {SCALE:g}: the same updates.", ScriptChange(scale=SCALE))
        switched = toml_value(not train.activation_checkpointing)
        yield Tried(
            "checkpointing",
            "Activation checkpointing switched.",
            ScriptChange(checkpointing=True),
            more=self.words(f"train.activation_checkpointing={switched}"),
        )
        yield Tried("compile", "The model compiled (traced; kernels of the eager mode).", ScriptChange(compile=True))
        yield Tried("seed", "Other global seeds before the first forward pass.", ScriptChange(reseed=True))

    def resumed(self, at: int) -> Observed:
        """Trains `at` steps into a run's folder, and resumes the run."""
        with TemporaryDirectory(dir=self._folder) as kept:
            words = self.words("checkpoint.every=1st", "checkpoint.async_save=false", folder=kept)
            self.run(ScriptChange(), steps=at + 1, more=words)  # ends within the step after the checkpoint
            return self.run(ScriptChange(), steps=self.steps - at, more=words)
