"""Weights & Biases tracker: one W&B run per run folder, continued on resume; never blocks training."""

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import AfterValidator, Field

from ddpforge.builtin.extras import stored_id
from ddpforge.interfaces import Histogram, MediaKind, Tracker

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger("ddpforge")

Seconds = Annotated[float, Field(ge=0.001, le=86400)]


def _plain(value: str) -> str:
    if not value.isprintable() or any(c in "/\\#?%:" for c in value):
        raise ValueError("W&B accepts neither / \\ # ? % : nor control characters here")
    return value


Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_plain)]

# wandb's environment variables override the recipe (by default wandb does the opposite).
_ENVIRONMENT = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "run_group": "WANDB_RUN_GROUP",
    "run_tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
    "run_name": "WANDB_NAME",
    "run_job_type": "WANDB_JOB_TYPE",
    "run_notes": "WANDB_NOTES",
    "root_dir": "WANDB_DIR",
    "resume": "WANDB_RESUME",
    "init_timeout": "WANDB_INIT_TIMEOUT",
    "finish_timeout": "WANDB_FINISH_TIMEOUT",
}
_PROBE_SECONDS = 2


class WandbTracker(Tracker):
    """Mirrors the run to Weights & Biases, or to an offline run if the server is not reachable.

    wandb's environment variables override the recipe. The x axis is `trainer/step`.
    """

    # wandb's own step can only increase: rows that a resumed run repeats would be lost.

    def __init__(
        self,
        project: Annotated[Name, Field(description="W&B project.")],
        entity: Annotated[
            Name | None, Field(description="User or team that owns the project; absent: your default.")
        ] = None,
        group: Annotated[Name | None, Field(description="Group of the run.")] = None,
        tags: Annotated[tuple[str, ...], Field(description="Labels to find the run by.")] = (),
        mode: Annotated[
            Literal["online", "offline", "disabled"] | None,
            Field(description="Upload, record for `wandb sync`, or do nothing; absent: wandb's configuration."),
        ] = None,
        name: Annotated[str | None, Field(description="Displayed name of the run; absent: the recipe's.")] = None,
        job_type: Annotated[str | None, Field(description='Type of the run within its group, e.g. "pretrain".')] = None,
        notes: Annotated[str | None, Field(description="Longer description of the run.")] = None,
        checkpoints: Annotated[
            bool,
            Field(description="Log each checkpoint as an artifact that references its folder, without an upload."),
        ] = False,
        init_timeout: Annotated[
            Seconds, Field(description="Seconds to wait for the server before recording offline.")
        ] = 10,
        finish_timeout: Annotated[
            Seconds, Field(description="Maximum time of uploads after training, in seconds.")
        ] = 60,
    ) -> None:
        self._checkpoints = checkpoints
        self._options = {
            "project": project,
            "entity": entity,
            "run_group": group,
            "run_tags": tags or None,
            "mode": mode,
            "run_name": name,
            "run_job_type": job_type,
            "run_notes": notes,
            "init_timeout": init_timeout,
            "finish_timeout": finish_timeout,
        }

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Opens the W&B run of `folder`; an unreachable server costs at most about `init_timeout`."""
        for kind in ("data", "cache"):  # otherwise wandb fills the home directory
            os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str((folder / "wandb" / kind).absolute()))
        self._run = self._open(self._settings(name, folder), dict(config))
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")
        if resumed_at is not None:
            self.rewind(resumed_at)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queues the row; wandb's own process uploads it."""
        try:
            self._run.log({"trainer/step": step, **metrics})
        except Exception:
            _tear_down()
            raise

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Logs the value as wandb's Image, Histogram or Table; text as Html, which keeps line breaks."""
        media = _MEDIA[kind](value)
        self.log(step, {name: media})

    def checkpoint(self, step: int, folder: Path) -> None:
        """Logs a reference to the folder if the option `checkpoints` is set."""
        if not self._checkpoints:
            return
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        # No checksum: hashing gigabytes would delay training, and retention removes old folders anyway.
        artifact.add_reference(folder.absolute().as_uri(), name=folder.name, checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def rewind(self, step: int) -> None:
        """Logs the step that training resumed from; of two rows for one `trainer/step` the later one is valid."""
        self.log(step, {"trainer/resumed_at": step})

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Uploads the remaining data; marks the run as failed unless `state` is done or preempted."""
        try:
            self._run.summary.update({"state": state, **summary})
            self._run.finish(exit_code=0 if state in ("done", "preempted") else 1)
        except TimeoutError:
            logger.warning(
                "W&B: the upload is incomplete; complete it with: wandb sync %s", self._run.settings.sync_dir
            )
        finally:
            _tear_down()

    def _settings(self, name: str, folder: Path) -> "wandb.Settings":
        import wandb

        wanted = {
            "run_name": name,
            "run_id": _run_id(folder),
            "resume": "allow",
            "root_dir": str(folder),
            "silent": True,  # also skips the greeting, which waits for the server
            "console": "off",
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 2,  # seconds of records that a kill may lose
        } | {key: value for key, value in self._options.items() if value is not None}
        return wandb.Settings.model_validate(
            {
                key: value
                for key, value in wanted.items()
                if key in wandb.Settings.model_fields and not os.environ.get(_ENVIRONMENT.get(key, ""))
            }
        )

    def _open(self, settings: "wandb.Settings", config: dict[str, Any]) -> "wandb.Run":
        import wandb

        try:
            _check_server(wandb.setup(settings=settings).settings)
            run = wandb.init(config=config, settings=settings)
        except Exception as error:
            _tear_down()  # a failed init keeps the run's id in use
            settings.mode = "offline"
            run = wandb.init(config=config, settings=settings)
            reason = " ".join(str(error).split())
            logger.warning(
                "W&B: %s; recording offline, upload it later with: wandb sync %s", reason, run.settings.sync_dir
            )
            return run
        if run.settings.mode == "offline":
            logger.info("W&B: recording offline; upload it with: wandb sync %s", run.settings.sync_dir)
        elif run.url:
            logger.info("W&B: %s", run.url)
        return run


def _image(value: Any) -> Any:
    import wandb

    return wandb.Image(value)


def _histogram(value: Histogram) -> Any:
    import numpy as np
    import wandb

    return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))


def _text(value: str) -> Any:
    import wandb

    return wandb.Html(f"<pre>{escape(value)}</pre>", inject=False)


def _table(value: Any) -> Any:
    import wandb

    return wandb.Table(columns=list(value[0]), data=[list(row.values()) for row in value])


_MEDIA: Mapping[MediaKind, Callable[[Any], Any]] = {
    "image": _image,
    "histogram": _histogram,
    "text": _text,
    "table": _table,
}


def _run_id(folder: Path) -> str:
    """Returns the id of the run in `folder`: from the environment, the stored one or a new one; stores it first."""
    file = folder / "wandb.json"
    stored = stored_id(file, "id")
    run_id = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
    if run_id != stored:
        new = file.with_suffix(".tmp")
        new.write_text(json.dumps({"id": run_id}) + "\n")
        os.replace(new, file)
    return run_id


def _check_server(settings: "wandb.Settings") -> None:
    """Raises wandb.Error if the run cannot be online: there is no API key, or the server does not answer."""
    import wandb

    if settings.mode not in ("online", "shared"):
        return
    if not wandb.login(prompt=False, verify=False):
        raise wandb.Error("no API key (`wandb login` stores one)")

    url = urlsplit(settings.base_url)
    if url.scheme in getproxies():  # wandb connects to the proxy instead; `init_timeout` still applies
        return
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise wandb.Error(f"{settings.base_url} cannot be reached ({error})") from error


def _tear_down() -> None:
    """Ends wandb's own process, if it is still alive, and waits until it has written all data."""
    import wandb

    with suppress(Exception, SystemExit):  # wandb's exit hook would print a traceback
        wandb.teardown()
