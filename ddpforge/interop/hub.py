"""Uploads to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpforge.builtin.datasets.files import library
from ddpforge.errors import EnvironmentProblem, UsageError

__all__ = ["Hub"]


class Hub:
    """A repository of models on the hub (HF_ENDPOINT names another), made where it is not there.

    The token is that of `hf auth login`, or HF_TOKEN. Raises UsageError for a name that is none, and EnvironmentProblem
    where the hub refuses.
    """

    def __init__(self, name: str, *, private: bool = False) -> None:
        self.name = name
        self._hub: Any = library("huggingface_hub", "hub")
        if name.count("/") != 1:
            raise UsageError(f"--push-to-hub {name}: expected USER/NAME")
        with self._told():
            self._api = self._hub.HfApi()
            self._api.create_repo(name, exist_ok=True, private=private)

    def push(self, files: Mapping[str, Path], message: str) -> str:
        """Uploads files, by their names there, in one commit; returns where it can be looked at."""
        adds = [
            self._hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()
        ]
        with self._told():
            commit: Any = self._api.create_commit(self.name, adds, commit_message=message)
        return str(commit.commit_url)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._hub.errors.HFValidationError as error:
            raise UsageError(f"--push-to-hub {self.name}: {error}") from error
        except (OSError, self._hub.errors.HTTPError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise EnvironmentProblem(
                f"the hub refuses {self.name}: {said}",
                hints=["`hf auth login`, or HF_TOKEN, with a token that may write there", "is the hub within reach?"],
            ) from error
