"""MLflow tracker: one MLflow run per run folder, continued on resume; never blocks training."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.extras import stored_id
from ddpforge.errors import require
from ddpforge.interfaces import MediaKind, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MLflowTracker"]

_STATES = {"done": "FINISHED", "preempted": "KILLED"}  # all other states are FAILED
_MOST_PARAMS = 100  # in one request
_LONGEST_PARAM = 500  # characters, accepted by every server
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}  # mlflow's default is minutes

Name = Annotated[str, Field(min_length=1, max_length=256)]


class MLflowTracker(Tracker):
    """Mirrors the run to MLflow in a separate thread: metrics by step, the recipe as parameters and `config.json`.

    MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID override the recipe. Displayed values are artifacts
    below `shown/`. MLflow cannot delete metrics: after a rollback or a resume, a metric has two values for a step, and
    the later one is valid. The tag `resumed_at` contains the step.
    """

    def __init__(
        self,
        experiment: Annotated[Name, Field(description="MLflow experiment; created if it does not exist.")],
        uri: Annotated[
            Name | None, Field(description='Tracking server, or "sqlite:///FILE"; absent: mlflow\'s configuration.')
        ] = None,
        tags: Annotated[Mapping[str, str], Field(description="Tags of the run.")] = {},
        finish_timeout: Annotated[
            float, Field(ge=0.001, le=86400, description="Maximum time of uploads after training, in seconds.")
        ] = 60,
    ) -> None:
        require("mlflow", "mlflow")
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or uri
        self._tags, self._finish_timeout = dict(tags), finish_timeout

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Opens the MLflow run of `folder`; an unreachable server costs at most half a minute."""
        self._connect()
        self._run = self._open(name, folder / "mlflow.json", config)
        self._client.log_dict(self._run, json.loads(json.dumps(config, default=str)), "config.json")
        if resumed_at is not None:
            self.rewind(resumed_at)

    def join(self, folder: Path) -> bool:
        """Opens the run whose id the folder has; False if it has none."""
        run = os.environ.get("MLFLOW_RUN_ID") or stored_id(folder / "mlflow.json", "run_id")
        if run is None:
            return False
        self._connect()
        self._run = run
        return True

    def leave(self) -> None:
        """Waits until all is sent."""
        try:
            deadline = time.monotonic() + self._finish_timeout
            while self._sent:
                self._sent.popleft().result(max(0.0, deadline - time.monotonic()))
        finally:
            self._queue.shutdown(wait=False, cancel_futures=True)

    def _connect(self) -> None:
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        self._queue = ThreadPoolExecutor(1, "mlflow")
        self._sent: deque[Future[None]] = deque()

    def _open(self, name: str, file: Path, config: Mapping[str, Any]) -> str:
        """Returns the id of the run: from the environment, the stored one, or of a new run; stores it before use."""
        stored = stored_id(file, "run_id")
        run = os.environ.get("MLFLOW_RUN_ID") or stored or self._create(name)
        self._client.update_run(run, status="RUNNING")
        if run != stored:
            new = file.with_suffix(".tmp")
            new.write_text(json.dumps({"run_id": run}) + "\n")
            os.replace(new, file)
            _log_params(self._client, run, config)
        return run

    def _create(self, name: str) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        return str(self._client.create_run(experiment, tags=self._tags, run_name=name).info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the row."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        row = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._later(lambda: self._client.log_batch(self._run, metrics=row))

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Queues an artifact: PNG, text, or JSON."""
        place = f"shown/{name}/step-{step:09}"
        if kind == "image":
            self._later(lambda: self._client.log_image(self._run, value, f"{place}.png"))
        elif kind == "text":
            self._later(lambda: self._client.log_text(self._run, value, f"{place}.txt"))
        else:
            if kind == "histogram":
                content = asdict(value)
            else:  # a table, in the form that MLflow displays
                content = {"columns": list(value[0]), "data": [list(row.values()) for row in value]}
            self._later(lambda: self._client.log_dict(self._run, content, f"{place}.json"))

    def rewind(self, step: int) -> None:
        """Sets the tag `resumed_at`; metrics that are logged from now on supersede earlier ones."""
        self._later(lambda: self._client.set_tag(self._run, "resumed_at", str(step)))

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Waits until all is sent, and sets the run's status: FINISHED, KILLED if it was stopped, or FAILED."""
        self._later(lambda: self._client.set_tag(self._run, "state", state))
        self._later(lambda: self._client.set_terminated(self._run, _STATES.get(state, "FAILED")))
        self.leave()

    def _later(self, send: Callable[[], Any]) -> None:
        """Queues a request; raises the error of an earlier request."""
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        self._sent.append(self._queue.submit(send))


def _log_params(client: MlflowClient, run: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    flat = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(config)]
    for start in range(0, len(flat), _MOST_PARAMS):
        client.log_batch(run, params=flat[start : start + _MOST_PARAMS])


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
