"""Collects errors, each at its key of the recipe, so that a run reports all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpforge.components.errors import ComponentFailed, NotImported, is_raised_outside
from ddpforge.errors import (
    Diagnostic,
    ExitCode,
    ForgeError,
    PluginError,
    RecipeError,
    SetupError,
    SourceSpan,
    UsageError,
    leading_key,
    says_memory_is_full,
)
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.report import KeyPath, dotted
from ddpforge.training.stages import NotBuilt

__all__ = ["Problems"]


class Problems:
    """Errors found in `loaded` so far, and the components that are not checked because their code is not imported."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self.not_imported: list[str] = []
        self._loaded = loaded
        self._problems: list[Diagnostic] = []
        self._errors: list[ForgeError] = []

    def __len__(self) -> int:
        return len(self._problems)

    @contextmanager
    def at(self, *path: str, faults: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Adds an error raised inside, at the key that it names or at `path`; `faults` count as errors of the recipe.

        An unexpected error of a component is added with its traceback, so that the other errors are found, too.
        Code inside that uses a component that could not be built ends without a new problem: the reason is one already.
        """
        try:
            yield
        except NotBuilt:
            return
        except NotImported as error:
            if error.use not in self.not_imported:  # within another component's options
                self.not_imported.append(error.use)
        except RecipeError as error:
            self._problems += error.problems
            self._errors.append(error)
        except ForgeError as error:
            self.add(path, error)
        except faults as error:
            self.add(path, UsageError(str(error)))
        except Exception as error:
            if says_memory_is_full(error) or not is_raised_outside(error):
                raise
            self.add(path, ComponentFailed(".".join(path), error))

    def has(self, *path: str) -> bool:
        """True if there is a problem at this key, or in a key of its table."""
        key = dotted(path)
        return any(problem.key == key or problem.key.startswith(f"{key}.") for problem in self._problems)

    def add(self, path: KeyPath, error: ForgeError) -> None:
        """Adds an error at the recipe's key that the error names, or at `path`."""
        named = error.key or leading_key(error.message)
        key = self._key(path, named, is_own=not error.key and "." not in named)
        self._problems.append(self._loaded.problem(key, error.message, *error.hints, trace=error.trace))
        self._errors.append(error)

    def _key(self, path: KeyPath, named: str, *, is_own: bool) -> KeyPath:
        """Returns the key that an error names, in full or below `path`; if the recipe lacks the key, its table.

        Returns `path` if the recipe has neither. With `is_own`, only a key below `path` counts.
        """
        names = tuple(named.split("."))
        above = (names[:end] for end in range(len(names) - 1, 0, -1))
        candidates = ((*path, *names), *(() if is_own else (names, *above)))
        return next((key for key in candidates if key in self._loaded.origins), path)

    def raise_if_any(self) -> None:
        """Raises the errors as a RecipeError with every problem; a single error of the machine is raised unchanged."""
        if not self._problems:
            return
        of_machine = [isinstance(error, SetupError) for error in self._errors]
        if len(self._errors) == 1 and of_machine[0] and not isinstance(self._errors[0], PluginError):
            self._errors[0].place = self._problems[0].place
            raise self._errors[0]
        error = RecipeError(sorted(dict.fromkeys(self._problems), key=_position))
        if all(found.exit_code == ExitCode.ENVIRONMENT for found in self._errors):
            error.exit_code = ExitCode.ENVIRONMENT
        raise error


def _position(problem: Diagnostic) -> tuple[bool, str, int, int]:
    place = problem.place or SourceSpan("")
    return not place.line, place.file, place.line, place.column
