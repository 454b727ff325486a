"""Collects what cannot work, each at its place in the recipe, so that all of it is told in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ddpforge.components.errors import NotImported
from ddpforge.errors import (
    EnvironmentProblem,
    ExitCode,
    ForgeError,
    Place,
    PluginError,
    Problem,
    RecipeError,
    UsageError,
)
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.origins import KeyPath

__all__ = ["Findings"]


class Findings:
    """The errors found in `loaded` so far, and the code that is not imported, of which nothing is known."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self.loaded = loaded
        self.not_imported: list[str] = []
        self._problems: list[Problem] = []
        self._errors: list[ForgeError] = []

    @contextmanager
    def noting(self, *path: str, faults: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Notes an error in here, at its place in the recipe; `faults` are other exceptions that are the recipe's."""
        try:
            yield
        except NotImported as error:
            if error.use not in self.not_imported:  # within another component's options
                self.not_imported.append(error.use)
        except RecipeError as error:
            self._problems += error.problems
            self._errors.append(error)
        except ForgeError as error:
            self.note(path, error)
        except faults as error:
            self.note(path, UsageError(str(error)))

    def note(self, path: KeyPath, error: ForgeError) -> None:
        """Notes an error in what stands at `path` of the recipe."""
        key = self._blamed(path, error.message)
        self._problems.append(self.loaded.problem(key, error.message, *error.hints, trace=error.trace))
        self._errors.append(error)

    def _blamed(self, path: KeyPath, message: str) -> KeyPath:
        """The key that the message names, in full or as one below `path`; `path` itself where it names none."""
        words = re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", message)
        keys = [tuple(word.split(".")) for word in words if "." in word]
        keys += [(*path, word) for word in words if word != "use"]
        origins = self.loaded.origins
        return next((key for key in keys if key in origins and (len(key) > len(path) or key == path)), path)

    @property
    def found(self) -> bool:
        """True if anything cannot work."""
        return bool(self._problems)

    def report(self) -> None:
        """Raises what was found: one error of this machine as it is, all else as a RecipeError with every problem."""
        if not self._problems:
            return
        of_machine = [isinstance(error, EnvironmentProblem) for error in self._errors]
        if len(self._errors) == 1 and of_machine[0] and not isinstance(self._errors[0], PluginError):
            raise self._errors[0]
        error = RecipeError(sorted(dict.fromkeys(self._problems), key=_position))
        if all(found.exit_code == ExitCode.ENVIRONMENT for found in self._errors):
            error.exit_code = ExitCode.ENVIRONMENT
        raise error


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    place = problem.place or Place("")
    return not place.line, place.file, place.line, place.column
